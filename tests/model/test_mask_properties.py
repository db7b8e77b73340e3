"""Properties of masks: it does not matter what padding holds, how much it is, who is beside it."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import torch_reference
from jax_transformer import apply, convert, decode
from jax_transformer.model import functional
from tests.models import random_params, shallow_config, small_config
from tests.parity.ladder import bound, error, widen
from tests.tiers import DISTINCT_PRESETS, tiered, tiered_rows

WITH_IDS = [name for name in DISTINCT_PRESETS if small_config(name).token_embeddings != "none"]
UNTIED = [name for name in WITH_IDS if small_config(name).output_projection == "linear"]
DTYPES = ("float32", "float16", "bfloat16")

ROWS, COLUMNS = 4, 7  # of a batch; one preset needs sources and targets of one length
LENGTHS = st.lists(st.integers(0, COLUMNS), min_size=ROWS, max_size=ROWS)
SEEDS = st.integers(0, 2**32 - 1)
# No numbers, numbers whose square overflows, and smaller ones: the last overflows in float16 alone.
GARBAGE = st.sampled_from((np.nan, np.inf, -np.inf, 3e38, 1e30, 1e19, 6e4))

repeatable = functools.partial(settings, derandomize=True, deadline=None)


@functools.cache
def parameters(config, dtype="float32"):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), random_params(config))


def cast(dtype, *numbers):
    with np.errstate(over="ignore"):  # much garbage is infinite in float16
        return [jnp.asarray(x, dtype) for x in numbers]


def positions_kept(lengths):
    """Return which positions of a batch are no padding [rows, columns]."""
    return np.arange(COLUMNS) < np.array(lengths)[:, None]


def assert_same_and_finite(actual, expected):
    """Assert that two trees are finite and equal to the last bit; a zero may have either sign."""
    leaves = jax.tree_util.tree_leaves_with_path(actual)
    for (path, one), other in zip(leaves, jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        assert np.isfinite(np.asarray(other, "float32")).all(), jax.tree_util.keystr(path)
        assert np.array_equal(one, other), jax.tree_util.keystr(path)


def decode_memory(params, config, memory, tgt, src_mask, tgt_mask):
    return decode(params, config, tgt, memory, tgt_mask, src_mask)


@functools.partial(jax.jit, static_argnames=("config", "forward"))
def run_jax(config, params, src, tgt, src_kept, tgt_kept, weights, forward=apply):
    """Return the outputs at valid positions, and the gradients of their weighted sum."""
    causal = np.tril(np.ones((COLUMNS, COLUMNS), bool))
    masks = src_kept[:, None, None], tgt_kept[:, None, None] & causal

    def objective(params, src, tgt):
        outputs = jnp.where(tgt_kept[..., None], forward(params, config, src, tgt, *masks), 0)
        return jnp.sum(outputs * weights), outputs

    learned = (0, 1, 2) if config.token_embeddings == "none" else (0,)
    differentiate = jax.value_and_grad(objective, argnums=learned, has_aux=True)
    (_, outputs), gradients = differentiate(params, src, tgt)
    return outputs, gradients


def run_torch(config, params, *inputs):
    """Return the same of the torch reference, fed with vectors."""
    module = torch_reference.Transformer(config)
    module.load_state_dict(convert.to_torch(params, config), strict=True)
    src, tgt, src_kept, tgt_kept, weights = (torch.tensor(np.array(x)) for x in inputs)
    causal = torch.ones(COLUMNS, COLUMNS, dtype=torch.bool).tril()
    masks = src_kept[:, None, None], tgt_kept[:, None, None] & causal
    learned = (*module.parameters(), src.requires_grad_(), tgt.requires_grad_())
    outputs = module(src, tgt, *masks).masked_fill(~tgt_kept[..., None], 0)
    gradients = torch.autograd.grad((outputs * weights).sum(), learned)
    return jax.tree.map(lambda x: x.detach().numpy(), (outputs, gradients))


def check_padded_vectors(run, preset, dtype, source_lengths, target_lengths, garbage, seed):
    """Assert that garbage in the padding gives what ordinary numbers there give."""
    body = {"token_embeddings": "none", "output_projection": "none", "output_bias": False}
    body |= {"output_scale": "none", "encoder_d_model": None}
    config = shallow_config(preset, **body)
    if config.decoder_attention == "self_over_memory":
        # This decoder attends to the memory under the target's mask, so source padding counts
        # where the target is longer: it is padding to nobody only where both have the same.
        source_lengths = target_lengths
    random = np.random.default_rng(seed)
    src, tgt, weights = random.normal(size=(3, ROWS, COLUMNS, config.d_model))
    kept = positions_kept(source_lengths), positions_kept(target_lengths)
    fillings = np.reshape(garbage, (2, ROWS, 1, 1))
    dirty = [
        np.where(valid[..., None], vectors, filling)
        for valid, vectors, filling in zip(kept, (src, tgt), fillings, strict=True)
    ]
    src, tgt, weights, *dirty = cast(dtype, src, tgt, weights, *dirty)
    params = parameters(config, dtype)
    expected = run(config, params, src, tgt, *kept, weights)
    assert_same_and_finite(run(config, params, *dirty, *kept, weights), expected)


# Lengths of sources and of targets, what fills the padding of each row, and a seed.
PADDED = st.tuples(LENGTHS, LENGTHS, st.lists(GARBAGE, min_size=8, max_size=8), SEEDS)
ALL_PADDING = ([0] * ROWS, [COLUMNS] * ROWS, [np.nan] * 8, 0)
EVERY_GARBAGE = ([0, 1, 3, 6], [5, 0, 2, 4], [np.nan, 3e38, 6e4, np.inf] * 2, 0)
MODELS = [("float32", preset) for preset in (*DISTINCT_PRESETS, "ssru")]
MODELS += itertools.product(("float16", "bfloat16"), ("vaswani2017", "pre_norm"))
QUICK = [("float32", preset) for preset in ("torch_nn", "marian", "umt5", "ssru")]
QUICK += [("bfloat16", "pre_norm")]
SWEPT = ("float16", "vaswani2017")


@pytest.mark.parametrize(
    ("dtype", "preset"),
    tiered_rows(MODELS, lambda *row: row in QUICK, lambda *row: row != SWEPT),
)
@repeatable(max_examples=10)
@given(drawn=PADDED)
@example(drawn=ALL_PADDING)
@example(drawn=EVERY_GARBAGE)
def test_padded_vectors_may_hold_anything(dtype, preset, drawn):
    check_padded_vectors(run_jax, preset, dtype, *drawn)


@pytest.mark.parametrize("preset", ["vaswani2017", "shared_heads", "pre_norm_memory_norm"])
def test_a_memory_of_the_callers_may_hold_anything_in_its_padding(preset):
    run = functools.partial(run_jax, forward=decode_memory)
    for drawn in (ALL_PADDING, EVERY_GARBAGE):
        check_padded_vectors(run, preset, "float32", *drawn)


@pytest.mark.parametrize("preset", ["vaswani2017", "shared_heads", "pre_norm", "ssru"])
def test_padded_vectors_may_hold_anything_in_the_torch_reference(preset):
    for drawn in (ALL_PADDING, EVERY_GARBAGE):
        check_padded_vectors(run_torch, preset, "float32", *drawn)


def make_ids(config, source_lengths, target_lengths, random):
    """Return random ids and padding: (src, tgt), each target with a begin token at least."""
    src = random.integers(3, config.src_vocab_size - 1, (ROWS, COLUMNS))
    tgt = random.integers(3, config.tgt_vocab_size - 1, (ROWS, COLUMNS))
    src, tgt = (
        np.where(positions_kept(lengths), ids, config.pad_id).astype("int32")
        for ids, lengths in ((src, source_lengths), (tgt, target_lengths))
    )
    tgt[:, 0] = config.bos_id
    return src, tgt


@pytest.mark.parametrize("preset", tiered(UNTIED, ["torch_nn", "marian"]))
@repeatable(max_examples=8)
@given(lengths=st.tuples(LENGTHS, LENGTHS), garbage=GARBAGE, seed=SEEDS)
@example(lengths=([0] * ROWS, [COLUMNS] * ROWS), garbage=np.nan, seed=0)
def test_the_embedding_of_padding_may_be_anything(preset, lengths, garbage, seed):
    config, random = shallow_config(preset), np.random.default_rng(seed)
    if config.decoder_attention == "self_over_memory":
        # As above: padding to nobody only where both have the same, and targets have a token.
        lengths = (np.maximum(lengths[1], 1),) * 2
    src, tgt = make_ids(config, *lengths, random)
    kept = src != config.pad_id, tgt != config.pad_id
    (weights,) = cast("float32", random.normal(size=(ROWS, COLUMNS, config.tgt_vocab_size)))
    params = parameters(config)
    dirty = {
        name: {"embedding": part["embedding"].at[config.pad_id].set(garbage)}
        if name in ("source_embedding", "target_embedding")
        else part
        for name, part in params.items()
    }
    expected = run_jax(config, params, src, tgt, *kept, weights)
    assert_same_and_finite(run_jax(config, dirty, src, tgt, *kept, weights), expected)


# Random masks

SHAPE = (2, 3, 4, 5)  # sentences, heads, queries, keys
HEAD_DIM = 7


@jax.jit
def attend(query, key, value, mask, weights):
    """Return what attention gathers, and the gradients of its weighted sum."""

    def objective(query, key, value):
        outputs = functional.dot_product_attention(query, key, value, mask)
        return jnp.sum(outputs * weights), outputs

    differentiate = jax.value_and_grad(objective, argnums=(0, 1, 2), has_aux=True)
    (_, outputs), gradients = differentiate(query, key, value)
    return outputs, gradients


@st.composite
def masks(draw):
    """Return a mask with, besides its random holes, empty queries, hidden keys, empty sentences."""
    sentences, heads, queries, keys = SHAPE
    mask = draw(arrays(bool, SHAPE, fill=st.just(True)))
    mask &= ~draw(arrays(bool, (sentences, heads, queries, 1), fill=st.just(False)))
    mask &= ~draw(arrays(bool, (sentences, heads, 1, keys), fill=st.just(False)))
    return mask & ~draw(arrays(bool, (sentences, 1, 1, 1)))


@pytest.mark.parametrize("dtype", DTYPES)
@repeatable(max_examples=60)
@given(mask=masks(), garbage=st.tuples(GARBAGE, GARBAGE), seed=SEEDS)
@example(mask=np.zeros(SHAPE, bool), garbage=(np.nan, np.nan), seed=0)
def test_any_mask_is_finite_and_hides_what_nobody_attends_to(dtype, mask, garbage, seed):
    sentences, heads, queries, keys = SHAPE
    random = np.random.default_rng(seed)
    query, weights = random.normal(size=(2, sentences, heads, queries, HEAD_DIM))
    key, value = random.normal(size=(2, sentences, heads, keys, HEAD_DIM))
    hidden = ~mask.any(axis=2)[..., None]
    dirty_key, dirty_value = (
        np.where(hidden, filling, x) for x, filling in zip((key, value), garbage, strict=True)
    )
    query, key, value, weights = cast(dtype, query, key, value, weights)
    expected = attend(query, key, value, mask, weights)
    dirty = attend(query, *cast(dtype, dirty_key, dirty_value), mask, weights)
    assert_same_and_finite(dirty, expected)
    outputs, (query_gradient, key_gradient, value_gradient) = dirty
    idle = ~mask.any(axis=3)
    assert not np.asarray(outputs)[idle].any()
    assert not np.asarray(query_gradient)[idle].any()
    assert not np.asarray(key_gradient)[hidden[..., 0]].any()
    assert not np.asarray(value_gradient)[hidden[..., 0]].any()


# Other batches of the same sentences

forward = jax.jit(apply, static_argnums=1)


def forward_exactly(params, config, src, tgt):
    """In float64, so that no order of a sum decides."""
    with jax.enable_x64(True):
        return np.asarray(forward(params, config, src, tgt))


@pytest.mark.parametrize("preset", tiered([*WITH_IDS, "ssru"], ["marian"]))
@repeatable(max_examples=8)
@given(
    lengths=st.tuples(LENGTHS, LENGTHS),
    order=st.permutations(range(ROWS)),
    replaced=st.sets(st.integers(0, ROWS - 1), max_size=ROWS - 1),
    seed=SEEDS,
)
def test_logits_do_not_depend_on_the_batch(preset, lengths, order, replaced, seed):
    config = shallow_config(preset, max_length=COLUMNS + 64)
    random, params = np.random.default_rng(seed), widen(parameters(config))
    src, tgt = make_ids(config, *lengths, random)
    valid = tgt != config.pad_id
    valid[:, 0] = True  # the begin token may be the pad id
    expected = forward_exactly(params, config, src, tgt)

    def check(change, src, tgt, rows=slice(None), counted=valid):
        logits = forward_exactly(params, config, src, tgt)[:, :COLUMNS]
        measured = error(logits[counted[rows]], expected[rows][counted[rows]])
        assert measured <= bound("logits", "float64"), change

    def pad(src, tgt, extra):
        if config.decoder_attention == "self_over_memory":
            extra = (extra[0], extra[0])  # it needs equal lengths
        return [
            np.pad(ids, ((0, 0), (0, columns)), constant_values=config.pad_id)
            for ids, columns in zip((src, tgt), extra, strict=True)
        ]

    one = order[:1]
    check("with more padding", *pad(src, tgt, (1, 64)))
    check("alone with more padding", *pad(src[one], tgt[one], (64, 13)), one)
    check("in another order", src[order], tgt[order], order)
    gone = np.isin(range(ROWS), list(replaced))[:, None]
    others = make_ids(config, *lengths[::-1], random)
    mixed = (np.where(gone, *both) for both in zip(others, (src, tgt), strict=True))
    check("beside others", *mixed, counted=valid & ~gone)
