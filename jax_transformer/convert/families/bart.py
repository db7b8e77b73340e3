"""BartForConditionalGeneration: denoised text, summaries (Lewis et al. 2020)."""

from jax_transformer.convert.families import bart_lineage, tokenizer_files
from jax_transformer.convert.families.family import Family

FAMILY = Family(
    model_type="bart",
    architecture="BartForConditionalGeneration",
    preset="bart",
    layout=bart_lineage.layout("bart"),
    generation=bart_lineage.generation,
    fields=bart_lineage.SHARED_FIELDS,
    words=bart_lineage.WORDS,
    fixed=bart_lineage.FIXED,
    training_only=bart_lineage.TRAINING_ONLY,
    defaults={**bart_lineage.DEFAULTS, "decoder_start_token_id": 2},
    tokenizer=tokenizer_files.BART,
)
