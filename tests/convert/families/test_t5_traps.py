"""Traps of T5, mT5 and UMT5: with one set, the comparison with transformers must go red."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
import torch

from jax_transformer import apply, decode, decode_step, encode, init_cache
from jax_transformer.convert.huggingface import from_huggingface
from jax_transformer.errors import InputError
from jax_transformer.model import functional, layers
from jax_transformer.model import transformer as model
from jax_transformer.model.masks import source_mask
from tests.convert.families.case import (
    foreign_model,
    foreign_results,
    ragged_tokens,
)
from tests.convert.families.t5_lineage import write_folder
from tests.parity.ladder import bound, error
from tests.tiers import tiered

T5_FAMILIES = ("t5", "mt5", "umt5")
forward = jax.jit(apply, static_argnames="config")


def with_config(**changes):
    return lambda config, params, patch: (dataclasses.replace(config, **changes), params)


def swap_gate_and_inner(config, params, patch):
    for stack in ("encoder", "decoder"):
        for name, part in params[stack].items():
            if name.startswith("layers_"):
                network = part["feed_forward"]
                network["gate"], network["inner"] = network["inner"], network["gate"]
    return config, params


def bias_of_the_first_layer(config, params, patch):
    for stack in ("encoder", "decoder"):
        first = params[stack]["layers_0"]["relative_attention_bias"]
        for name, part in params[stack].items():
            if name.startswith("layers_"):
                part["relative_attention_bias"] = first
    return config, params


def small_rows(model):
    """Make the squares of the embeddings as small as the epsilon of the norms."""
    model.shared.weight.data *= 1e-3


def patched_buckets(change):
    right = functional.relative_position_buckets

    def trap(config, params, patch):
        def wrong(distance, buckets, longest, bidirectional):
            return change(right, distance, buckets, longest, bidirectional)

        patch.setattr(functional, "relative_position_buckets", wrong)
        return config, params

    return trap


flipped = patched_buckets(lambda right, distance, *others: right(-distance, *others))
both_directions = patched_buckets(
    lambda right, distance, buckets, longest, _: right(distance, buckets, longest, True)
)

TRAPS = {
    "output scale forgotten": ("t5", "tied", with_config(output_scale="none")),
    "output scale too much": ("t5", "v1_1", with_config(output_scale="inverse_sqrt_d_model")),
    "output scale of mT5": ("mt5", "own_output", with_config(output_scale="inverse_sqrt_d_model")),
    "output scale of a tied UMT5": ("umt5", "tied", with_config(output_scale="none")),
    "output scale of UMT5": (
        "umt5",
        "own_output",
        with_config(output_scale="inverse_sqrt_d_model"),
    ),
    "scores divided": ("t5", "tied", with_config(attention_scale="head_dim")),
    "mean subtracted": ("t5", "tied", with_config(norm="layer_norm")),
    "epsilon of BART": ("t5", "v1_1", with_config(norm_epsilon=1e-5)),
    "distance flipped": ("t5", "tied", flipped),
    "decoder in both directions": ("t5", "tied", both_directions),
    "one bias for all layers": ("umt5", "tied", bias_of_the_first_layer),
    "exact gelu": ("t5", "v1_1", with_config(activation="gelu")),
    "gate and inner swapped": ("t5", "v1_1", swap_gate_and_inner),
}


@pytest.fixture
def x64():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("trap", TRAPS)
def test_trap(trap, x64, monkeypatch):
    family, shape, spring = TRAPS[trap]
    model = foreign_model(family, shape, torch.float64)
    if trap == "epsilon of BART":
        small_rows(model)
    config, params = from_huggingface(model)
    src, tgt = ragged_tokens(config)
    logits, _ = foreign_results(model, config, src, tgt)
    right = error(forward(params, config, src, tgt), logits)
    changed, params = spring(config, params, monkeypatch)
    wrong = error(jax.jit(lambda params: apply(params, changed, src, tgt))(params), logits)
    print(f"\n{trap}: {wrong:.0e} instead of {right:.0e}", end="")
    assert right <= bound("logits", "float64")
    assert wrong > 1e-4


def test_trap_of_the_width_of_a_head(tmp_path):
    """Where the heads are together as wide as the model, the width could be left unread."""
    model = foreign_model("t5", "tied", d_model=40, d_kv=10, num_heads=4)
    folder = write_folder(tmp_path / "model", model, d_kv=8, num_heads=5)
    with pytest.raises(InputError, match="relative_attention_bias"):
        from_huggingface(folder)
    folder = write_folder(tmp_path / "wide", foreign_model("t5"), d_kv=14)  # 42 // 3
    with pytest.raises(InputError, match=r"wrong shape.*SelfAttention"):
        from_huggingface(folder)


@pytest.mark.parametrize("family", tiered(T5_FAMILIES, ["umt5"]))
@pytest.mark.exhaustive
def test_cached_steps_have_the_relative_bias(family, x64, monkeypatch):
    """Every bucket is used; without the bias in the cached step the logits are far off."""
    config, params = from_huggingface(foreign_model(family, None, torch.float64))
    src, tgt = ragged_tokens(config)
    mask = source_mask(jnp.asarray(src), config)

    def uncached(params):
        return decode(params, config, tgt, encode(params, config, src), src_mask=mask)

    def cached(params):
        memory = encode(params, config, src)
        cache = init_cache(params, config, memory, tgt.shape[1], mask)

        def step(cache, tokens):
            logits, cache = decode_step(params, config, cache, tokens)
            return cache, logits

        return jax.lax.scan(step, cache, jnp.asarray(tgt.T))[1].swapaxes(0, 1)

    expected = jax.jit(uncached)(params)
    assert error(jax.jit(cached)(params), expected) <= 1e-12
    for module in (layers, model):  # a bias of its own in each layer, or one of the stack
        monkeypatch.setattr(module, "slot_bias", lambda bias, position, mask: None)
    missing = error(jax.jit(lambda params: cached(params))(params), expected)
    print(f"\n{family}: {missing:.0e} without the bias", end="")
    assert missing > 1e-3
