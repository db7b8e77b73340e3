"""Texts that enter a running search get the results of a call, whatever runs beside them."""

import os
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest

from jax_transformer import InputError, Translator
from jax_transformer.decoding.generation import NonFiniteError
from jax_transformer.decoding.slots import SlotSearch
from jax_transformer.translation.executor import MOST_STEPS, translate_as_completed
from jax_transformer.translation.pools import SHORTEST_SLOT
from jax_transformer.translation.sources import Source, encode_sources
from jax_transformer.translation.translate import text_search
from tests.compilation import QUICKLY
from tests.models import tiny_model, unchecked
from tests.parity.ladder import ROUNDED, error
from tests.tiers import tiered

ROOT = Path(__file__).parents[2]
WORDS = ["a", "cab", "fed", "dab", "bead", "abba", "decade"]


@pytest.fixture(scope="module")
def model():
    model = tiny_model([" ".join(WORDS)], vocab_size=16, seed=128, max_length=160)
    return model._replace(params=jax.tree.map(lambda leaf: 3 * leaf, model.params))


@pytest.fixture(scope="module")
def lines():
    """Lines of one to about 130 tokens: slots of 32, 128 and 160 positions."""
    chosen = random.Random(3)
    lengths = [chosen.choice([1, 1, 2, 3, 5, 8, 20, 40]) for _ in range(60)]
    lines = [" ".join(chosen.choices(WORDS, k=length)) for length in lengths]
    return [*lines, "", " \t", *lines[:5]]


def assert_same(found, expected):
    assert len(found.hypotheses) == len(expected.hypotheses)
    for one, other in zip(found.hypotheses, expected.hypotheses, strict=True):
        assert one.text == other.text
        assert np.array_equal(one.tokens, other.tokens)
        assert error(np.float32(one.score), np.float32(other.score)) <= ROUNDED


@pytest.mark.parametrize(
    "options", tiered([{}, {"beam_size": 3, "num_hypotheses": 2}, {"seed": 5}], [{}])
)
def test_threads_get_the_results_of_a_call(model, lines, options):
    translator = Translator(model)
    options = options | {"max_tokens": 512}
    expected = list(translator(lines, **options))
    with translator.executor(**options) as executor:
        if "seed" in options:  # a draw depends on the number of its text
            futures = [executor.submit(line) for line in lines]
        else:
            with ThreadPoolExecutor(7) as threads:
                futures = list(threads.map(executor.submit, lines))
    for future, result in zip(futures, expected, strict=True):
        assert_same(future.result(timeout=0), result)


def test_pauses_come_at_any_time(model, lines):
    chosen = random.Random(8)

    def texts():
        for line in lines:
            yield line
            while chosen.random() < 0.4:
                yield None

    found = dict(translate_as_completed(text_search([model], max_tokens=512), texts()))
    expected = [result.hypotheses[0] for result in Translator(model)(lines)]
    assert [found[number + 1][0].text for number in range(len(found))] == [
        best.text for best in expected
    ]


ON_EIGHT_DEVICES = """
import jax
from jax_transformer import Translator
from jax_transformer.runtime.sharding import make_mesh
from tests.models import tiny_model

model = tiny_model(["a cab fed dab bead"], vocab_size=16, seed=128, max_length=40)
model = model._replace(params=jax.tree.map(lambda leaf: 3 * leaf, model.params))
lines = ["cab fed", "a", "dab " * 9, "bead bead", "fed"] * 5
expected = [result.text for result in Translator(model)(lines)]
with Translator(model, mesh=make_mesh("data=2,fsdp=2,tensor=2")).executor() as executor:
    futures = [executor.submit(line) for line in lines]
assert [future.result().text for future in futures] == expected
assert len(set(expected)) > 3
"""


