"""A search in slots finds what `generate` finds, whenever and wherever a source enters."""

from functools import partial
from itertools import pairwise

import jax
import numpy as np
import pytest

from jax_transformer import generate
from jax_transformer.decoding.generation_config import GenerationConfig
from jax_transformer.decoding.rules import make_rules
from jax_transformer.decoding.slots import Group, SlotSearch
from jax_transformer.kernels.execution import SearchExecution
from tests.models import random_params, small_config
from tests.parity.ladder import error
from tests.tiers import tiered

BATCH, STEPS = 67, 20
RANDOM = np.random.default_rng(5)
SRC = RANDOM.integers(4, 37, (BATCH, 9))
LIMITS = RANDOM.integers(1, STEPS + 1, BATCH)
PREFIX = np.where(np.arange(3) < RANDOM.integers(0, 4, BATCH)[:, None], 7, 0)
OPTIONS = {
    "greedy": {},
    "greedy, rules by row": {"prefix": PREFIX, "start_token": np.arange(BATCH) % 5 + 4},
    "greedy, n-grams of the source": {"encoder_no_repeat_ngram_size": 1, "min_new_tokens": 2},
    "beam": {"beam_size": 3, "num_hypotheses": 2, "length_penalty": 0.7},
    "beam, early": {"beam_size": 3, "num_hypotheses": 3, "early_stopping": True},
    "beam, by length": {"beam_size": 2, "early_stopping": False, "no_repeat_ngram_size": 2},
    "beam, rules by row": {"beam_size": 2, "prefix": PREFIX, "forced_last_token": 9},
}


SHAPES = {
    "relative": ("t5", {}),
    "rotary, grouped queries": ("modern", {}),
    "windows": ("t5gemma", {"sliding_window": 3}),
    "merged": ("t5gemma2", {"sliding_window": 3}),
    "learned": ("bart", {}),
    "self_over_memory": ("shared_heads", {}),
    "recurrence": ("ssru", {}),
}
EXECUTION = SearchExecution()
greedy_slots = partial(
    SlotSearch, source_length=9, generation=GenerationConfig(STEPS), execution=EXECUTION
)


@pytest.fixture
def model(x64):
    """In float64: sums over the ring are in another order, which float32 shows in the scores."""
    config = small_config("vaswani2017", d_model=24, num_decoder_layers=1, max_length=40)
    # Targets that differ, and end early or late: EOS is likelier than in random parameters.
    params = random_params(config, seed=2, dtype=np.float64)
    return jax.tree.map(lambda leaf: 1.7 * leaf, params), config


def in_slots(models, options, order, num_slots, rows, source_length=12, execution=EXECUTION):
    """Return the tokens, scores and lengths of all sources that enter in an order."""
    options = dict(options)
    params, configs = zip(*models, strict=True)
    prefix, key = options.pop("prefix", None), options.pop("key", None)
    start = np.resize(options.pop("start_token", configs[0].bos_id), BATCH)
    longest = STEPS + (0 if prefix is None else prefix.shape[1])

    def groups():
        for first in range(0, BATCH, rows):
            members = order[first : first + rows].tolist()
            here = np.resize(members, rows)
            given = GenerationConfig(max_new_tokens=STEPS, start_token=start[here], **options)
            own = None if prefix is None else prefix[here]
            keys = None if key is None else key[here]
            src = SRC[here].astype(np.int32)
            rules = make_rules(given, configs[0], src, own, LIMITS[here], keys)
            yield Group(members, src, rules)

    slots = SlotSearch(
        params=params,
        configs=configs,
        generation=GenerationConfig(STEPS, beam_size=options.get("beam_size", 1)),
        num_slots=num_slots,
        group_size=rows,
        source_length=source_length,
        target_length=longest,
        execution=execution,
    )
    found = {}
    for member, hypotheses, failed_at in search_all(slots, groups()):
        assert member not in found
        assert failed_at == -1
        found[member] = hypotheses
    return [np.stack(part) for part in zip(*(found[row] for row in range(BATCH)), strict=True)]


def search_all(slots, groups):
    """Yield what ends; each group enters as soon as it has room, beside what runs."""
    runs = []
    for group, following in pairwise([*groups, None]):
        slots.waiting = following.members if following else []
        yield from slots.advance(group)
        assert slots.num_free >= (len(slots.waiting) or slots.num_slots)
        runs.append(slots.runs)
    assert any(runs) or len(runs) == 1


def assert_same(found, expected):
    tokens, scores, lengths = found
    assert np.array_equal(expected.tokens, tokens)
    assert np.array_equal(expected.lengths, lengths)
    assert error(expected.scores, scores) <= np.finfo(np.float32).eps  # what scores are rounded to


