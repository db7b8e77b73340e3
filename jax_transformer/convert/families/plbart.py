"""PLBartForConditionalGeneration: programs and their descriptions (Ahmad et al. 2021)."""

from jax_transformer.convert.families import bart_lineage

FAMILY = bart_lineage.family(
    "plbart",
    "PLBartForConditionalGeneration",
    "bart",
    defaults={
        "vocab_size": 50_005,
        "d_model": 768,
        **dict.fromkeys(("encoder_layers", "decoder_layers"), 6),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 12),
        **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 3072),
        "scale_embedding": True,
        "attention_dropout": 0.1,
        "bos_token_id": 0,
    },
    computed=bart_lineage.START_FROM_BOS,
)
