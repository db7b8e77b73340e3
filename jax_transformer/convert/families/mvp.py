"""MvpForConditionalGeneration: supervised text generation (Tang et al. 2023), without prompts."""

from jax_transformer.convert.families import bart_lineage, tokenizer_files
from jax_transformer.convert.families.family import Family

FAMILY = Family(
    model_type="mvp",
    architecture="MvpForConditionalGeneration",
    preset="bart",
    layout=bart_lineage.layout("mvp"),
    generation=bart_lineage.generation,
    fields=bart_lineage.SHARED_FIELDS,
    words=bart_lineage.WORDS,
    # Prompts are further keys and values of every attention.
    fixed={**bart_lineage.FIXED, "use_prompt": (False,)},
    training_only=bart_lineage.TRAINING_ONLY,
    defaults={**bart_lineage.DEFAULTS, "decoder_start_token_id": 2},
    tokenizer=tokenizer_files.MVP,
)
