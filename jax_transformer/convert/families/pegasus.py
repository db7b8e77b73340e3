"""PegasusForConditionalGeneration: models for summaries (Zhang et al. 2020)."""

from jax_transformer.convert.families import bart_lineage, tokenizer_files
from jax_transformer.convert.families.family import Family

FAMILY = Family(
    model_type="pegasus",
    architecture="PegasusForConditionalGeneration",
    preset="pegasus",
    layout=bart_lineage.layout("pegasus", bart_lineage.sinusoids),
    saves_buffers=True,
    generation=bart_lineage.generation,
    fields=bart_lineage.SHARED_FIELDS,
    words=bart_lineage.WORDS,
    fixed=bart_lineage.FIXED,
    training_only=bart_lineage.TRAINING_ONLY,
    defaults={
        **bart_lineage.DEFAULTS,
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
        "eos_token_id": 1,
    },
    tokenizer=tokenizer_files.PEGASUS,
)
