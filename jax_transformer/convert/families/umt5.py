"""UMT5ForConditionalGeneration: mT5 with relative biases in every layer (Chung et al. 2023).

transformers 5 multiplies the hidden states of every UMT5 by d_model**-0.5 before the output
projection. The published models have an output matrix of their own and were trained without this
factor: here, only a tied projection has it.
"""

from jax_transformer.convert.families import t5_lineage, tokenizer_files
from jax_transformer.convert.families.family import Family

FAMILY = Family(
    model_type="umt5",
    architecture="UMT5ForConditionalGeneration",
    preset="umt5",
    layout=t5_lineage.layout("umt5"),
    generation=t5_lineage.generation,
    fields=t5_lineage.FIELDS,
    words={
        **t5_lineage.WORDS,
        "tie_word_embeddings": {
            True: {"output_projection": "tied", "output_scale": "inverse_sqrt_d_model"},
            False: {"output_projection": "linear", "output_scale": "none"},
        },
    },
    fixed=t5_lineage.FIXED,
    defaults={**t5_lineage.DEFAULTS, "feed_forward_proj": "gated-gelu"},
    computed=t5_lineage.COMPUTED,
    is_tied=t5_lineage.is_tied,
    tokenizer=tokenizer_files.T5,
)