@pytest.mark.parametrize("name", tiered(OPTIONS, ["beam, rules by row"]))
def test_sources_find_the_same_in_slots(model, name):
    options = OPTIONS[name]
    whole = generate(*model, SRC, max_new_tokens=STEPS, length_limits=LIMITS, **options)
    for num_slots, rows in ((16, 4), (7, 3), (BATCH, BATCH)):
        order = RANDOM.permutation(BATCH)
        assert_same(in_slots([model], options, order, num_slots, rows), whole)
    assert len(np.unique(whole.lengths[:, 0])) > STEPS // 2
    assert len(np.unique(whole.tokens[:, 0], axis=0)) > BATCH // 2


@pytest.mark.exhaustive
def test_an_ensemble_and_draws(model):
    config = model[1]
    models = [model, (random_params(config, seed=8, dtype=np.float64), config)]
    limits = {"max_new_tokens": STEPS, "length_limits": LIMITS}
    whole = generate(*map(list, zip(*models, strict=True)), SRC, **limits)
    order = RANDOM.permutation(BATCH)
    assert_same(in_slots(models, {}, order, 16, 4), whole)
    drawn = {"key": jax.random.split(jax.random.key(4), BATCH), "temperature": 0.8}
    whole = generate(*model, SRC, **limits, **drawn)
    assert_same(in_slots([model], drawn, order, 16, 4), whole)


@pytest.mark.parametrize(
    "name", tiered(SHAPES, [], ["relative", "windows", "merged", "recurrence"])
)
def test_every_kind_of_position_and_decoder_turns_with_the_ring(name, x64):
    config = small_config(SHAPES[name][0], max_length=40, **SHAPES[name][1])
    model = random_params(config, seed=3, dtype=np.float64), config
    for options in ({}, {"beam_size": 2}):
        whole = generate(*model, SRC, max_new_tokens=STEPS, length_limits=LIMITS, **options)
        for cache in ("split_heads", "joined_heads"):
            execution = SearchExecution(cache=cache)
            found = in_slots([model], options, np.arange(BATCH), 8, 2, STEPS, execution)
            assert_same(found, whole)
        assert len(np.unique(whole.lengths[:, 0])) > STEPS // 2


def test_a_source_that_fails_is_named_and_the_others_go_on():
    own = {"token_embeddings": "separate", "output_projection": "linear"}
    config = small_config("vaswani2017", **own)
    params = random_params(config)
    table = np.array(params["source_embedding"]["embedding"])
    table[35] = np.nan
    broken = params | {"source_embedding": {"embedding": table}}
    rules = make_rules(GenerationConfig(9), config, SRC[:2].astype(np.int32))
    groups = []
    for first in range(0, 12, 2):
        src = np.full((2, 9), 5 + first, np.int32)
        src[0, 3] = 35 if first == 4 else 6
        groups.append(Group([first, first + 1], src, rules))
    slots = greedy_slots(
        params=(broken,), configs=(config,), num_slots=4, group_size=2, target_length=9
    )
    failed = {member: failed_at for member, _, failed_at in search_all(slots, groups)}
    assert sorted(failed) == list(range(12))
    assert {member for member, failed_at in failed.items() if failed_at >= 0} == {4}


@pytest.mark.exhaustive
def test_a_search_runs_on_after_the_steps_that_an_integer_can_count(model):
    params, config = model

    def found(steps_before):
        slots = greedy_slots(
            params=(params,), configs=(config,), num_slots=8, group_size=4, target_length=STEPS
        )
        ended = []
        for first in (0, 4):
            rows = np.arange(first, first + 4)
            src, options = SRC[rows].astype(np.int32), GenerationConfig(max_new_tokens=STEPS)
            group = Group(rows.tolist(), src, make_rules(options, config, src))
            ended += slots.advance(group, most_steps=3)
        state = slots._slots.state
        (cache,) = state.caches
        position, begin = cache.position + steps_before, cache.begin + steps_before
        state = state._replace(caches=(cache._replace(position=position, begin=begin),))
        slots._slots = slots._slots._replace(state=state)
        ended += slots.advance(None)
        assert slots._slots.state.caches[0].position < 2 * STEPS
        return {member: hypotheses.tokens.tolist() for member, hypotheses, _ in ended}

    of_new = found(0)
    assert sorted(of_new) == list(range(8))
    assert len({str(tokens) for tokens in of_new.values()}) > 4
    assert found(2**31 - 8) == of_new  # a multiple of the ring's length; it wraps two steps later
