"""Where nothing can be refused, an id, a parent or a position outside gives NaN, never another's.

JAX would read -1 as the last index; a device clamps, wraps or drops an index that is too large.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_transformer import (
    apply,
    cross_entropy,
    decode,
    decode_step,
    encode,
    generate,
    init_cache,
    make_train_step,
    score,
    select_hypotheses,
)
from jax_transformer.kernels.segments import SegmentMask
from jax_transformer.text.batches import Batch
from jax_transformer.training.config import TrainingConfig
from jax_transformer.training.optimizer import run_optimizer
from tests.models import one_layer, random_params

CONFIG = one_layer("vaswani2017", vocab_size=9, d_model=4, num_heads=2, d_ff=4, max_length=9)
OTHER = dataclasses.replace(CONFIG, token_embeddings="separate", positions="learned")
PARAMS, OTHERS = random_params(CONFIG), random_params(OTHER)
COUNT = 9  # of ids, of positions and of hypotheses
FAR = 2**31 - 1
OUTSIDE = {
    np.int32: (-1, -COUNT, -COUNT - 1, COUNT, COUNT + 1, 1000, FAR, -FAR - 1),
    np.int64: (-1, -COUNT, COUNT, 2**32 + 5, 5 - 2**32, 2**63 - 1, -(2**63)),
}
SRC = np.array([[4, 5, 6], [5, 6, 7]])
TGT = np.array([[1, 4, 5], [1, 6, 7]])
OUT = np.array([[4, 5, 2], [6, 7, 2]])
LOGITS = np.random.default_rng(0).normal(size=(2, 3, COUNT)).astype(np.float32)
PLACES = [[0, 1, 2], [0, 1, 2]]
MEMORY = encode(PARAMS, CONFIG, SRC)


def last(rows, number):
    """Return a batch whose last number of row 0 is another."""
    return jnp.asarray(rows, number.dtype).at[0, -1].set(number)


def search(**options):
    return generate(PARAMS, CONFIG, SRC, max_new_tokens=3, beam_size=2, **options).scores


def new_cache(beam_size=1):
    return init_cache(PARAMS, CONFIG, MEMORY, 4, beam_size=beam_size)


def logits_after_parent(parent):
    """Return the logits of the last hypothesis of each source, two steps after it has a parent."""
    tokens = jnp.full((2, COUNT), 4)
    _, cache = decode_step(PARAMS, CONFIG, new_cache(COUNT), tokens)
    cache = select_hypotheses(cache, last([range(COUNT)] * 2, parent))
    _, cache = decode_step(PARAMS, CONFIG, cache, tokens)
    return decode_step(PARAMS, CONFIG, cache, tokens)[0][:, -1]


def gradient_of_loss(target):
    targets = last(OUT, target)
    return jax.grad(lambda logits: cross_entropy(logits, targets, 0, 0.1)[0])(LOGITS)[:, -1]


READERS = {  # a number -> an array whose row 0 has read it
    "source": lambda n: apply(PARAMS, CONFIG, last(SRC, n), TGT),
    "target": lambda n: apply(PARAMS, CONFIG, SRC, last(TGT, n))[:, -1],
    "encode": lambda n: encode(PARAMS, CONFIG, last(SRC, n))[:, -1],
    "decode": lambda n: decode(PARAMS, CONFIG, last(TGT, n), MEMORY)[:, -1],
    "source positions": lambda n: encode(PARAMS, CONFIG, SRC, src_positions=last(PLACES, n)),
    "learned positions": lambda n: encode(OTHERS, OTHER, SRC, src_positions=last(PLACES, n)),
    "target positions": lambda n: decode(
        PARAMS, CONFIG, TGT, MEMORY, tgt_positions=last(PLACES, n)
    )[:, -1],
    "score of a source": lambda n: score(PARAMS, CONFIG, last(SRC, n), OUT),
    "score of a target": lambda n: score(PARAMS, CONFIG, SRC, last(OUT, n)),
    "search": lambda n: generate(PARAMS, CONFIG, last(SRC, n), max_new_tokens=2).scores,
    "start token": lambda n: search(start_token=last([[1], [1]], n)[:, 0]),
    "prefix": lambda n: search(prefix=last(OUT, n)),
    "first of a prefix": lambda n: search(prefix=last([[4], [4]], n)),
    "gradient of the loss": gradient_of_loss,
    "parent": logits_after_parent,
    "step": lambda n: decode_step(PARAMS, CONFIG, new_cache(), last([[4], [4]], n)[:, 0])[0],
}


@pytest.fixture(scope="module", params=READERS)
def reader(request):
    return jax.jit(READERS[request.param])


@pytest.mark.parametrize("dtype", [np.int32, pytest.param(np.int64, marks=pytest.mark.exhaustive)])
def test_a_number_outside_gives_nan_in_its_row_and_one_inside_a_number(reader, dtype):
    with jax.enable_x64(dtype == np.int64):
        for number in OUTSIDE[dtype]:
            read = np.asarray(reader(dtype(number)))
            assert np.isnan(read[0]).all(), number
            assert np.isfinite(read[1]).all(), number
        assert all(np.isfinite(reader(dtype(number))).all() for number in (1, COUNT - 1))


@pytest.mark.parametrize("guarded", [False, True])
def test_a_target_outside_leaves_no_parameter_that_looks_right(guarded):
    """Every number of every parameter is NaN, of rows that no id names too; or nothing changes."""
    optimizer = run_optimizer(OTHER, TrainingConfig()) if guarded else optax.adam(0.1)
    step, state = jax.jit(make_train_step(OTHER, optimizer)), optimizer.init(OTHERS)
    for number in OUTSIDE[np.int32]:
        params, _, loss = step(OTHERS, state, Batch(SRC, TGT, last(OUT, np.int32(number))))
        assert np.isnan(loss)
        for new, old in zip(*map(jax.tree.leaves, (params, OTHERS)), strict=True):
            assert np.array_equal(new, old) if guarded else np.isnan(new).all()


@pytest.mark.exhaustive
def test_a_segment_below_1_is_hidden_as_0_is():
    keys, zeros = jnp.array([[1, 1, -1], [1, 1, -5]]), jnp.array([[1, 1, 0], [1, 1, 0]])
    for queries in (None, keys):
        hidden, expected = (
            encode(PARAMS, CONFIG, SRC, SegmentMask(side, queries)) for side in (keys, zeros)
        )
        np.testing.assert_array_equal(hidden, expected)
