"""T5ForConditionalGeneration: T5 (Raffel et al. 2020), T5 v1.1, Flan-T5 (Chung et al. 2022), ByT5.

T5 multiplies hidden states by d_model**-0.5 before its tied output projection; T5 v1.1 and Flan-T5
have an output matrix of their own and no factor.
"""

from jax_transformer.convert.families import t5_lineage, tokenizer_files
from jax_transformer.convert.families.family import Family

FAMILY = Family(
    model_type="t5",
    architecture="T5ForConditionalGeneration",
    preset="t5",
    layout=t5_lineage.layout("t5"),
    generation=t5_lineage.generation,
    fields=t5_lineage.FIELDS,
    words={
        **t5_lineage.WORDS,
        "scale_decoder_outputs": {
            True: {"output_scale": "inverse_sqrt_d_model"},
            False: {"output_scale": "none"},
        },
    },
    fixed=t5_lineage.FIXED,
    defaults={**t5_lineage.DEFAULTS, "feed_forward_proj": "relu"},
    computed={
        **t5_lineage.COMPUTED,
        # config.json of transformers 4 has no such key; there, an untied model has no factor.
        "scale_decoder_outputs": lambda values: values["tie_word_embeddings"] is not False,
    },
    is_tied=t5_lineage.is_tied,
    tokenizer=tokenizer_files.T5,
)
