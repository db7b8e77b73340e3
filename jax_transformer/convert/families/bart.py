"""BartForConditionalGeneration: denoised text, summaries (Lewis et al. 2020)."""

from jax_transformer.convert.families import bart_lineage

FAMILY = bart_lineage.family(
    "bart",
    "BartForConditionalGeneration",
    "bart",
    defaults={"decoder_start_token_id": 2},
    tokenizer="RobertaTokenizer",
)
