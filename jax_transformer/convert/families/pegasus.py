"""PegasusForConditionalGeneration: models for summaries (Zhang et al. 2020)."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.families import bart_lineage
from jax_transformer.convert.families.family import Family, TokenizerFiles, read_tokenizer_json

if TYPE_CHECKING:
    from jax_transformer.data.tokenizers import TokenizerJson


def _generation(config: TransformerConfig) -> dict[str, Any]:
    return {
        "decoder_start_token_id": config.bos_id,
        "eos_token_id": config.eos_id,
        "forced_eos_token_id": config.eos_id,
        "max_length": config.max_length,
        "pad_token_id": config.pad_id,
    }


def _read_tokenizer(folder: Path, config: TransformerConfig) -> "TokenizerJson":
    return read_tokenizer_json(folder, config, source_suffix=("eos_id",), target_suffix=("eos_id",))


def _tokenizer_config(tokenizer: "TokenizerJson", config: TransformerConfig) -> bytes:
    clean_up = tokenizer.settings().get("clean_up_spaces", False)
    values = {
        "tokenizer_class": "PegasusTokenizer",
        "clean_up_tokenization_spaces": clean_up,
        "model_max_length": config.max_length,
    }
    return (json.dumps(values, indent=2) + "\n").encode()


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
    tokenizer=TokenizerFiles(
        kind="tokenizer_json",
        names=("tokenizer.json",),
        read=_read_tokenizer,
        config=_tokenizer_config,
    ),
)
