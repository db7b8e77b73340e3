"""The fused kernels for TPU, interpreted by XLA, beside plain attention."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, use_abstract_mesh

from jax_transformer import apply
from jax_transformer.errors import InputError
from jax_transformer.kernels import execution, fused_attention
from jax_transformer.kernels.execution import Execution
from jax_transformer.kernels.segments import SegmentMask, as_boolean_mask
from jax_transformer.model import functional
from jax_transformer.runtime.sharding import AXES, AXIS_TYPES
from jax_transformer.text.batches import Batch
from jax_transformer.training.objective import decode_batch
from tests.kernels.test_attention_backend import (
    BATCH,
    HEAD_DIM,
    HEADS,
    check_attention,
    draw,
)
from tests.models import random_params, random_tokens, shallow_config, small_config
from tests.parity.ladder import error
from tests.tiers import tiered, tiered_rows

FLASH = Execution.for_platform("tpu", attention="flash")


@pytest.fixture
def interpreted(monkeypatch):
    """Let XLA interpret the kernels; return the lengths of the attentions that they compute."""
    lengths, attention = [], fused_attention.flash_attention

    def by_xla(query, key, value, mask, divisor, softcap):
        lengths.append((query.shape[2], key.shape[2]))
        return attention(query, key, value, mask, divisor, softcap, interpret=True)

    monkeypatch.setattr(fused_attention, "flash_attention", by_xla)
    monkeypatch.setattr(execution, "SHORTEST_FLASH", 1)
    return lengths


def mask_of(kind, queries, keys):
    """Return a mask by segments; but for "none" and "causal", some row or query is empty."""
    random = np.random.default_rng(1)
    padding = jnp.asarray(np.arange(keys) < np.array([keys, keys - 2, 0])[:, None])
    holes = jnp.asarray(random.random((BATCH, keys)) < 0.5).at[0, 0].set(False)

    def packed(length):  # padding at the end, and a segment 5 that only these queries have
        segments = np.sort(random.integers(1, 5, (BATCH, length)))
        return jnp.asarray(np.where(np.arange(length) < length - 2, segments, 0), jnp.int32)

    query_segments = packed(queries).at[0, 1].set(5)
    return {
        "none": None,
        "causal": SegmentMask(None, causal=True),
        "padding": SegmentMask(padding),
        "causal and padding": SegmentMask(padding, causal=True),
        "causal and holes": SegmentMask(holes, causal=True),
        "packed": SegmentMask(query_segments, query_segments, causal=True),
        "packed to keys": SegmentMask(packed(keys), query_segments),
        "window": SegmentMask(None, window=(2, 3)),
        "window and holes": SegmentMask(holes, window=(1, 0)),
        "causal window and padding": SegmentMask(padding, causal=True, window=(3, 0)),
        "packed window": SegmentMask(query_segments, query_segments, causal=True, window=(2, 1)),
    }[kind]


KINDS = ("none", "causal", "padding", "causal and padding", "causal and holes", "packed")
WINDOWS = ("window", "window and holes", "causal window and padding", "packed window")


@pytest.mark.parametrize("kind", [*KINDS[1:], "packed to keys", *WINDOWS])
def test_a_mask_by_segments_says_what_the_boolean_one_says(kind):
    lengths = (7, 5) if kind in ("padding", "packed to keys") else (7, 7)
    mask = mask_of(kind, *lengths)
    boolean = np.broadcast_to(as_boolean_mask(mask, *lengths), (BATCH, 1, *lengths))[:, 0]
    attended = np.broadcast_to(mask.attended(lengths[1]), (BATCH, lengths[1]))
    attending = np.broadcast_to(mask.attending(*lengths), (BATCH, lengths[0]))
    assert np.array_equal(attended, boolean.any(axis=1))
    assert np.array_equal(attending, boolean.any(axis=2))
    assert attending.all() == (kind in ("causal", "window"))
    x = jnp.full((BATCH, lengths[1], 3), jnp.nan)
    expected = functional.clear_unattended(x, jnp.asarray(boolean)[:, None])
    np.testing.assert_array_equal(functional.clear_unattended(x, mask), expected)


@pytest.mark.parametrize(
    "kind",
    tiered([*KINDS, "packed to keys", *WINDOWS], ["causal and holes"]),
)
def test_the_kernels_give_what_plain_attention_gives(interpreted, kind):
    """Of odd lengths, with NaN wherever nobody attends to, and scores that are not scaled."""
    lengths = (13, 9) if kind in ("none", "padding", "packed to keys") else (13, 13)
    mask = mask_of(kind, *lengths)
    divisor = 1.0 if kind == "causal and padding" else HEAD_DIM**0.5
    query, key, value, cotangent = draw(*lengths)
    if mask is not None:
        nobody = ~mask.attended(lengths[1])[:, None, :, None]
        key, value = jnp.where(nobody, jnp.nan, key), jnp.where(nobody, jnp.inf, value)
    inputs = query, key, value, cotangent
    output, *_ = check_attention("flash", inputs, mask, divisor=divisor)
    assert interpreted == [lengths]
    if mask is not None:
        empty = np.broadcast_to(~mask.attending(*lengths), (BATCH, lengths[0]))
        assert (np.asarray(output).swapaxes(1, 2)[empty] == 0).all()


@pytest.mark.parametrize(
    ("kind", "key_heads"),
    tiered_rows(
        [("none", 2), ("causal", 1), ("packed", 2), ("packed window", 2), ("window and holes", 1)],
        is_quick=lambda kind, _: kind == "packed window",
    ),
)
def test_the_kernels_group_queries_and_cap_scores(interpreted, kind, key_heads):
    """Beside plain attention of repeated keys, whose gradients are added up for each group."""
    inputs = draw(13, 13, heads=4, key_heads=key_heads)
    check_attention("flash", inputs, mask_of(kind, 13, 13), divisor=0.5, softcap=1.5)
    assert interpreted == [(13, 13)]


@pytest.mark.exhaustive
def test_the_blocks_of_a_long_attention_add_up(interpreted, monkeypatch):
    for name in ("LONGEST_QUERY_BLOCK", "LONGEST_KEY_BLOCK"):
        monkeypatch.setattr(fused_attention, name, fused_attention.LANES)
    mask = mask_of("packed", 300, 300)
    check_attention("flash", draw(300, 300), mask)
    window = dataclasses.replace(mask, window=(130, 0))
    check_attention("flash", draw(300, 300, heads=4, key_heads=2), window)


@pytest.mark.parametrize("longest", [fused_attention.LONGEST_QUERY_BLOCK, 2048])
def test_blocks_are_as_a_tpu_needs_them(longest):
    for length in range(1, 5000, 7):
        block = fused_attention.block_length(length, longest)
        assert block % fused_attention.LANES == 0
        assert block <= longest
        blocks = -(-length // block)
        assert blocks == -(-length // longest)  # no more than are needed
        assert blocks * block - length < 2 * blocks * fused_attention.LANES


def logits_and_gradient(params, config, tokens, by):
    @jax.jit
    def run(params):
        def logits(params):
            if isinstance(tokens, Batch):
                return decode_batch(params, tokens, config, execution=by)
            return apply(params, config, *tokens, execution=by)

        output, transpose = jax.vjp(logits, params)
        return output, *transpose(jnp.cos(output))

    return run(params)


# Encoder, decoder, cross-attention; one source is all padding.
EACH = [(13, 13), (11, 11), (11, 13)]


@pytest.mark.parametrize(
    ("preset", "packed", "by_kernels"),
    [
        pytest.param("vaswani2017", False, EACH, marks=pytest.mark.exhaustive),
        pytest.param("vaswani2017", True, EACH, marks=pytest.mark.exhaustive),
        # Targets begin with the pad id.
        pytest.param("marian", False, EACH, marks=pytest.mark.exhaustive),
        ("t5", False, [(11, 13)]),  # the others add a bias of relative positions
        pytest.param("windows", False, EACH, marks=pytest.mark.exhaustive),
        pytest.param("windows", True, EACH, marks=pytest.mark.exhaustive),
        # The mask of targets and memory side by side is none by segments.
        pytest.param("merged", False, EACH[:1], marks=pytest.mark.exhaustive),
    ],
)
def test_a_model_of_fused_attention_is_the_plain_one(interpreted, preset, packed, by_kernels):
    config = shallow_config(preset, d_v=None)
    params, tokens = random_params(config), random_tokens(config)
    if packed:
        src, tgt = tokens
        segments = [np.minimum(np.arange(x.shape[1]) // 4 + 1, 3) * (x != 0) for x in (src, tgt)]
        tokens = Batch(src, tgt, tgt, *(segment.astype(np.int32) for segment in segments))
    found = logits_and_gradient(params, config, tokens, FLASH)
    assert interpreted == by_kernels
    expected = logits_and_gradient(params, config, tokens, Execution())
    assert error(found[0], expected[0]) < 2e-6
    gradients = zip(jax.tree.leaves(found[1]), jax.tree.leaves(expected[1]), strict=True)
    for ours, plain in gradients:
        assert error(ours, plain) < 1e-5


@pytest.mark.exhaustive
def test_layers_that_are_recomputed_or_run_in_a_loop_read_the_same_masks(interpreted):
    config = small_config("vaswani2017", num_encoder_layers=2, num_decoder_layers=2)
    params, tokens = random_params(config), random_tokens(config)
    for fields in ({"remat": "layers"}, {"scan_layers": True}):
        other = Execution.for_platform("tpu", attention="flash", **fields)

        def loss(params, other=other):
            return jnp.sum(apply(params, config, *tokens, execution=other))

        jax.eval_shape(jax.grad(loss), params)
        assert {(13, 13), (11, 11), (11, 13)} == set(interpreted)
        interpreted.clear()


def test_a_mask_of_the_callers_and_a_short_attention_are_plain(interpreted, monkeypatch):
    config = shallow_config("vaswani2017")
    params, (src, tgt) = random_params(config), random_tokens(config)
    own = (src != config.pad_id)[:, None, None, :]
    jax.eval_shape(lambda: apply(params, config, src, tgt, own, execution=FLASH))
    assert interpreted == [(11, 11)]  # that of the targets alone has the default mask
    monkeypatch.setattr(execution, "SHORTEST_FLASH", 12)
    jax.eval_shape(lambda: apply(params, config, src, tgt, execution=FLASH))
    assert interpreted[1:] == [(13, 13)]  # 11 x 13 are fewer scores than 12 x 12


BY_SEGMENTS = "reads masks by segments, and no bias; use attention='plain'"
NARROW = "needs values as wide as keys, not d_v=5; use attention='plain'"


@pytest.mark.parametrize(
    ("implementation", "changes", "message"),
    [
        ("flash", {"dropping": True}, "cannot drop attention weights; use attention='plain', or"),
        ("cudnn", {"softcap": 50.0}, r"cannot cap scores \(softcap=50.0\); use attention='plain'"),
        ("flash", {"mask": jnp.ones((1, 1, 5, 5), bool)}, BY_SEGMENTS),
        ("flash", {"bias": jnp.zeros((1, HEADS, 5, 5))}, BY_SEGMENTS),
        ("flash", {"value": jnp.ones((BATCH, HEADS, 5, 5))}, NARROW),
        ("cudnn", {"value": jnp.ones((BATCH, HEADS, 5, 5))}, NARROW),
    ],
)
def test_what_the_kernels_cannot_do_is_refused(implementation, changes, message):
    query, key, value, _ = draw(5, 5)
    usual = {"query": query, "key": key, "value": value, "mask": None, "bias": None}
    with pytest.raises(InputError, match=f"^attention='{implementation}' {message}"):
        fused_attention.fused_attention(implementation, **usual | {"divisor": 1.0} | changes)


@pytest.mark.parametrize(
    ("sizes", "rows", "heads", "key_heads"),
    [
        ((4, 1, 1), 8, 2, 2),
        ((2, 2, 2), 8, 2, 2),
        ((2, 2, 2), 3, 3, 3),
        ((2, 2, 2), 8, 4, 2),
        ((2, 2, 2), 8, 2, 1),
    ],
)
def test_each_device_computes_its_own_rows_and_heads(sizes, rows, heads, key_heads):
    """What is not divided by the axes is computed by every device; keys stay with their queries."""
    mesh = AbstractMesh(sizes, AXES, axis_types=AXIS_TYPES)
    query, key = (
        jax.ShapeDtypeStruct((rows, count, 128, HEAD_DIM), jnp.bfloat16)
        for count in (heads, key_heads)
    )
    with use_abstract_mesh(mesh):
        mask = SegmentMask(jnp.ones((rows, 128), bool))
        attend = functools.partial(fused_attention.flash_attention, mask=mask, divisor=1.0)
        text = str(jax.make_jaxpr(attend)(query, key, key))
    own_rows, tensor = 3 if rows == 3 else rows // 4, sizes[2] if key_heads % 2 == 0 else 1
    assert "shard_map" in text
    for count in (heads, key_heads):
        own = f"bf16[{own_rows},{count // tensor},128,{HEAD_DIM}]"
        assert own in text.split("shard_map", 1)[1]
