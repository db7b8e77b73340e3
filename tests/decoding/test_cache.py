"""A cached step is the uncached model; beams share what they keep; a full cache says so."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import torch_reference
from jax_transformer import (
    InputError,
    convert,
    decode,
    decode_step,
    encode,
    generate,
    init_cache,
    select_hypotheses,
)
from jax_transformer.kernels.execution import DEFAULT_SEARCH_EXECUTION, SearchExecution
from jax_transformer.model import masks
from jax_transformer.model.tree import in_dtype
from tests.decoding.plain import assert_equal
from tests.models import BATCH, OTHERS, SOURCE_LENGTH, random_params, random_tokens, small_config
from tests.parity.ladder import bound, error
from tests.tiers import DISTINCT_PRESETS, QUICK_MODELS, tiered

LENGTH, BEAM = 7, 3


@pytest.fixture(params=tiered(["float64", "float32"], quick=["float64"]))
def dtype(request):
    jax.config.update("jax_enable_x64", request.param == "float64")
    with jax.default_matmul_precision("highest"):
        yield request.param
    jax.config.update("jax_enable_x64", False)


def setting(preset, dtype="float32", beam_size=BEAM, seed=0, **fields):
    """Return a model, ragged sources of which one is all padding, and tokens of every step."""
    config = small_config(preset, num_encoder_layers=1, num_decoder_layers=1, **fields)
    random = np.random.default_rng(seed)
    shape = (LENGTH, BATCH, beam_size)
    if config.token_embeddings == "none":
        tokens = random.normal(size=(*shape, config.d_model)).astype(dtype)
    else:
        words = np.setdiff1d(np.arange(config.tgt_vocab_size), config.pad_id)
        tokens = random.choice(words, shape).astype(np.int32)
        tokens[0] = config.bos_id
    return config, random_params(config, seed, dtype), random_tokens(config, seed, dtype)[0], tokens


@functools.partial(jax.jit, static_argnames="config")
def remember(config, params, src):
    return encode(params, config, src), masks.source_mask(src, config)


@functools.partial(jax.jit, static_argnames=("config", "length", "beam_size"))
def start(config, params, src, length=LENGTH, beam_size=BEAM):
    memory, mask = remember(config, params, src)
    return init_cache(params, config, memory, length, mask, beam_size=beam_size)


quick_step = jax.jit(decode_step, static_argnames="config")


def uncached(config, params, src, tokens):
    """Return the logits after each prefix of tokens [L, B, ...], each read by itself."""
    memory, mask = remember(config, params, src)
    length = src.shape[1] if config.decoder_attention == "self_over_memory" else LENGTH
    tgt = jnp.moveaxis(tokens, 0, 1)
    padding = 0 if config.token_embeddings == "none" else config.pad_id
    widths = [(0, 0), (0, length - LENGTH)] + [(0, 0)] * (tgt.ndim - 2)
    tgt = jnp.pad(tgt, widths, constant_values=padding)

    def last(step):
        read = (jnp.arange(length) <= step).reshape(1, -1, *[1] * (tgt.ndim - 2))
        prefix = jnp.where(read, tgt, padding)
        return decode(params, config, prefix, memory, src_mask=mask)[:, step]

    return jax.lax.map(last, jnp.arange(LENGTH))


def cached(config, params, src, tokens, execution=DEFAULT_SEARCH_EXECUTION):
    """Return the logits after each of the tokens [L, B] or [L, B, N]."""
    memory, mask = remember(config, params, src)
    single = tokens.ndim == 2 + (config.token_embeddings == "none")
    count = 1 if single else tokens.shape[2]
    cache = init_cache(params, config, memory, LENGTH, mask, beam_size=count, execution=execution)

    def step(cache, tokens):
        logits, cache = decode_step(params, config, cache, tokens, execution=execution)
        return cache, logits

    return jax.lax.scan(step, cache, tokens)[1]


# And whether the decoder has a final norm of its own.
FINAL_NORMS = {
    "of its own": ("pre_norm", {"final_norm": False, "decoder_final_norm": True}),
    "of the encoder": ("pre_norm", {"final_norm": True, "decoder_final_norm": False}),
}


@pytest.mark.parametrize(
    "model",
    tiered([*DISTINCT_PRESETS, *OTHERS, *FINAL_NORMS], (*QUICK_MODELS, "of its own")),
)
def test_every_step_is_the_uncached_model(model, dtype):
    preset, fields = FINAL_NORMS.get(model, (model, {}))
    config, params, src, tokens = setting(preset, dtype, beam_size=1, **fields)
    tokens = tokens[:, :, 0]
    compare = jax.jit(lambda *args: (cached(config, *args), uncached(config, *args)))
    found, expected = compare(params, src, tokens)
    assert found.dtype == dtype
    for step in range(LENGTH):
        assert error(found[step], expected[step]) <= bound("logits", dtype), step
    print(f"\n{model} {dtype}: {error(found, expected):.0e}", end="")


@pytest.mark.parametrize(
    "preset", tiered(["bart", "t5", "umt5", "modern", "windows", "pre_norm_decoder"], ["umt5"])
)
def test_a_step_is_that_of_the_torch_reference(preset, x64):
    config, params, src, tokens = setting(preset, "float64", beam_size=1)
    reference = torch_reference.Transformer(config).double().eval()
    reference.load_state_dict(convert.to_torch(params, config))
    expected = cached(config, params, src, tokens[:, :, 0])
    with torch.no_grad():
        src = torch.from_numpy(np.asarray(src))
        src_mask = torch_reference.masks.source_mask(src, config)
        cache = reference.decoder.init_cache(reference.encode(src, src_mask), src_mask)
        for step, ids in enumerate(tokens[:, :, 0]):
            logits, cache = reference.step(torch.from_numpy(ids), cache, src_mask)
            assert error(logits, expected[step]) <= bound("logits", "float64"), step


@pytest.mark.parametrize(
    "preset",
    tiered(["vaswani2017", "shared_heads", "t5", "umt5", "windows", "merged", "ssru"], ["umt5"]),
)
@pytest.mark.parametrize("beam_size", tiered([1, BEAM], [BEAM]))
def test_joined_heads_are_split_heads(preset, beam_size, dtype):
    """Each of the presets decodes in another way."""
    config, params, src, tokens = setting(preset, dtype, beam_size)
    tpu = SearchExecution.for_platform("tpu")
    compare = jax.jit(lambda *args: (cached(config, *args, tpu), cached(config, *args)))
    found, expected = compare(params, src, tokens)
    assert found.dtype == dtype
    assert error(found, expected) <= bound("logits", dtype)


@pytest.mark.exhaustive
def test_a_step_reads_the_layout_off_the_cache():
    """As `init_cache` made it, whatever the step is told."""
    config, params, src, tokens = setting("vaswani2017", beam_size=1)
    memory, mask = remember(config, params, src)
    tpu = SearchExecution.for_platform("tpu")
    cache = init_cache(params, config, memory, LENGTH, mask, execution=tpu)
    width = config.num_heads * config.head_dim
    assert cache.layers[0].self_attention.keys.shape == (BATCH, LENGTH, width)
    one, following = decode_step(params, config, cache, tokens[0, :, 0])
    other, _ = decode_step(params, config, cache, tokens[0, :, 0], execution=tpu)
    assert error(one, other) <= bound("logits", "float32")
    assert jax.tree.map(jnp.shape, following) == jax.tree.map(jnp.shape, cache)


HALF = float(jnp.finfo(jnp.bfloat16).eps)


@pytest.mark.parametrize("preset", tiered(["bart", *OTHERS], quick=["bart"]))
def test_the_cache_of_bfloat16_is_wide_where_a_cpu_computes(preset):
    config, params, src, tokens = setting(preset, beam_size=1)
    tokens, half = tokens[:, :, 0], in_dtype(params, "bfloat16")
    expected = uncached(config, in_dtype(half, "float32"), src, tokens)
    for execution in (SearchExecution(), SearchExecution(wide_cache=False)):
        dtype = "float32" if execution.wide_cache else "bfloat16"
        dtypes = {dtype, "float32"} if preset == "ssru" else {dtype}  # its state is always wide
        memory, mask = remember(config, half, src)
        cache = init_cache(half, config, memory, LENGTH, src_mask=mask, execution=execution)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(cache.layers)} == dtypes
        found = cached(config, half, src, tokens, execution)
        assert found.dtype == "bfloat16"
        assert error(found.astype(np.float32), expected) < 8 * HALF
    for platform in ("gpu", "tpu"):
        assert not SearchExecution.for_platform(platform).wide_cache


def with_ancestors(config, params, src, tokens, parents):
    """Return each step's logits where hypotheses continue others: only the table moves."""
    memory, mask = remember(config, params, src)
    cache = init_cache(params, config, memory, LENGTH, mask, beam_size=BEAM)

    def step(cache, chosen):
        tokens, parents = chosen
        logits, cache = decode_step(params, config, cache, tokens)
        return select_hypotheses(cache, parents), logits

    return jax.lax.scan(step, cache, (tokens, parents))[1]


