"""The recurrence of a decoder layer against a loop of numpy, in every form of mask."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import torch_reference
from jax_transformer import InputError, apply, convert
from jax_transformer.kernels.execution import Execution
from jax_transformer.kernels.segments import SegmentMask
from jax_transformer.model import ssru
from jax_transformer.model.tree import PARAMETERS, filled_params
from tests.models import random_params, random_tokens, shallow_config, small_config
from tests.parity.ladder import ROUNDED, bound, error
from tests.tiers import tiered

BATCH, LENGTH = 3, 11
FIRST = "decoder/layers_{i}/recurrence"


def by_loop(params, x, continues):
    """Return the states of an SSRU, one position after the other, in the dtype of its input."""
    states = np.zeros_like(x)
    for row, vectors in enumerate(x):
        state = np.zeros_like(vectors[0])
        for step, vector in enumerate(vectors):
            gate = vector @ params["forget"]["kernel"] + params["forget"]["bias"]
            forget = 1 / (1 + np.exp(-gate))
            state = state * continues[row, step]
            state = forget * state + (1 - forget) * (vector @ params["input"]["kernel"])
            states[row, step] = state
    return states


def setting(length=LENGTH, dtype=np.float64):
    """Return a recurrence as a function, its parameters, and vectors that it reads."""
    config = small_config("ssru", num_decoder_layers=1)
    params = random_params(config, dtype=dtype)["decoder"]["layers_0"]["recurrence"]
    x = np.random.default_rng(1).normal(size=(BATCH, length, config.d_model)).astype(dtype)
    module = ssru.SSRU(config)

    @jax.jit
    def run(params, x, mask):
        return module.apply({"params": params}, x, mask)

    return run, params, x


SEGMENTS = np.array(
    [[1, 1, 1, 2, 2, 2, 2, 3, 3, 0, 0], [1] * 11, [1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 0]]
)
STARTS = np.diff(SEGMENTS, axis=1, prepend=0) != 0
KEPT = np.arange(LENGTH) < np.array([[4], [11], [1]])
MASKS = {
    "none": (None, True),
    "causal": (SegmentMask(None, causal=True), True),
    "packed": (
        SegmentMask(jnp.asarray(SEGMENTS), jnp.asarray(SEGMENTS), causal=True),
        ~STARTS & (SEGMENTS > 0),
    ),
    # The first position of the padding may still attend to the last token.
    "padding": (SegmentMask(jnp.asarray(KEPT), causal=True), np.roll(KEPT, 1, axis=1)),
    "array of keys": (KEPT[:, None, None], np.roll(KEPT, 1, axis=1)),
    "array": (np.tril(KEPT[:, None, None] & np.ones((LENGTH, 1), bool)), np.roll(KEPT, 1, axis=1)),
    "nothing": (np.zeros((1, 1, 1, 1), bool), False),
}


@pytest.mark.parametrize("kind", MASKS)
def test_states_are_those_of_a_loop_that_begins_anew_in_each_segment(kind, x64):
    mask, continues = MASKS[kind]
    run, params, x = setting()
    found = run(params, x, jax.tree.map(jnp.asarray, mask))
    expected = by_loop(params, x, np.broadcast_to(continues, (BATCH, LENGTH)))
    assert error(found, expected) <= bound("block", "float64")


def test_a_long_row_in_float32_is_as_exact_as_the_loop():
    run, params, x = setting(512, np.float32)
    # Gates near 1, by which a state remembers hundreds of positions.
    params["forget"]["bias"] = params["forget"]["bias"] + np.float32(5)
    with jax.default_matmul_precision("highest"):
        found = run(params, x, None)
    continues = np.ones((BATCH, 512), bool)
    wide = jax.tree.map(np.float64, params)
    expected = by_loop(wide, np.float64(x), continues)
    ours = np.abs(found - expected).max()
    loops = np.abs(by_loop(params, x, continues) - expected).max()
    print(f"\n512 positions in float32: scan {ours:.1e}, loop {loops:.1e}", end="")
    assert ours <= 1.5 * loops


@pytest.mark.parametrize("placement", tiered(["post", "pre", "sandwich"], ["post"]))
def test_logits_of_every_placement_are_those_of_torch(placement, x64):
    config = shallow_config("ssru", decoder_norm_placement=placement)
    params, (src, tgt) = random_params(config, dtype=np.float64), random_tokens(config)
    module = torch_reference.Transformer(config).double().eval()
    module.load_state_dict(convert.to_torch(params, config))
    found = jax.jit(apply, static_argnums=1)(params, config, src, tgt)
    with torch.no_grad():
        expected = module(torch.from_numpy(src), torch.from_numpy(tgt))
    assert error(found, expected) <= bound("logits", "float64")


@pytest.mark.exhaustive
def test_layers_in_a_loop_and_rematerialized_ones_have_the_same_gradients():
    config = small_config("ssru")
    params, (src, tgt) = random_params(config), random_tokens(config)

    @functools.partial(jax.jit, static_argnums=1)
    def gradients(params, execution):
        def objective(params):
            return jnp.sum(jnp.cos(apply(params, config, src, tgt, execution=execution)))

        return jax.tree.leaves(jax.grad(objective)(params))

    expected = gradients(params, Execution())
    for other in ({"scan_layers": True}, {"remat": "layers"}, {"remat": "dots"}):
        for found, leaf in zip(gradients(params, Execution(**other)), expected, strict=True):
            scale = max(1, np.abs(leaf).max())
            assert np.abs(found - leaf).max() <= ROUNDED * scale, other


def test_new_gates_have_no_bias_and_matrices_those_of_a_feed_forward_network():
    config = small_config("ssru", d_ff=42, initialization="torch_default")
    layer = filled_params(jax.random.key(0), {}, config)["decoder"]["layers_0"]
    assert not layer["recurrence"]["forget"]["bias"].any()
    assert layer["recurrence"]["input"].keys() == {"kernel"}
    assert layer.keys().isdisjoint({"self_attention", "self_attention_residual"})
    of_feed_forward = PARAMETERS["decoder/layers_{i}/feed_forward/inner/kernel"]
    for name in ("input", "forget"):
        row = PARAMETERS[f"{FIRST}/{name}/kernel"]
        assert row.axes == of_feed_forward.axes
        assert row.distribution(config) == of_feed_forward.distribution(config)


def test_a_mask_of_several_heads_is_refused():
    config = shallow_config("ssru")
    src, tgt = random_tokens(config)
    mask = np.ones((1, config.num_heads, 1, tgt.shape[1]), bool)
    with pytest.raises(InputError, match=r"tgt_mask of shape .* = \[5, 1, 11, 11\]"):
        apply(random_params(config), config, src, tgt, tgt_mask=mask)
