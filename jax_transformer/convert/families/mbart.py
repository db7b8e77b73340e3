"""MBartForConditionalGeneration: translation, 25 languages (Liu et al. 2020) and mBART-50."""

from jax_transformer.convert.families import bart_lineage, tokenizer_files
from jax_transformer.convert.families.family import Family

FAMILY = Family(
    model_type="mbart",
    architecture="MBartForConditionalGeneration",
    preset="mbart",
    layout=bart_lineage.layout("mbart"),
    generation=bart_lineage.generation,
    fields=bart_lineage.SHARED_FIELDS,
    words=bart_lineage.WORDS,
    fixed=bart_lineage.FIXED,
    training_only=bart_lineage.TRAINING_ONLY,
    defaults={**bart_lineage.DEFAULTS, "bos_token_id": 0},
    # Without a start id, generation starts from BOS. In training, transformers moves the last token
    # of a target to its front: the whole target is then CODE, text, EOS, CODE, whose first token is
    # the config's `bos_id`.
    computed={"decoder_start_token_id": lambda values: values.get("bos_token_id")},
    tokenizer=tokenizer_files.MBART,
)
