"""Small MVP models, and what no MVP model can be."""

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
    refused={"use_prompt": True},
)
