"""M2M100ForConditionalGeneration: M2M100 (Fan et al. 2021) and the dense NLLB (2022) models."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.buffers import PositionTable
from jax_transformer.convert.families import bart_lineage
from jax_transformer.convert.families.family import generation_without_forced_end
from jax_transformer.errors import InputError

EXTRA_ROWS = 2  # of the table in transformers, whatever the id of padding is


class _PositionTable(PositionTable):
    """The table [max_length + 2, d_model] as older files hold it: padding has zeros."""

    def __call__(self, config: TransformerConfig) -> np.ndarray:
        table = super().__call__(config)
        table[config.pad_id : config.pad_id + 1] = 0.0
        return table

    def rows(self, config: TransformerConfig) -> int:
        return config.max_length + EXTRA_ROWS


POSITIONS = _PositionTable(("length", "d_model"))


def position_offset(fields: Mapping[str, Any]) -> dict[str, int]:
    """Return the row of the first token, after that of padding: padding is not counted."""
    pad_id = fields["pad_id"]
    if fields["bos_id"] == pad_id:
        raise InputError(
            f"config.json: decoder_start_token_id={pad_id} must differ from pad_token_id: the "
            "positions of this family do not count padding"
        )
    return {"position_offset": max(0, pad_id) + 1}  # the config refuses a negative id itself


FAMILY = bart_lineage.family(
    "m2m_100",
    "M2M100ForConditionalGeneration",
    "m2m100",
    layout=bart_lineage.layout("m2m_100", POSITIONS, "weights"),
    generation=generation_without_forced_end,
    defaults={
        "vocab_size": 128_112,
        "activation_function": "relu",
        "scale_embedding": True,
        "attention_dropout": 0.1,
        "decoder_start_token_id": 2,
        "encoder_layerdrop": 0.05,
        "decoder_layerdrop": 0.05,
    },
    implied=position_offset,
    tokenizer="M2M100Tokenizer",
)
