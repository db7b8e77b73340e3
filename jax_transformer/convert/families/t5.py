"""T5ForConditionalGeneration: T5 (Raffel et al. 2020), T5 v1.1, Flan-T5 (Chung et al. 2022), ByT5.

T5 multiplies hidden states by d_model**-0.5 before its tied output projection; T5 v1.1 and Flan-T5
have an output matrix of their own and no factor.
"""

from jax_transformer.convert.families import t5_lineage

FAMILY = t5_lineage.family(
    "t5",
    "T5ForConditionalGeneration",
    "t5",
    defaults={
        "vocab_size": 32_128,
        "num_heads": 8,
        "d_ff": 2048,
        "num_layers": 6,
        "feed_forward_proj": "relu",
    },
    **t5_lineage.SCALED,
)
