"""MT5ForConditionalGeneration: multilingual T5 (Xue et al. 2021), the blocks of T5 v1.1."""

from jax_transformer.convert.families import t5_lineage, tokenizer_files
from jax_transformer.convert.families.family import Family

FAMILY = Family(
    model_type="mt5",
    architecture="MT5ForConditionalGeneration",
    preset="mt5",
    layout=t5_lineage.layout("mt5"),
    generation=t5_lineage.generation,
    fields=t5_lineage.FIELDS,
    words=t5_lineage.WORDS,
    fixed=t5_lineage.FIXED,
    defaults={**t5_lineage.DEFAULTS, "feed_forward_proj": "gated-gelu"},
    computed=t5_lineage.COMPUTED,
    is_tied=t5_lineage.is_tied,
    tokenizer=tokenizer_files.T5,
)