def with_gathering(config, params, src, tokens, parents):
    """Return the same, each hypothesis a row of its own: memory copied, keys and values moved."""
    memory, mask = remember(config, params, src)
    memory = jnp.repeat(memory, BEAM, axis=0)
    mask = jax.tree.map(lambda leaf: jnp.repeat(leaf, BEAM, axis=0), mask)
    cache = init_cache(params, config, memory, LENGTH, mask)

    def step(cache, chosen):
        tokens, parents = chosen
        logits, cache = decode_step(params, config, cache, tokens.reshape(-1, *tokens.shape[2:]))
        rows = (jnp.arange(BATCH)[:, None] * BEAM + parents).reshape(-1)
        layers = jax.tree.map(lambda leaf: leaf[rows], cache.layers)
        return cache._replace(layers=layers), logits.reshape(BATCH, BEAM, -1)

    return jax.lax.scan(step, cache, (tokens, parents))[1]


@pytest.mark.parametrize(
    "preset",
    tiered(
        ["vaswani2017", "shared_heads", "torch_nn", "windows", "merged", "ssru"],
        ["vaswani2017", "ssru"],
    ),
)
def test_ancestors_are_gathering_without_the_moving(preset, dtype):
    config, params, src, tokens = setting(preset, dtype)
    parents = np.random.default_rng(1).integers(0, BEAM, (LENGTH, BATCH, BEAM)).astype(np.int32)
    compare = jax.jit(lambda *args: (with_ancestors(config, *args), with_gathering(config, *args)))
    found, expected = compare(params, src, tokens, parents)
    assert found.shape[:3] == (LENGTH, BATCH, BEAM)
    assert error(found, expected) <= bound("logits", dtype)
    if preset != "shared_heads":  # there, targets do not see each other
        others, _ = compare(params, src, tokens, parents[:, :, ::-1])
        assert error(found[2], others[2]) > 1e-3


