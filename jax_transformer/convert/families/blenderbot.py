"""BlenderbotForConditionalGeneration: dialogue (Roller et al. 2021)."""

from jax_transformer.convert.families import bart_lineage

FAMILY = bart_lineage.family(
    "blenderbot",
    "BlenderbotForConditionalGeneration",
    "blenderbot",
    defaults={"pad_token_id": 0, "decoder_start_token_id": 1},
    tokenizer="BlenderbotTokenizer",
)
