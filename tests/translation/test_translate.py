"""Translation of lines: order, independence of other lines, options, overlong and bad lines."""

import dataclasses
import io
import threading
from itertools import islice

import jax
import numpy as np
import pytest
from rich.console import Console

from jax_transformer import InputError, pad
from jax_transformer.decoding import Hypotheses, generate, score, slots
from jax_transformer.decoding.slots import Ended, SlotSearch
from jax_transformer.tokenizers import Tokenizer
from jax_transformer.translation.sources import windows
from jax_transformer.translation.text_stream import with_pauses
from jax_transformer.translation.translate import translate as translate_list
from tests.models import random_params, unchecked
from tests.text.texts import refuse_lines
from tests.tiers import tiered
from tests.translation.streams import translate_stream

LINES = ["abba", "", "a", "cab cab cab cab", " \t ", "b", "bacab"]
TEXTS = [line for line in LINES if line.strip()]
MAX_LENGTH = 40
BEAM = {"beam_size": 3, "num_hypotheses": 3}
HIGH_LIMIT = [
    {"early_stopping": False},
    {"early_stopping": True, "forced_last_token": 2, "num_hypotheses": 2},
    {"early_stopping": "never"},
    {"beam_size": 1, "forced_last_token": 2},
    {"early_stopping": False, "min_new_tokens": 50},
]


def translate(*arguments, **options):
    return list(translate_stream(*arguments, **options))


@pytest.fixture(scope="module")
def found(model):
    """What is found for the lines in one batch, by beam size."""
    best_three = translate(model, LINES, length_penalty=0.8, **BEAM)
    return {1: translate(model, LINES, length_penalty=0.8), 3: best_three}


def source(model, line):
    return model.tokenizer.encode_source([line])[0]


def limit(model, line):
    """Most tokens of a translation, EOS included."""
    return min(2 * len(source(model, line)) + 10, MAX_LENGTH)


@pytest.fixture
def sources(monkeypatch):
    """The groups that are translated; each translation is the source itself."""
    sources = []

    def echo(slots, group, *bounds):
        sources.append(group.src)
        ended, count = [], group.rules.num_hypotheses
        for member, ids in zip(group.members, group.src, strict=False):
            found = [ids] * count, np.zeros(count), np.full(count, (ids != 0).sum())
            ended.append(Ended(member, Hypotheses(*found), -1))
        return ended

    monkeypatch.setattr(SlotSearch, "advance", echo)
    return sources


