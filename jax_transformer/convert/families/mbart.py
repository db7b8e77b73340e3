"""MBartForConditionalGeneration: translation, 25 languages (Liu et al. 2020) and mBART-50."""

from jax_transformer.convert.families import bart_lineage

FAMILY = bart_lineage.family(
    "mbart",
    "MBartForConditionalGeneration",
    "mbart",
    defaults={"bos_token_id": 0},
    computed=bart_lineage.START_FROM_BOS,
    tokenizer="MBartTokenizer",
)
