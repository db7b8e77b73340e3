"""Small UMT5 models, and what no UMT5 can be."""

from tests.convert.families import t5_lineage
from tests.convert.families.case import Case
from tests.convert.families.t5_lineage import (
    IMPOSSIBLE,
    REFUSED,
    REQUIRED,
    one_head,
    seven_heads,
    three_heads,
)


def finish(model, values):
    """Take away the factor of transformers 5 that models with their own output never had."""
    t5_lineage.finish(model, values)
    if values.get("tie_word_embeddings") is False:
        model.model_dim = 1  # the factor is model_dim**-0.5


CASE = Case(
    shapes={
        "tied": three_heads(num_layers=3),
        "own_output": one_head(tie_word_embeddings=False),
        "own_output_relu": seven_heads(feed_forward_proj="relu", tie_word_embeddings=False),
    },
    refused=REFUSED,
    required=REQUIRED,
    impossible=(
        *IMPOSSIBLE,
        {"relative_attention_bias": "shared"},
        {"output_scale": "inverse_sqrt_d_model", "output_projection": "linear"},
    ),
    finish=finish,
    float32=("wo.weight",),
)
