"""Small mBART models, and what no mBART model can be."""

from tests.convert.families.bart_lineage import usual_case

CASE = usual_case(
    "relu",
    "gelu",
    impossible={
        "norm_placement": "post",
        "final_norm": False,
        "embedding_norm": False,
        "position_offset": 0,
    },
    # Without a start id, BOS is the first.
    refused={"decoder_start_token_id": 53},
)
