"""Decoding: from sources to target tokens, one token at each step."""

from jax_transformer.decoding.cache import Cache, decode_step, init_cache, select_hypotheses
from jax_transformer.decoding.generation import generate
from jax_transformer.decoding.generation_config import GenerationConfig
from jax_transformer.decoding.hypotheses import Hypotheses
from jax_transformer.decoding.scoring import cross_attention_weights, score

__all__ = [
    "Cache",
    "GenerationConfig",
    "Hypotheses",
    "cross_attention_weights",
    "decode_step",
    "generate",
    "init_cache",
    "score",
    "select_hypotheses",
]
