"""MvpForConditionalGeneration: supervised text generation (Tang et al. 2023), without prompts."""

from jax_transformer.convert.families import bart_lineage

FAMILY = bart_lineage.family(
    "mvp",
    "MvpForConditionalGeneration",
    "bart",
    # Prompts are further keys and values of every attention.
    fixed={**bart_lineage.FIXED, "use_prompt": (False,)},
    defaults={"vocab_size": 50_267, "decoder_start_token_id": 2},
    tokenizer="RobertaTokenizer",
)