def test_hypotheses_share_the_memory_and_move_nothing_else():
    config, params, src, tokens = setting("vaswani2017")
    cache = start(config, params, src)
    heads = (BATCH, config.num_heads)
    for layer in cache.layers:
        targets, memory = layer
        assert memory.keys.shape == (*heads, config.head_dim, SOURCE_LENGTH)
        assert memory.values.shape == (*heads, SOURCE_LENGTH, config.head_dim)
        assert targets.keys.shape == (*heads, config.head_dim, LENGTH * BEAM)
        assert targets.values.shape == (*heads, LENGTH * BEAM, config.head_dim)
    _, cache = quick_step(params, config, cache, tokens[0])
    moved = select_hypotheses(cache, np.full((BATCH, BEAM), 2))
    assert moved.layers is cache.layers
    assert moved.ancestors[:, :, 0].tolist() == [[2] * BEAM] * BATCH


@pytest.mark.parametrize("preset", tiered(["pre_norm", "shared_heads", "ssru"], ["pre_norm"]))
def test_a_full_cache_is_refused_and_never_written(preset):
    config, params, src, tokens = setting(preset)
    cache = start(config, params, src)
    for index in range(LENGTH):
        logits, cache = quick_step(params, config, cache, tokens[index])
        assert jnp.isfinite(logits).all()
    with pytest.raises(InputError, match=f"full.*max_new_tokens={LENGTH}"):
        decode_step(params, config, cache, tokens[0])
    logits, after = quick_step(params, config, cache, tokens[0])
    assert jnp.isnan(logits).all()
    assert_equal(after.layers, cache.layers)
    assert_equal(after.ancestors, cache.ancestors)
    assert jnp.isnan(quick_step(params, config, after, tokens[0])[0]).all()


