"""Small BART models, and what no BART model can be."""

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
)
