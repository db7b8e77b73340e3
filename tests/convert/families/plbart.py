"""Small PLBart models, and what no PLBart model can be."""

from tests.convert.families.bart_lineage import usual_case

CASE = usual_case(
    "gelu",
    "swish",
    impossible={
        "norm_placement": "pre",
        "final_norm": True,
        "embedding_norm": False,
        "position_offset": 0,
    },
    # Without a start id, BOS is the first.
    refused={"decoder_start_token_id": 53},
)
