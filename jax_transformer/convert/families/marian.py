"""MarianMTModel: translation models of Marian, as opus-mt (Junczys-Dowmunt et al. 2018)."""

from typing import Any

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.families import bart_lineage
from jax_transformer.convert.families.family import Family, generation

LAYOUT = bart_lineage.layout("marian", bart_lineage.SINUSOIDS)


def _generation(config: TransformerConfig) -> dict[str, Any]:
    # The decoder starts from padding, but must never generate it.
    return {"bad_words_ids": [[config.pad_id]], **generation(config)}


FAMILY = Family(
    model_type="marian",
    architecture="MarianMTModel",
    preset="marian",
    layout=LAYOUT,
    generation=_generation,
    fields={
        "vocab_size": "src_vocab_size",
        "decoder_vocab_size": "tgt_vocab_size",
        **bart_lineage.FIELDS,
    },
    words={
        **bart_lineage.WORDS,
        "share_encoder_decoder_embeddings": {
            True: {"token_embeddings": "shared"},
            False: {"token_embeddings": "separate"},
        },
    },
    fixed=bart_lineage.FIXED,
    training_only=bart_lineage.TRAINING_ONLY,
    defaults={"share_encoder_decoder_embeddings": True},
    computed={"decoder_vocab_size": lambda values: values.get("vocab_size")},
    tokenizer="MarianTokenizer",
)
