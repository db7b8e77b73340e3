"""Small mT5 models, and what no mT5 can be."""

from tests.convert.families.case import Case
from tests.convert.families.t5_lineage import (
    IMPOSSIBLE,
    REFUSED,
    REQUIRED,
    finish,
    one_head,
    seven_heads,
    three_heads,
)

CASE = Case(
    shapes={
        "own_output": three_heads(tie_word_embeddings=False),
        "tied": one_head(),
        "relu": seven_heads(feed_forward_proj="relu", tie_word_embeddings=False),
    },
    refused=REFUSED,
    required=REQUIRED,
    impossible=(
        *IMPOSSIBLE,
        {"relative_attention_bias": "per_layer"},
        {"output_scale": "inverse_sqrt_d_model"},
    ),
    finish=finish,
    float32=("wo.weight",),
)