def test_bad_sizes_shapes_and_ids_are_refused():
    config, params, src, tokens = setting("vaswani2017")
    memory = np.zeros((BATCH, SOURCE_LENGTH, config.d_model), np.float32)

    def attempt(max_new_tokens=LENGTH, mask=None, **options):
        return init_cache(params, config, memory, max_new_tokens, mask, **options)

    with pytest.raises(InputError, match="max_new_tokens=0"):
        attempt(0)
    with pytest.raises(InputError, match="beam_size=0"):
        attempt(beam_size=0)
    with pytest.raises(InputError, match=r"30 .*max_length=29"):
        attempt(30)
    with pytest.raises(InputError, match=r"= \[5, 3, 1, 13\]"):
        attempt(mask=np.ones((1, 1, 2, SOURCE_LENGTH), bool))
    assert start(config, params, src, length=29, beam_size=1).ancestors.shape == (BATCH, 1, 29)
    cache = start(config, params, src)
    for wrong in (tokens[0, :, :2], tokens[0, :2], tokens[0, :, 0]):
        with pytest.raises(InputError, match=r"must be \[5, 3\]"):
            decode_step(params, config, cache, wrong)
    with pytest.raises(InputError, match=r"tokens\[1, 2\]=41"):
        decode_step(params, config, cache, np.where(np.arange(15).reshape(5, 3) == 5, 41, 3))


def test_a_target_as_long_as_its_source_needs_a_memory_as_long():
    config, params, src, _ = setting("shared_heads")
    with pytest.raises(InputError, match=r"max_new_tokens=14 .*13.*pad the source"):
        start(config, params, src, length=SOURCE_LENGTH + 1)


@pytest.mark.parametrize("beam_size", tiered([1, 2], [2]))
def test_the_compiled_loop_writes_into_the_cache_and_copies_none_of_it(beam_size):
    config, params, src, _ = setting("vaswani2017")
    search = functools.partial(generate, max_new_tokens=LENGTH, beam_size=beam_size)
    program = jax.jit(search, static_argnums=1).lower(params, config, src).compile().as_text()
    slots = LENGTH * beam_size
    rows = f"{BATCH},{config.num_heads}"
    shapes = f"{rows},{config.head_dim},{slots}|{rows},{slots},{config.head_dim}"
    loop = program[: program.index("\nENTRY ")]
    assert re.search(rf"f32\[({shapes})\]\S* dynamic-update-slice\(", loop)
    assert not re.findall(rf"f32\[({shapes})\]\S* copy\(", loop)


@pytest.mark.parametrize("preset", tiered(["pre_norm", "shared_heads"], ["pre_norm"]))
def test_what_padding_of_the_memory_holds_does_not_matter(preset):
    config, params, src, tokens = setting(preset)
    padding = np.asarray(src == config.pad_id)[..., None]
    memory, mask = remember(config, params, src)

    @jax.jit
    def first_logits(memory):
        cache = init_cache(params, config, memory, LENGTH, mask, beam_size=BEAM)
        return decode_step(params, config, cache, tokens[0])[0]

    expected = first_logits(np.where(padding, 0, memory))
    for garbage in (np.nan, np.inf, 1e30):
        np.testing.assert_array_equal(first_logits(np.where(padding, garbage, memory)), expected)
