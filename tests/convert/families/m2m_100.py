"""Small M2M100 models, and what no M2M100 model can be."""

from tests.convert.families.bart_lineage import (
    IMPOSSIBLE,
    REFUSED,
    ids,
    one_head_unscaled,
    seven_heads,
    tensor2tensor_sinusoids,
    three_heads,
)
from tests.convert.families.case import Case

CASE = Case(
    shapes={
        "three_heads": three_heads(activation_function="relu"),
        "one_head_unscaled": one_head_unscaled(**ids(pad=5, eos=11, start=4)),
        # An odd width: the last column of the position table is zero.
        "other_ids": seven_heads(
            d_model=35, activation_function="gelu", **ids(pad=9, eos=3, start=4)
        ),
    },
    # Padding has no position: it cannot begin targets.
    refused=REFUSED | {"decoder_start_token_id": 1},
    required=("d_model", "vocab_size", "max_position_embeddings"),
    impossible=(
        *(change for change in IMPOSSIBLE if "output_bias" not in change),
        {"output_bias": True},
        {"norm_placement": "post"},
        {"final_norm": False},
        {"position_offset": 0},
    ),
    tables={"embed_positions.weights": tensor2tensor_sinusoids},
)
