"""Small PLBart models, and what no PLBart model can be."""

from tests.convert.families.bart_lineage import (
    IMPOSSIBLE,
    REFUSED,
    ids,
    one_head_unscaled,
    seven_heads,
    three_heads,
)
from tests.convert.families.case import Case

CASE = Case(
    shapes={
        "three_heads": three_heads(activation_function="gelu"),
        "one_head_unscaled": one_head_unscaled(**ids(pad=5, eos=11)),
        "other_ids": seven_heads(
            activation_function="swish",
            attention_dropout=0.1,
            **ids(pad=41, eos=3, start=4),
        ),
    },
    # Without a start id, BOS is the first.
    refused=REFUSED | {"decoder_start_token_id": 53},
    required=("d_model", "vocab_size", "max_position_embeddings"),
    impossible=(
        *IMPOSSIBLE,
        {"norm_placement": "pre"},
        {"final_norm": True},
        {"embedding_norm": False},
        {"position_offset": 0},
    ),
)
