"""Denoising: round trips of each denoiser, the ids of the deleted script, frequencies.

`t5_collator.json` was made by `create_sentinel_ids` and `filter_input_ids` of
`FlaxDataCollatorForT5MLM` (transformers 4.57, examples/flax/language-modeling/run_t5_mlm_flax.py)
on `documents(10_000)`, with 32,100 ids and EOS 1: the first examples, and the sha256 of all sources
and targets as little-endian int32, in order.
"""

import hashlib
import itertools
import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_transformer.errors import InputError
from jax_transformer.text.denoising import (
    LONGEST_TEXT,
    OBJECTIVES,
    Denoiser,
    Objective,
    SpecialIds,
    corrupted,
    denoised,
    denoisers,
    noise_of,
    sizes,
    span_mask,
)
from tests.tiers import tiered

SENTINELS = tuple(range(32_099, 31_999, -1))
SPECIAL = SpecialIds(0, ((5, 6), (1,)), ((8,), (1, 9)), SENTINELS, 2, frozenset({7, 11}))
DENOISERS = {each.name: each for group in OBJECTIVES.values() for each in group}
GOLDEN = json.loads((Path(__file__).parent / "t5_collator.json").read_text())


def documents(count):
    """Yield the ids and a noise mask of each document, by a linear congruential generator."""

    def numbers(state=1):
        while True:
            state = (1103515245 * state + 12345) % 2**31
            yield state // 2**12

    drawn = numbers()
    for number in range(count):
        length = 7 + number * 13 % 506
        ids = [3 + next(drawn) % 31_997 for _ in range(length)]
        mask = []
        while len(mask) < length - 1:
            mask += [False] * (1 + next(drawn) % 11) + [True] * (1 + next(drawn) % 5)
        yield np.array(ids), np.array([*mask[: length - 1], True])


def with_eos(ids, mask):
    return [[*side.tolist(), 1] for side in corrupted(ids, mask, SENTINELS)]


def restored(source, target):
    """Return the text of which spans became sentinels."""
    spans, text = {}, []
    for token in target.tolist():
        if token in SENTINELS:
            spans[token] = []
            last = token
        else:
            spans[last].append(token)
    for token in source.tolist():
        text += spans.pop(token) if token in SENTINELS else [token]
    assert not spans
    return text


def text_of(seed, length):
    return np.random.default_rng(seed).integers(3, 31_000, length)


def test_the_first_documents_are_those_of_the_deleted_script():
    ours = [with_eos(*document) for document in documents(len(GOLDEN["examples"]))]
    assert ours == GOLDEN["examples"]


@pytest.mark.exhaustive
def test_10_000_documents_are_those_of_the_deleted_script():
    digest = hashlib.sha256()
    for document in documents(10_000):
        for side in with_eos(*document):
            digest.update(np.array(side, "<i4").tobytes())
    assert digest.hexdigest() == GOLDEN["sha256"]


@pytest.mark.parametrize("name", DENOISERS)
@settings(max_examples=30, deadline=None)
@given(
    ids=st.lists(st.integers(3, 31_000), min_size=2, max_size=190),
    key=st.tuples(st.integers(0, 2**32), st.integers(0, 9)),
)
def test_source_and_target_give_the_text_back(name, ids, key):
    check_round_trip(DENOISERS[name], np.array(ids), key)


def check_round_trip(denoiser, ids, key):
    source, target = denoised(denoiser, ids, key, SPECIAL)
    again = denoised(denoiser, ids.copy(), key, SPECIAL)
    assert all(map(np.array_equal, (source, target), again))
    if denoiser.method == "prefix_lm":
        assert len(source) >= 1 <= len(target)
        assert [*source, *target] == ids.tolist()
    elif denoiser.method == "infilling":
        assert target.tolist() == ids.tolist()
        kept = Counter(source[source != SPECIAL.mask].tolist())
        assert not kept - Counter(ids.tolist())
        assert kept.total() == len(ids) - noise_of(len(ids), denoiser)[0]
    else:
        assert restored(source, target) == ids.tolist()
    most = sizes(denoiser, len(ids) + 40, key, len(SENTINELS))
    assert [side[len(ids)] for side in most] == [len(source), len(target)]
    assert all((np.diff(side) >= 0).all() for side in most)


@pytest.mark.parametrize("name", tiered(DENOISERS, [], ["span_corruption", "infilling"]))
def test_10_000_documents_come_back(name):
    random = np.random.default_rng(3)
    for number in range(10_000):
        length = int(random.integers(2, 400))
        if sizes(DENOISERS[name], length, (0, number), 100)[0][-1] < 2**40:
            check_round_trip(DENOISERS[name], random.integers(3, 31_000, length), (0, number))