def test_order_is_restored_from_groups_of_similar_length(model, sources):
    lines = LINES * 9  # one window
    translations = translate(model, lines, max_tokens=3 * 512, **BEAM)
    for texts in zip(*translations, strict=True):
        assert [one.text for one in texts] == [line.strip() for line in lines]
    assert {src.shape for src in sources} == {(4, 16)}
    longest = [(src != 0).sum(axis=1).max() for src in sources]
    assert longest == sorted(longest, reverse=True)
    assert len(sources) == -(-len(TEXTS) * 9 // 4)  # blank lines take no row


def test_windows_share_their_shapes_and_keep_the_order(model, sources):
    random = np.random.default_rng(0)
    lines = [" ".join(random.choice(TEXTS, random.integers(0, 3))) for _ in range(700)]
    translations = translate(model, lines, window=100, max_tokens=256)
    assert [one.text for (one,) in translations] == lines
    rows = {}
    for src in sources:
        rows.setdefault(src.shape[1], set()).add(len(src))
    print(f"\n{len(sources)} groups of rows {rows}")
    assert rows == {16: {4}, 32: {4}}
    assert len(sources) <= -(-700 // 4) + 8  # the last group of each window has fewer members


def test_no_more_than_a_window_is_read_ahead(model, sources):
    read = []

    def without_end():
        while True:
            read.append("b")
            yield "b"

    translations = translate_stream(model, without_end(), window=200)
    for number in range(1, 700):
        assert next(translations)[0].text == "b"
        assert len(read) == (128 if number <= 128 else 128 + 200 * -(-(number - 128) // 200))
    assert [*map(len, islice(windows(without_end(), 10), 2))] == [10, 10]


def test_a_pause_ends_a_window(model, sources):
    lines = [None, "a", "b", None, None, "c", "d", "e", None]
    assert [*windows(lines, 2)] == [["a", "b"], ["c", "d"], ["e"]]
    assert [one.text for (one,) in translate(model, lines)] == [*"abcde"]
    assert [len(src) for src in sources] == [2, 4]  # powers of two


def test_lines_are_yielded_as_they_arrive_with_pauses_between():
    line_may_come = threading.Event()

    def slow():
        yield "a"
        line_may_come.wait()
        yield "b"
        raise InputError("a fault")

    found = with_pauses(slow())
    assert [next(found), next(found)] == ["a", None]
    line_may_come.set()
    assert next(line for line in found if line is not None) == "b"
    with pytest.raises(InputError, match="a fault"):
        next(found)


@pytest.fixture
def no_x(monkeypatch):
    """Let the tokenizer refuse lines with an x."""
    refuse_lines(monkeypatch, "encode_source", "x", "is no source")


def test_a_resumed_stream_has_the_same_windows(model, sources, no_x):
    lines = [text * (1 + number % 3) for number, text in enumerate(TEXTS * 60)]
    whole = translate(model, lines, window=150)
    batches = [src.tolist() for src in sources]
    for done in (128, 278):
        sources.clear()
        rest = translate(model, lines[done:], skip=done, window=150)
        assert [one.text for (one,) in rest] == [one.text for (one,) in whole[done:]]
        assert [src.tolist() for src in sources] == batches[-len(sources) :]
    with pytest.raises(InputError, match="line 131 is no source"):
        translate(model, ["b", "b", "x"], skip=128, window=150)
    with pytest.raises(InputError, match="line 7 is no source"):
        translate(model, ["b", "x"], skip=5, window=5)
    long = ["b"] * 134 + [" ".join(["cab"] * 25)]
    with pytest.raises(InputError, match="line 135 is 51 tokens long"):
        translate(model, long[128:], skip=128, window=150)


def test_bad_lines_have_blank_translations_and_their_numbers_are_told(model, sources, no_x):
    long = " ".join(["cab"] * 25)
    lines = ["a", "x", "", long, "b", "bx", "cab"] * 12 + ["x"]
    bad = []
    found = [one.text for (one,) in translate(model, lines, window=20, bad_lines=bad)]
    assert found == ["a", "", "", "", "b", "", "cab"] * 12 + [""]
    expected = [number for number, line in enumerate(lines, 1) if "x" in line or line == long]
    assert bad == expected
    bad.clear()
    rest = translate(model, lines[60:], window=20, skip=60, bad_lines=bad, overlong="cut")
    assert (rest[0][0].text, rest[1][0].text) == ("b", "")
    assert long.startswith(rest[6][0].text)
    assert bad == [number for number in expected if number > 60 and lines[number - 1] != long]
    for first, fault in ((2, "is no source"), (4, "is 51 tokens long")):
        with pytest.raises(InputError, match=f"^line 1 {fault}"):
            translate(model, lines[first - 1 :])


@pytest.mark.parametrize("beam_size", tiered([1, 3], [3]))
def test_a_translation_does_not_depend_on_the_other_lines(model, found, beam_size):
    at_their_limit = 0
    for others in (["b"], ["bacab", "a"]):
        apart = translate(model, others, beam_size=beam_size, length_penalty=0.8)
        for line, (alone,) in zip(others, apart, strict=True):
            together = found[beam_size][LINES.index(line)][0]
            assert alone.text == together.text
            assert alone.score == pytest.approx(together.score, abs=1e-5)
            assert len(alone.tokens) <= limit(model, line)
            at_their_limit += len(alone.tokens) == limit(model, line)
    assert at_their_limit > 1  # which is not that of the batch


def test_the_n_best_are_complete_distinct_and_scored_as_the_model_scores_them(model, found):
    config, params, tokenizer, _ = model
    rows = [(line, one) for line in TEXTS for one in found[3][LINES.index(line)]]
    assert len(rows) == 3 * len(TEXTS)
    src = pad([source(model, line) for line, _ in rows], 0)
    sums = score(params, config, src, pad([one.tokens.tolist() for _, one in rows], 0))
    for (line, one), log_probability in zip(rows, sums, strict=True):
        ends = config.eos_id in one.tokens
        assert ends or len(one.tokens) == limit(model, line)
        assert not ends or one.tokens.tolist().index(config.eos_id) == len(one.tokens) - 1
        assert one.text == tokenizer.decode(one.tokens)
        penalty = ((5 + len(one.tokens)) / 6) ** 0.8
        assert one.score == pytest.approx(float(log_probability) / penalty, rel=1e-5)
    for line in TEXTS:
        best = found[3][LINES.index(line)]
        assert len({one.tokens.tobytes() for one in best}) == 3
        assert best[0].score > best[1].score > best[2].score


def test_translations_that_end_are_what_generate_finds(model, found):
    config, params, *_ = model
    ended = [
        line
        for line in TEXTS
        if max(len(one.tokens) for one in found[3][LINES.index(line)]) < limit(model, line)
    ]
    assert len(ended) > 1
    src = pad([source(model, line) for line in ended], 0)
    options = {"max_new_tokens": MAX_LENGTH, "length_penalty": 0.8}
    hypotheses = jax.device_get(generate(params, config, src, **options, **BEAM))
    for row, line in enumerate(ended):
        for index, one in enumerate(found[3][LINES.index(line)]):
            length = hypotheses.lengths[row, index]
            assert one.tokens.tolist() == hypotheses.tokens[row, index, :length].tolist()
            assert one.score == pytest.approx(hypotheses.scores[row, index], rel=1e-5)


def test_a_blank_line_has_blank_translations(model, found):
    for beam_size in (1, 3):
        for line in (1, 4):
            shown = [(one.text, one.score, one.tokens.size) for one in found[beam_size][line]]
            assert shown == [("", 0.0, 0)] * beam_size
    assert translate(model, []) == []
    blank = [" ", "\u200b", "\u00ad \u2060", "\ufeff", "\ufe0f\u200d", "\x01"]
    assert [[one.text for one in best] for best in translate(model, blank)] == [[""]] * 6
    (best,), (seen,) = translate(model, ["ab", "a\u200bb"])  # only whole lines are judged
    assert "" not in (best.text, seen.text)


@pytest.mark.usefixtures("fresh_caches")
@pytest.mark.exhaustive
def test_each_length_and_each_number_of_slots_is_compiled_once(model):
    def compiled():
        programs = slots._enter, slots._advance, slots.search
        return tuple(each._cache_size() - n for each, n in zip(programs, before, strict=True))

    options, long = {"max_tokens": 512, "max_new_tokens": 3}, [" ".join(["cab"] * 9)] * 9
    before = 0, 0, 0
    before = compiled()
    translate(model, LINES * 5 + long, **options)  # 8 slots; groups of 16 and of 32 tokens
    assert compiled() == (2, 1, 0)
    translate(model, LINES[::-1] * 20 + long, **options)
    assert compiled() == (2, 1, 0)
    translate(model, LINES * 5, max_tokens=256, max_new_tokens=3)  # a group fills the slots
    assert compiled() == (2, 2, 0)
    translate(model, LINES[:3], max_new_tokens=3)  # two slots have room for all: one search
    assert compiled() == (2, 2, 1)


def test_the_last_token_of_the_longest_translation_can_be_forced(model):
    forced = model._replace(generation={"forced_last_token": model.config.eos_id})
    for (one,) in translate(forced, TEXTS, max_new_tokens=3):
        assert one.tokens.tolist().index(model.config.eos_id) == 2


def test_tokens_that_the_model_bans_stay_banned_beside_those_of_a_call(model, found):
    by_model = next(int(best.tokens[0]) for (best,) in found[1] if len(best.tokens) > 1)
    model = model._replace(generation={**model.generation, "banned_tokens": (by_model,)})
    lines = ["abc", "cab", "bca", "ab cab"]
    by_call = int(translate(model, lines)[0][0].tokens[0])
    assert by_call != by_model
    for (best,) in translate(model, lines, banned_tokens=(by_call,)):
        assert not {by_model, by_call} & {*best.tokens.tolist()}
    with unchecked(), pytest.raises(InputError, match="banned_tokens=5"):
        translate(model, lines, banned_tokens=5)


def test_the_defaults_of_the_model_hold_unless_an_option_is_given(model, found):
    def texts(translations):
        return [[(one.text, one.score) for one in best] for best in translations]

    defaults = {"beam_size": 3, "length_penalty": 0.8}
    with_defaults = model._replace(generation=defaults)
    best_three = [[(one.text, one.score) for one in best] for best in found[3]]
    assert texts(translate(with_defaults, LINES, num_hypotheses=3)) == best_three
    assert texts(translate(with_defaults, LINES, beam_size=1)) == texts(found[1])
    other = model._replace(generation={"beam_size": 3, "length_penalty": 5.0})
    assert texts(translate(other, LINES, num_hypotheses=3, length_penalty=0.8)) == best_three
    short = model._replace(generation={"max_new_tokens": 3})
    assert {len(best.tokens) for (best,) in translate(short, TEXTS)} == {3}
    assert {len(best.tokens) for (best,) in translate(short, TEXTS, max_new_tokens=2)} == {2}


@pytest.mark.parametrize("options", tiered(HIGH_LIMIT, []), ids=str)
def test_a_high_limit_of_the_model_is_tried_last(model, options, monkeypatch):
    """Most lines end long before; the others reach the limit, and get what it gives."""
    model = model._replace(config=dataclasses.replace(model.config, max_length=80))
    config, params, *_ = model
    defaults = {"beam_size": 3, "max_new_tokens": 70, "length_normalization": "power"}
    defaults |= {"length_penalty": 0.6, "num_hypotheses": 1} | options
    src = pad([source(model, line) for line in TEXTS], 0)
    whole = jax.device_get(generate(params, config, src, **defaults))
    calls = []

    def record(slots, group, *bounds):
        calls.append((slots.target_length, group.rules.num_hypotheses))
        return advance(slots, group, *bounds)

    advance = SlotSearch.advance
    monkeypatch.setattr(SlotSearch, "advance", record)
    found = translate(model._replace(generation=defaults), TEXTS)
    for row, best in enumerate(found):
        for rank, one in enumerate(best):
            length = whole.lengths[row, rank]
            assert one.tokens.tolist() == whole.tokens[row, rank, :length].tolist()
            assert one.score == pytest.approx(whole.scores[row, rank], rel=1e-5)
    if options in ({"early_stopping": "never"}, {"early_stopping": False, "min_new_tokens": 50}):
        assert {limit for limit, _ in calls} == {70}
    else:  # sources of at most 32 tokens have a first attempt of 42 target tokens
        assert [limit for limit, _ in calls] == [42, 70]
        # An attempt returns every hypothesis: one that has not ended shows that more may come.
        counts = {70: defaults["num_hypotheses"], 42: defaults["beam_size"]}
        assert all(count == counts[limit] for limit, count in calls)
        assert found[0] != found[1]


def test_an_overlong_line_is_refused_or_cut(model, monkeypatch):
    tokenizer = model.tokenizer
    overlong, cut = " ".join(["cab"] * 25), " ".join(["cab"] * 19 + ["c"])
    assert (
        tokenizer.encode_source([cut])[0][:-1]
        == tokenizer.encode_source([overlong])[0][:-1][: MAX_LENGTH - 1]
    )
    shown = io.StringIO()
    console = Console(file=shown, width=200)
    options = {"overlong": "cut", "max_new_tokens": 5, "console": console}
    (_,), (_,), (one,), (other,) = translate(model, ["b", "", overlong, cut], **options)
    assert one.tokens.tolist() == other.tokens.tolist()
    assert one.score == other.score
    message = "1 of 4 lines cut to max_length=40 tokens, the first of them line 3\n"
    assert shown.getvalue() == message

    monkeypatch.setattr(SlotSearch, "advance", lambda *_: pytest.fail("work was done"))
    refused = r"line 3 is 51 tokens long, .* max_length=40; raise max_length, split it or set"
    with pytest.raises(InputError, match=refused):
        translate(model, ["b", "", overlong, overlong])
    table = dataclasses.replace(model.config, positions="learned")
    with pytest.raises(InputError, match="max_length=40; split it or set overlong to 'cut'"):
        translate(model._replace(config=table, params=random_params(table)), [overlong])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_size": 0}, "beam_size=0"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
        ({"seed": "x"}, "seed='x' must be a whole number"),
        ({"seed": 0, "beam_size": 2}, "beam_size=2 searches, and a key or a seed samples"),
        ({"top_k": 3}, "top_k=3 is for sampling, which needs a key; for lines of text, a seed"),
        ({"split_sentences": "English"}, "split_sentences='English' must be the code"),
        ({"split_sentences": 7}, "split_sentences=7 must be a text"),
        (
            {"split_sentences": "en", "beam_size": 2, "num_hypotheses": 2},
            "split_sentences='en' joins the best translations: set num_hypotheses=1",
        ),
        ({"beam_size": 2, "num_hypotheses": 3}, "num_hypotheses=3 must be from 1 to beam_size=2"),
        ({"beam_size": 9}, "beam_size=9 needs a vocabulary of 18 tokens or more"),
        ({"window": 0}, "window=0 must be a whole number, at least 1"),
        ({"max_tokens": -1}, "max_tokens=-1 must be a whole number, at least 1"),
        ({"overlong": "drop"}, "overlong='drop' must be one of 'cut', 'refuse'"),
        ({"max_new_tokens": 41}, "max_new_tokens: the target is 41 tokens long"),
    ],
)
def test_an_option_that_cannot_work_is_refused(model, options, message):
    with unchecked(), pytest.raises(InputError, match=message):  # as users call it
        translate(model, LINES, **options)


@pytest.mark.parametrize("token_id", [16, -1, 2**31, 2**32 + 1])
def test_an_id_outside_the_vocabulary_is_refused_before_any_cast(model, monkeypatch, token_id):
    monkeypatch.setattr(
        Tokenizer,
        "encode_source",
        lambda _, lines, *__: [[4, 5, 2], [4, token_id, 2], [2]][: len(lines)],
    )
    with pytest.raises(InputError, match=rf"src\[1, 1\]={token_id} is outside the vocabulary"):
        translate(model, ["a", "b"])


@pytest.mark.parametrize("beam_size", [1, 3])
def test_a_line_that_is_not_finite_is_named_as_it_was_handed_in(model, beam_size):
    lines = [*LINES, "fed", "aaa"]  # neither the first row of its batch nor the last one
    others = {token for line in LINES for token in source(model, line)}
    (own, *_) = set(source(model, "fed")) - others
    params = jax.tree.map(np.array, model.params)
    params["source_embedding"]["embedding"][own] = np.nan
    bad = model._replace(params=params)
    with pytest.raises(InputError) as raised:
        translate(bad, lines, beam_size=beam_size)
    assert str(raised.value) == (
        "the logits of line 8 are NaN or infinite at step 0: parameters that are not finite, or so "
        "large that they overflow, cannot generate"
    )


def test_progress_is_live_on_a_terminal_and_nothing_elsewhere(model):
    terminal, pipe = io.StringIO(), io.StringIO()
    console = Console(file=terminal, force_terminal=True, width=80)
    list(translate_list(model, LINES, length_penalty=0.8, console=console))
    assert "translating" in terminal.getvalue()
    assert f"{len(LINES)}/{len(LINES)}" in terminal.getvalue()
    list(translate_list(model, LINES, length_penalty=0.8, console=Console(file=pipe)))
    assert pipe.getvalue() == ""
