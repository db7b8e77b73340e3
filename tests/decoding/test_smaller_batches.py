"""A search whose sources leave the batch when their targets have ended finds the same."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_transformer import generate
from jax_transformer.decoding.generation_config import GenerationConfig
from jax_transformer.decoding.rules import make_rules
from jax_transformer.decoding.search import batch_sizes, extend_all
from jax_transformer.kernels.execution import SearchExecution
from tests.models import random_params, small_config
from tests.parity.ladder import ROUNDED, error
from tests.tiers import tiered

BATCH, STEPS = 67, 20  # followed by batches of 33 and of 8
SMALLER = SearchExecution(smaller_batches=True)
RANDOM = np.random.default_rng(5)
SRC = RANDOM.integers(4, 37, (BATCH, 9))
LIMITS = RANDOM.integers(1, STEPS + 1, BATCH)
PREFIX = np.where(np.arange(3) < RANDOM.integers(0, 4, BATCH)[:, None], 7, 0)
OPTIONS = {
    "greedy": {},
    "greedy, rules by row": {"prefix": PREFIX, "start_token": np.arange(BATCH) % 5 + 4},
    "greedy, n-grams of the source": {"encoder_no_repeat_ngram_size": 1, "min_new_tokens": 2},
    "greedy, one mask": {"src_mask": (np.arange(9) != 3)[None, None, None]},
    "beam": {"beam_size": 3, "num_hypotheses": 2, "length_penalty": 0.7},
    "beam, early": {"beam_size": 3, "num_hypotheses": 3, "early_stopping": True},
    "beam, by length": {"beam_size": 2, "early_stopping": False, "no_repeat_ngram_size": 2},
    "beam, rules by row": {"beam_size": 2, "prefix": PREFIX, "forced_last_token": 9},
}


@pytest.fixture(scope="module")
def model():
    config = small_config("vaswani2017", d_model=24, num_decoder_layers=1, max_length=40)
    # Targets that differ, and end early or late: EOS is likelier than in random parameters.
    return jax.tree.map(lambda leaf: 1.7 * leaf, random_params(config, seed=2)), config


@pytest.mark.parametrize("name", tiered(OPTIONS, ["beam, rules by row"]))
def test_the_same_hypotheses(model, name):
    options = {"max_new_tokens": STEPS, "length_limits": LIMITS, **OPTIONS[name]}
    whole = generate(*model, SRC, **options)
    parts = generate(*model, SRC, **options, execution=SMALLER)
    assert np.array_equal(whole.tokens, parts.tokens)
    assert np.array_equal(whole.lengths, parts.lengths)
    assert error(whole.scores, parts.scores) <= ROUNDED
    assert len(np.unique(whole.lengths[:, 0])) > STEPS // 2
    assert len(np.unique(whole.tokens[:, 0], axis=0)) > BATCH // 2


@pytest.mark.exhaustive
def test_an_ensemble_and_draws(model):
    params, config = model
    both = [params, random_params(config, seed=8)], [config, config]
    limits = {"max_new_tokens": STEPS, "length_limits": LIMITS}
    found = [
        generate(*both, SRC, **limits, execution=e).tokens for e in (SearchExecution(), SMALLER)
    ]
    assert np.array_equal(*found)
    drawn = {"key": jax.random.key(4), "temperature": 0.8, **limits}
    found = [
        generate(*model, SRC, **drawn, execution=e).tokens for e in (SearchExecution(), SMALLER)
    ]
    assert np.array_equal(*found)


class State(NamedTuple):
    step: jax.Array
    sequences: jax.Array
    ended: jax.Array
    visits: jax.Array  # by size of the batch


def test_rows_leave_when_a_smaller_batch_holds_those_that_go_on():
    config = small_config("vaswani2017")
    lengths = np.array([9, 1, 4, 2, 9, 3, 3, 2, 7, 1, 4, 2, 6, 3, 3, 2])
    rules = make_rules(GenerationConfig(9), config, jnp.ones((16, 4), jnp.int32), None, lengths)
    sizes = [16, 8, 2]

    def extend(state, rules):
        size = state.ended.shape[0]
        return State(
            step=state.step + 1,
            sequences=state.sequences.at[:, :, state.step + 1].set(1),
            ended=state.step + 1 >= rules.limits,
            visits=state.visits.at[sizes.index(size)].add(1),
        )

    start = State(
        step=jnp.zeros((), int),
        sequences=jnp.zeros((16, 1, 10), int),
        ended=jnp.zeros(16, bool),
        visits=jnp.zeros(3, int),
    )
    end = extend_all(extend, start, rules, sizes)
    # 10 targets are longer than 2, 6 longer than 3, 3 longer than 6, and 2 longer than 7.
    assert end.visits.tolist() == [3, 4, 2]
    assert end.ended.all()
    assert batch_sizes(64) == [64, 32, 8]
    assert batch_sizes(16) == [16, 8]
    assert batch_sizes(15) == [15]
