"""BlenderbotForConditionalGeneration: dialogue (Roller et al. 2021)."""

from jax_transformer.convert.families import bart_lineage

FAMILY = bart_lineage.family(
    "blenderbot",
    "BlenderbotForConditionalGeneration",
    "blenderbot",
    defaults={
        "vocab_size": 8008,
        "d_model": 2560,
        "encoder_layers": 2,
        "decoder_layers": 24,
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 32),
        **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 10_240),
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "decoder_start_token_id": 1,
    },
    tokenizer="BlenderbotTokenizer",
)