@pytest.mark.exhaustive
def test_eight_devices_find_what_one_finds():
    flags = f"--xla_force_host_platform_device_count=8 {QUICKLY}"
    command, environment = (
        [sys.executable, "-c", ON_EIGHT_DEVICES],
        os.environ | {"XLA_FLAGS": flags},
    )
    done = subprocess.run(
        command, capture_output=True, cwd=ROOT, env=environment, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_text_waits_for_none_that_runs(model, lines):
    lines = [line for line in lines if 0 < len(line.split()) < 6]  # of the same slots
    found = zip(Translator(model)(lines), lines, strict=True)
    results = [(len(result.tokens), line) for result, line in found]
    longest, shortest = max(results), min(results)
    begun = 2 * MOST_STEPS
    assert longest[0] > begun + shortest[0] + MOST_STEPS
    texts = [longest[1], None, None, shortest[1]]
    found = translate_as_completed(text_search([model]), texts)
    assert [number for number, _ in found] == [2, 1]


def test_texts_without_a_pause_do_not_hold_up_one_of_other_slots(model):
    texts = ["cab fed dab bead " * 8, *["a", "cab"] * 300]
    search = text_search([model], max_tokens=512)
    (source,) = encode_sources(model, "refuse", [Source(texts[0], 1)])
    assert len(source.ids) > SHORTEST_SLOT
    order = [number for number, _ in translate_as_completed(search, texts)]
    assert sorted(order) == list(range(1, len(texts) + 1))
    assert order.index(1) < 300


def test_a_bad_text_is_its_own_error(model):
    with Translator(model).executor() as executor:
        good, bad, surrogate = map(executor.submit, ("abba", "decade " * 100, "a\ud800"))
        assert good.result().text == Translator(model)("abba").text
        with pytest.raises(InputError, match="tokens long, EOS included"):
            bad.result()
        with pytest.raises(InputError):
            surrogate.result()
        with unchecked(), pytest.raises(InputError, match="text=3 must be a string"):
            executor.submit(3)
    with pytest.raises(InputError, match="shut down"):
        executor.submit("a")
    with pytest.raises(InputError, match="submit each sentence"):
        Translator(model).executor(split_sentences="en")
    with pytest.raises(TypeError):
        Translator(model).executor(beams=3)


def test_logits_that_are_not_finite_fail_one_text(model):
    model = tiny_model([" ".join(WORDS)], vocab_size=16, seed=1, token_embeddings="separate")
    encode = model.tokenizer.encode_source
    alone = min(set(encode(["fed"])[0]) - {token for ids in encode(["cab", "a"]) for token in ids})
    table = np.array(model.params["source_embedding"]["embedding"])
    table[alone] = np.nan
    params = model.params | {"source_embedding": {"embedding": table}}
    with Translator(model._replace(params=params)).executor() as executor:
        bad, *good = map(executor.submit, ("fed", "cab", "a"))
    assert [future.result().text for future in good] == [
        found.text for found in Translator(model)(["cab", "a"])
    ]
    with pytest.raises(NonFiniteError, match="line 1 are NaN or infinite at step 0"):
        bad.result()


def test_what_breaks_the_search_breaks_what_runs_and_nothing_later(model, monkeypatch):
    translator = Translator(model)
    broken, advance = threading.Event(), SlotSearch.advance

    def breaks(*arguments):
        if not broken.is_set():
            broken.set()
            raise MemoryError("no memory")
        return advance(*arguments)

    monkeypatch.setattr(SlotSearch, "advance", breaks)
    with translator.executor() as executor:
        with pytest.raises(MemoryError):
            executor.submit("abba").result()
        assert executor.submit("abba").result().text == translator("abba").text


def test_a_cancelled_text_is_not_translated(model, monkeypatch):
    in_search, goes_on, groups = threading.Event(), threading.Event(), []
    advance = SlotSearch.advance

    def waits(slots, group, *bounds):
        in_search.set()
        assert goes_on.wait(60)
        groups.append(group)
        return advance(slots, group, *bounds)

    monkeypatch.setattr(SlotSearch, "advance", waits)
    with Translator(model).executor() as executor:
        first = executor.submit("abba")
        assert in_search.wait(60)
        others = [executor.submit("cab") for _ in range(5)]
        assert all(future.cancel() for future in others)
        assert not first.cancel()
        goes_on.set()
    assert first.result().text
    assert [group.members for group in groups if group is not None] == [[1]]
