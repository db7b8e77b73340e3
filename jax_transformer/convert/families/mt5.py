"""MT5ForConditionalGeneration: multilingual T5 (Xue et al. 2021), the blocks of T5 v1.1."""

from jax_transformer.convert.families import t5_lineage

FAMILY = t5_lineage.family(
    "mt5", "MT5ForConditionalGeneration", "mt5", defaults=t5_lineage.MULTILINGUAL
)
