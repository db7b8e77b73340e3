"""MBartForConditionalGeneration: translation, 25 languages (Liu et al. 2020) and mBART-50."""

from jax_transformer.convert.families import bart_lineage

FAMILY = bart_lineage.family(
    "mbart",
    "MBartForConditionalGeneration",
    "mbart",
    defaults={"bos_token_id": 0},
    # Without a start id, generation starts from BOS. In training, transformers moves the last token
    # of a target to its front: the whole target is then CODE, text, EOS, CODE, whose first token is
    # the config's `bos_id`.
    computed={"decoder_start_token_id": lambda values: values.get("bos_token_id")},
    tokenizer="mbart",
)
