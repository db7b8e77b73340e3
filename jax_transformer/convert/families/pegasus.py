"""PegasusForConditionalGeneration: models for summaries (Zhang et al. 2020)."""

from typing import Any

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.families import bart_lineage, tokenizer_files
from jax_transformer.convert.families.family import Family


def _generation(config: TransformerConfig) -> dict[str, Any]:
    return {
        "decoder_start_token_id": config.bos_id,
        "eos_token_id": config.eos_id,
        "forced_eos_token_id": config.eos_id,
        "max_length": config.max_length,
        "pad_token_id": config.pad_id,
    }


FAMILY = Family(
    model_type="pegasus",
    architecture="PegasusForConditionalGeneration",
    preset="pegasus",
    layout=bart_lineage.layout("pegasus", bart_lineage.sinusoids),
    saves_buffers=True,
    generation=_generation,
    fields={"vocab_size": ("src_vocab_size", "tgt_vocab_size"), **bart_lineage.FIELDS},
    words=bart_lineage.WORDS,
    fixed=bart_lineage.FIXED,
    # Those of PegasusConfig.
    defaults={
        "activation_function": "gelu",
        "scale_embedding": False,
        "dropout": 0.1,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
        "eos_token_id": 1,
    },
    tokenizer=tokenizer_files.PEGASUS,
)
