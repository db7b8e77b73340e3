"""Small Blenderbot models, and what no Blenderbot model can be."""

from tests.convert.families.bart_lineage import usual_case

CASE = usual_case(
    "gelu",
    "relu",
    impossible={
        "norm_placement": "post",
        "final_norm": False,
        "embedding_norm": True,
        "position_offset": 2,
    },
)
