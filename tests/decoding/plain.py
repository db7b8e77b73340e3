"""Small random models, and `generate` compiled quickly for them."""

from dataclasses import fields

import jax
import numpy as np

from jax_transformer import TransformerConfig, apply, generate
from jax_transformer.decoding import GenerationConfig
from tests.models import random_params, random_tokens, small_config

# The options that decide what is compiled.
STATIC = ("config", "execution")
STATIC += tuple(one.name for one in fields(GenerationConfig) if "declared" not in one.metadata)
WITH_IDS = [name for name in TransformerConfig.presets() if name != "torch_nn"]


quick_generate = jax.jit(generate, static_argnames=STATIC)  # and raises nothing late
run = jax.jit(apply, static_argnames="config")


def random_model(preset, seed=0, vocab_size=8, dtype=np.float32, **overrides):
    """Return a model of so few ids that some rows end by chance, and ragged sources."""
    small = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    small |= dict.fromkeys(("src_vocab_size", "tgt_vocab_size"), vocab_size)
    if preset == "marian":
        small |= {"pad_id": vocab_size - 1, "bos_id": vocab_size - 1}
    config = small_config(preset, **(small | overrides))
    src = random_tokens(config, seed, dtype)[0]
    if preset == "marian":
        src[(src == config.pad_id) & (np.arange(src.shape[1]) == 0)] = 3
    return config, random_params(config, seed, dtype), src


def biased(logits):
    """Return a model that, whatever it has read, gives each id of the target this logit."""
    config, params, src = random_model(
        "vaswani2017", vocab_size=len(logits), output_projection="linear", output_bias=True
    )
    kernel = np.zeros((config.d_model, config.tgt_vocab_size), np.float32)
    params["output_projection"] = {"kernel": kernel, "bias": np.asarray(logits, np.float32)}
    return config, params, src


def assert_equal(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)
