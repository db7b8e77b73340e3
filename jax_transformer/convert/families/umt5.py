"""UMT5ForConditionalGeneration: mT5 with relative biases in every layer (Chung et al. 2023).

transformers 5 multiplies the hidden states of every UMT5 by d_model**-0.5 before the output
projection. The published models have an output matrix of their own and were trained without this
factor: here, only a tied projection has it.
"""

from jax_transformer.convert.families import t5_lineage

FAMILY = t5_lineage.family(
    "umt5",
    "UMT5ForConditionalGeneration",
    "umt5",
    words={
        **t5_lineage.WORDS,
        "tie_word_embeddings": {
            True: {"output_projection": "tied", "output_scale": "inverse_sqrt_d_model"},
            False: {"output_projection": "linear", "output_scale": "none"},
        },
    },
    feed_forward_proj="gated-gelu",
)
