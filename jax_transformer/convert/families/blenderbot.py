"""BlenderbotForConditionalGeneration: dialogue (Roller et al. 2021)."""

from jax_transformer.convert.families import bart_lineage

FAMILY = bart_lineage.family(
    "blenderbot",
    "BlenderbotForConditionalGeneration",
    "blenderbot",
    defaults={
        "vocab_size": 8008,
        "d_model": 2560,
        **bart_lineage.sizes(2, 32, 10_240),
        "decoder_layers": 24,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "decoder_start_token_id": 1,
    },
    tokenizer="BlenderbotTokenizer",
)
