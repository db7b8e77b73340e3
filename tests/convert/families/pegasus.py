"""Small Pegasus models, and what no Pegasus model can be."""

from tests.convert.families.bart_lineage import (
    IMPOSSIBLE,
    REFUSED,
    ids,
    one_head_unscaled,
    seven_heads,
    sinusoids,
    three_heads,
)
from tests.convert.families.case import Case

RATES = {"attention_dropout": 0.1, "activation_dropout": 0.1}

CASE = Case(
    shapes={
        "three_heads": three_heads(activation_function="relu", **RATES),
        "one_head_unscaled": one_head_unscaled(**RATES),
        "other_ids": seven_heads(
            activation_function="swish", **ids(pad=41, eos=3, start=2), **RATES
        ),
    },
    refused=REFUSED,
    required=("d_model", "vocab_size", "max_position_embeddings"),
    impossible=(*IMPOSSIBLE, {"norm_placement": "post"}, {"final_norm": False}),
    tables={"embed_positions.weight": sinusoids},
)
