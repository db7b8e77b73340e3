"""PegasusForConditionalGeneration: models for summaries (Zhang et al. 2020)."""

from jax_transformer.convert.families import bart_lineage

FAMILY = bart_lineage.family(
    "pegasus",
    "PegasusForConditionalGeneration",
    "pegasus",
    layout=bart_lineage.layout("pegasus", bart_lineage.SINUSOIDS),
    saves_buffers=True,
    uses_stored_positions=True,
    defaults={"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1},
    tokenizer="PegasusTokenizer",
)