def test_infilling_with_one_hidden_token_permutes_whole_sentences():
    """Sentences end with 7 or 11, which go with them; the last one needs no end."""
    sentences = [20, 21, 7], [30, 11], [40, 41, 42, 7], [50]
    lone = Denoiser("lone", "infilling", 0.0, 1.0)
    orders = [[*itertools.chain(*order)] for order in itertools.permutations(sentences)]
    without_one = {(*order[:i], *order[i + 1 :]) for order in orders for i in range(10)}
    seen = set()
    for key in range(60):
        source, _ = denoised(lone, np.array(orders[0]), (key,), SPECIAL)
        kept = source[source != SPECIAL.mask].tolist()
        assert tuple(kept) in without_one
        seen.add(tuple(token for token in kept if token in (20, 30, 40, 50)))
    assert len(seen) > 10


@pytest.mark.parametrize(
    ("length", "count", "spans", "masks", "bound"),
    [
        (8, 1, 1, 8, 24.3),  # a single span, anywhere
        (30, 4, 1, 27, 54.0),
        (12, 4, 2, math.comb(9, 2) * math.comb(3, 1), 157.9),
        (22, 11, 10, math.comb(10, 9) ** 2, 148.2),  # from here on the rule of T5
    ],
)
def test_every_mask_is_equally_likely(length, count, spans, masks, bound):
    """Chi-squared: the bounds are those of p = 0.001, for one degree of freedom less."""
    drawn = [span_mask(length, count, spans, (1, key)) for key in range(60 * masks)]
    assert all(mask.sum() == count for mask in drawn)
    seen = Counter(mask.tobytes() for mask in drawn)
    assert len(seen) == masks
    assert sum((times - 60) ** 2 / 60 for times in seen.values()) < bound


def test_masks_of_the_lengths_of_t5_begin_with_text_and_end_with_noise():
    for length in (193, 512, 568):
        count, spans = noise_of(length, DENOISERS["span_corruption"])
        masks = np.stack([span_mask(length, count, spans, (4, key)) for key in range(50)])
        assert not masks[:, 0].any()
        assert masks[:, -1].all()


def test_the_denoisers_are_those_of_the_papers():
    """Raffel et al. 2020, section 3.1.4; Tay et al. 2023, table 1; Lewis et al. 2020, section 2.2.

    The mode tokens are those of the published UL2: [NLU] for R, [S2S] for S, [NLG] for X.
    """
    assert [tuple(each) for group in OBJECTIVES.values() for each in group] == [
        ("span_corruption", "spans", 0.15, 3, ""),
        ("r_0.15_3", "spans", 0.15, 3, "[NLU]"),
        ("r_0.15_8", "spans", 0.15, 8, "[NLU]"),
        ("s_0.25", "suffix", 0.25, 1, "[S2S]"),
        ("x_0.5_3", "spans", 0.5, 3, "[NLG]"),
        ("x_0.5_8", "spans", 0.5, 8, "[NLG]"),
        ("x_0.15_64", "spans", 0.15, 64, "[NLG]"),
        ("x_0.5_64", "spans", 0.5, 64, "[NLG]"),
        ("infilling", "infilling", 0.3, 3, ""),
        ("prefix_lm", "prefix_lm", 0, 1, ""),
    ]


T5_COUNTS = {2: (1, 1), 7: (1, 1), 10: (2, 1), 100: (15, 5), 512: (77, 26), 568: (85, 28)}


@pytest.mark.parametrize(
    ("denoiser", "rows"),
    [
        (DENOISERS["span_corruption"], T5_COUNTS),
        (DENOISERS["s_0.25"], {2: (1, 1), 7: (2, 1), 100: (25, 1)}),
        # Spans are counted by what is hidden or by what is kept, whichever is less.
        (DENOISERS["x_0.5_3"], {15: (8, 2), 100: (50, 17)}),
        (Denoiser("dense", "spans", 0.8, 3.0), {30: (24, 2), 100: (80, 7)}),
    ],
)
def test_the_counts_are_those_of_t5(denoiser, rows):
    """So are the sizes: 568 tokens become 512 and 114, each with EOS."""
    assert {length: noise_of(length, denoiser) for length in rows} == rows
    if 568 in rows:
        assert [side[568] for side in sizes(denoiser, 568, (0,), 100)] == [511, 113]


