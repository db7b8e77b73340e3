"""MarianMTModel: the models of Marian, for example opus-mt (Junczys-Dowmunt et al. 2018)."""

from jax_transformer.convert.families import bart_lineage
from jax_transformer.convert.families.family import flag, generation

FAMILY = bart_lineage.family(
    "marian",
    "MarianMTModel",
    "marian",
    layout=bart_lineage.layout("marian", bart_lineage.SINUSOIDS),
    # The decoder starts from padding, but must never generate it.
    generation=lambda config: {"bad_words_ids": [[config.pad_id]], **generation(config)},
    fields={
        "vocab_size": "src_vocab_size",
        "decoder_vocab_size": "tgt_vocab_size",
        **bart_lineage.FIELDS,
    },
    words={
        **bart_lineage.WORDS,
        "share_encoder_decoder_embeddings": flag("token_embeddings", "shared", "separate"),
    },
    defaults={
        "vocab_size": 58_101,
        "share_encoder_decoder_embeddings": True,
        **dict.fromkeys(("pad_token_id", "decoder_start_token_id"), 58_100),
        "eos_token_id": 0,
    },
    computed={"decoder_vocab_size": lambda values: values.get("vocab_size")},
    uses_stored_positions=True,
    tokenizer="MarianTokenizer",
)
