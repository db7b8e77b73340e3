"""PLBartForConditionalGeneration: programs and their descriptions (Ahmad et al. 2021)."""

from jax_transformer.convert.families import bart_lineage

FAMILY = bart_lineage.family(
    "plbart",
    "PLBartForConditionalGeneration",
    "bart",
    defaults={
        "vocab_size": 50_005,
        "d_model": 768,
        **bart_lineage.sizes(6, 12, 3072),
        "scale_embedding": True,
        "attention_dropout": 0.1,
        "bos_token_id": 0,
    },
    computed=bart_lineage.START_FROM_BOS,
)