def test_the_s_denoiser_hides_the_end():
    source, target = denoised(DENOISERS["s_0.25"], np.arange(100, 120), (1,), SPECIAL)
    assert source.tolist() == [*range(100, 115), SENTINELS[0]]
    assert target.tolist() == [SENTINELS[0], *range(115, 120)]


def test_prefixes_of_every_length_are_equally_likely():
    """Of 11 tokens 1 to 10 (chi-squared: 9 degrees of freedom, p = 0.001)."""
    lone, ids = DENOISERS["prefix_lm"], np.arange(11)
    seen = Counter(len(denoised(lone, ids, (6, key), SPECIAL)[0]) for key in range(2_000))
    assert sorted(seen) == [*range(1, 11)]
    assert sum((times - 200) ** 2 / 200 for times in seen.values()) < 27.9


def infilled_spans(length, key):
    """Return the places before which spans begin and end, of a text without ends of sentences."""
    source, _ = denoised(DENOISERS["infilling"], np.arange(100, 100 + length), (7, key), SPECIAL)
    around = np.concatenate([[99], source, [100 + length]]) - 100
    places = np.flatnonzero(around == SPECIAL.mask - 100)
    return list(zip(around[places - 1] + 1, around[places + 1], strict=True))


def test_spans_of_infilling_lie_anywhere_whatever_their_length():
    """Of 20 tokens 6 are hidden: by the place of each, and the lengths of first and last spans."""
    drawn = [infilled_spans(20, key) for key in range(4_000)]
    hidden = Counter(place for spans in drawn for span in spans for place in range(*span))
    assert all(0.1 < hidden[place] / 4_000 < 0.45 for place in range(20))
    assert abs(np.average([*hidden], weights=[*hidden.values()]) - 9.5) < 0.2
    first, last = (np.array([np.diff(spans[i])[0] for spans in drawn]) for i in (0, -1))
    assert abs(np.mean(first - last)) < 0.14  # 4 standard errors


def test_spans_of_infilling_have_the_lengths_of_poisson():
    """The share of masks of each length; the last span, which is cut, is one of many."""
    spans = [span for key in range(40) for span in infilled_spans(2_000, key)]
    lengths = Counter(int(end - begin) for begin, end in spans)
    for length in range(7):
        expected = math.exp(-3) * 3**length / math.factorial(length)
        assert abs(lengths[length] / len(spans) - expected) < 0.015, length


def test_the_denoisers_of_ul2_are_drawn_equally_often():
    objective = Objective(OBJECTIVES["ul2"], ((),) * 7, SPECIAL, 512, 0)
    seen = Counter(objective.draw((2, key)) for key in range(7_000))
    assert set(seen) == set(range(7))
    assert all(abs(count - 1_000) < 120 for count in seen.values())  # 4 standard deviations


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_example_fits_and_the_next_token_would_not(objective):
    chosen = OBJECTIVES[objective]
    made = Objective(chosen, ((3, 4),) * len(chosen), SPECIAL, 60, 0)
    ids = text_of(0, 300)
    for key, free in itertools.product(range(40), ((50, 50), (90, 20), (12, 80), (4, 4))):
        count, source, target = made.fit(300, free, (key,))
        room = [min(side, 60) for side in free]
        if count:
            sides = made.example(ids[:count], (key,))
            assert sides[0][[0, 1, 2, 3, -1]].tolist() == [5, 6, 3, 4, 1]
            assert sides[1][[0, 1, -2, -1]].tolist() == [0, 8, 1, 9]
            assert [len(side) for side in sides] == [source, target + 1]
            assert source <= room[0]
            assert target <= room[1]
        longer = [len(side) for side in made.example(ids[: max(count, 1) + 1], (key,))]
        assert longer[0] > room[0] or longer[1] - 1 > room[1]


def test_a_text_never_has_more_spans_than_there_are_sentinels():
    few = SPECIAL._replace(sentinels=SENTINELS[:5])
    objective = Objective(OBJECTIVES["span_corruption"], ((),), few, LONGEST_TEXT, 0)
    count, *_ = objective.fit(LONGEST_TEXT, (LONGEST_TEXT,) * 2, (0,))
    assert noise_of(count, DENOISERS["span_corruption"])[1] == 5
    assert noise_of(count + 1, DENOISERS["span_corruption"])[1] == 6


def test_settings_that_an_objective_fixes_are_refused():
    changed = denoisers("span_corruption", 0.5, None)
    assert [(each.density, each.mean_length) for each in changed] == [(0.5, 3.0)]
    with pytest.raises(
        InputError,
        match=r"noise_density=0.2 and mean_span_length=None are fixed by objective='ul2'",
    ):
        denoisers("ul2", 0.2, None)
