"""PegasusForConditionalGeneration: models for summaries (Zhang et al. 2020)."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.families import bart_lineage
from jax_transformer.convert.families.family import Family, TokenizerFiles, read_tokenizer_json

if TYPE_CHECKING:
    from jax_transformer.data.tokenizers import TokenizerJson


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
    generation=bart_lineage.generation,
    fields=bart_lineage.SHARED_FIELDS,
    words=bart_lineage.WORDS,
    fixed=bart_lineage.FIXED,
    training_only=bart_lineage.TRAINING_ONLY,
    defaults={
        **bart_lineage.DEFAULTS,
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
