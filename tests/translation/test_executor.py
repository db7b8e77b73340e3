"""Texts that enter a running search get the results of a call, whatever runs beside them."""

import atexit
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Executor, ThreadPoolExecutor, wait

import numpy as np
import pytest

from jax_transformer import InputError, Translator
from jax_transformer.decoding.generation import NonFiniteError
from jax_transformer.decoding.slots import SlotSearch
from jax_transformer.translation import executor as executor_module
from jax_transformer.translation.executor import MOST_STEPS, translate_as_completed
from jax_transformer.translation.pools import SHORTEST_SLOT
from jax_transformer.translation.sources import Source, encode_sources
from jax_transformer.translation.translate import text_search
from tests.models import tiny_model, unchecked
from tests.parity.ladder import ROUNDED, error
from tests.programs import ROOT, run_python
from tests.tiers import tiered
from tests.translation.streams import HeldSearch, varied_model

WORDS = ["a", "cab", "fed", "dab", "bead", "abba", "decade"]


@pytest.fixture(scope="module")
def model():
    return varied_model(" ".join(WORDS), max_length=160)


@pytest.fixture(scope="module")
def lines():
    """Lines of one to about 130 tokens: slots of 32, 128 and 160 positions."""
    chosen = random.Random(3)
    lengths = [chosen.choice([1, 1, 2, 3, 5, 8, 20, 40]) for _ in range(60)]
    lines = [" ".join(chosen.choices(WORDS, k=length)) for length in lengths]
    return [*lines, "", " \t", *lines[:5]]


def encoded(model, texts):
    """Return the sources of texts, which are not blank; None stays."""
    return (
        None if text is None else encode_sources(model, "refuse", [Source(text, number)])[0]
        for number, text in enumerate(texts, 1)
    )


def assert_same(found, expected):
    assert len(found.hypotheses) == len(expected.hypotheses)
    for one, other in zip(found.hypotheses, expected.hypotheses, strict=True):
        assert one.text == other.text
        assert np.array_equal(one.tokens, other.tokens)
        assert error(np.float32(one.score), np.float32(other.score)) <= ROUNDED


@pytest.mark.exhaustive
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


def test_threads_share_a_translator(model):
    translator, texts = Translator(model), ["a", "cab fed", "", "abba", "bead"]
    options = [{"prefix": f"{word} ", "alignments": word < "c", "window": 3} for word in WORDS]
    expected = [list(translator(texts, **each)) for each in options]
    assert len({result.text for results in expected for result in results}) > len(texts)
    begin = threading.Barrier(len(options))

    def call(number):
        results = translator(texts, **options[number])
        begin.wait(60)
        return list(results)

    with ThreadPoolExecutor(len(options)) as threads:
        found = list(threads.map(call, range(len(options))))
    for results, of_call in zip(found, expected, strict=True):
        for result, alone in zip(results, of_call, strict=True):
            assert_same(result, alone)
            assert repr(result.alignment) == repr(alone.alignment)


@pytest.mark.exhaustive
def test_pauses_come_at_any_time(model, lines):
    chosen = random.Random(8)

    def texts():
        for line in filter(str.strip, lines):
            yield line
            while chosen.random() < 0.4:
                yield None

    search, texts = text_search([model], max_tokens=512), list(texts())
    found = dict(translate_as_completed(search, encoded(model, texts)))
    expected = Translator(model)(text for text in texts if text is not None)
    assert [found[number][0].text for number in sorted(found)] == [best.text for best in expected]


ON_EIGHT_DEVICES = """
from jax_transformer import Translator
from jax_transformer.runtime.sharding import make_mesh
from tests.translation.streams import varied_model

model = varied_model("a cab fed dab bead")
lines = ["cab fed", "a", "dab " * 9, "bead bead", "fed"] * 5
expected = [result.text for result in Translator(model)(lines)]
with Translator(model, mesh=make_mesh("data=2,fsdp=2,tensor=2")).executor() as executor:
    futures = [executor.submit(line) for line in lines]
assert [future.result().text for future in futures] == expected
assert len(set(expected)) > 3
"""


@pytest.mark.exhaustive
def test_eight_devices_find_what_one_finds():
    run_python("-c", ON_EIGHT_DEVICES, devices=8)


def test_a_text_waits_for_none_that_runs(model, lines):
    lines = [line for line in lines if 0 < len(line.split()) < 6]  # of the same slots
    found = zip(Translator(model)(lines), lines, strict=True)
    results = [(len(result.tokens), line) for result, line in found]
    longest, shortest = max(results), min(results)
    begun = 2 * MOST_STEPS
    assert longest[0] > begun + shortest[0] + MOST_STEPS
    texts = [longest[1], None, None, shortest[1]]
    found = translate_as_completed(text_search([model]), encoded(model, texts))
    assert [number for number, _ in found] == [4, 1]


def test_texts_without_a_pause_do_not_hold_up_one_of_other_slots(model):
    texts = ["cab fed dab bead " * 8, *["a", "cab"] * 300]
    search = text_search([model], max_tokens=512)
    sources = list(encoded(model, texts))
    assert len(sources[0].ids) > SHORTEST_SLOT
    order = [number for number, _ in translate_as_completed(search, sources)]
    assert sorted(order) == list(range(1, len(texts) + 1))
    assert order.index(1) < 300


def test_a_bad_text_is_its_own_error(model):
    with Translator(model).executor() as executor:
        good, bad, surrogate = map(executor.submit, ("abba", "decade " * 100, "a\ud800"))
        assert good.result().text == Translator(model)("abba").text
        with pytest.raises(InputError, match=r"^text='decade .* is 501 tokens long.* split it or"):
            bad.result()
        with pytest.raises(InputError, match=r"'a\\ud800'"):
            surrogate.result()
        with unchecked(), pytest.raises(InputError, match="text=3 must be a string"):
            executor.submit(3)
    with pytest.raises(InputError, match="shut down"):
        executor.submit("a")
    with pytest.raises(InputError, match="submit each sentence"):
        Translator(model).executor(split_sentences="en")
    with pytest.raises(InputError, match="beams=3 is not a setting; did you mean beam_size"):
        Translator(model).executor(beams=3)


def test_the_options_and_alignments_of_a_call_are_those_of_an_executor(model):
    texts, options = ["abba", "", "decade " * 100, "cab"], {"prefix": "fed ", "overlong": "cut"}
    expected = list(Translator(model)(texts, alignments=True, **options))
    assert expected[0].text != Translator(model)(texts[0]).text
    with Translator(model).executor(alignments=True, **options) as executor:
        results = list(executor.map(texts))
    for result, call in zip(results, expected, strict=True):
        assert_same(result, call)
        if call.alignment is None:
            assert result.alignment is None
            continue
        assert result.alignment[:3] == call.alignment[:3]
        assert error(result.alignment.weights, call.alignment.weights) <= ROUNDED
    assert [result.alignment is None for result in results] == [False, True, False, False]
    with Translator(model).executor() as executor:
        assert executor.submit("abba").result().alignment is None


def test_logits_that_are_not_finite_fail_one_text(model):
    model = tiny_model([" ".join(WORDS)], vocab_size=16, seed=1, token_embeddings="separate")
    encode = model.tokenizer.encode_source
    alone = min(set(encode(["fed"])[0]) - {token for ids in encode(["cab", "a"]) for token in ids})
    table = np.array(model.params["source_embedding"]["embedding"])
    table[alone] = np.nan
    params = model.params | {"source_embedding": {"embedding": table}}
    broken, texts = model._replace(params=params), ["fed", "cab", "a"]
    found = dict(translate_as_completed(text_search([broken]), encoded(broken, texts)))
    assert isinstance(found.pop(1), NonFiniteError)
    expected = [result.text for result in Translator(model)(texts[1:])]
    assert [found[number][0].text for number in sorted(found)] == expected
    with (
        Translator(broken).executor() as executor,
        pytest.raises(NonFiniteError, match="text='fed' are NaN or infinite at step 0"),
    ):
        executor.submit("fed").result(60)


def assert_idle():
    """Threads that wait take no time of a processor."""
    time.sleep(0.05)  # a thread that has given its last result goes to sleep
    begun = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - begun < 0.1


class Panic(BaseException):
    """As those of a library of Rust: no `Exception`."""


@pytest.mark.parametrize(
    ("place", "name", "kind"),
    [
        (SlotSearch, "advance", MemoryError),
        (SlotSearch, "advance", Panic),
        (executor_module, "alignments", MemoryError),
    ],
)
def test_what_breaks_once_breaks_what_runs_and_nothing_later(model, monkeypatch, place, name, kind):
    """A step of the search, or the alignment of a text."""
    whole, calls, with_alignments = getattr(place, name), itertools.count(), name == "alignments"

    def breaks(*arguments, **options):
        if next(calls) == 0:
            raise kind("no memory")
        return whole(*arguments, **options)

    monkeypatch.setattr(place, name, breaks)
    with Translator(model).executor(alignments=with_alignments) as executor:
        with pytest.raises(kind):
            executor.submit("abba").result(60)
        assert_idle()
        again = executor.submit("abba").result(60)
        assert again.text == Translator(model)("abba").text
        assert bool(again.alignment) is with_alignments
        assert_idle()


@pytest.fixture
def held(model, monkeypatch):
    """A search that stands still, with its executor and the text that runs."""
    held = HeldSearch(monkeypatch)
    with Translator(model).executor() as held.executor:
        held.running = held.executor.submit("abba")
        assert held.begun.wait(60)
        yield held
        held.goes_on.set()


def entered(held):
    """Return the numbers of the texts that entered."""
    return [group.members for group in held.groups if group is not None]


def test_a_text_that_is_not_searched_waits_for_no_search(held):
    texts = ["", " \t", "decade " * 100, "a\ud800"]
    assert all(future.done() for future in map(held.executor.submit, texts))
    good = held.executor.submit("cab")
    held.goes_on.set()
    good.result(60)
    assert entered(held) == [[1], [6]]  # the number decides what a draw is


def test_texts_that_have_come_enter_in_full_groups(model, held):
    others = [held.executor.submit("cab fed") for _ in range(40)]
    held.goes_on.set()
    assert all(future.result(60).text for future in others)
    sizes, pool = [len(group) for group in entered(held)], text_search([model]).pool(32, 74)
    assert sizes[:2] == [1, pool.group_size]
    assert pool.group_size > 3


def test_a_cancelled_text_is_not_translated(held):
    others = [held.executor.submit("cab") for _ in range(5)]
    assert all(future.cancel() for future in others)
    assert not held.running.cancel()
    held.goes_on.set()
    held.executor.shutdown()
    assert held.running.result().text
    assert entered(held) == [[1]]


def test_a_shutdown_waits_and_cancels_where_it_is_told(held):
    others = [held.executor.submit("cab") for _ in range(5)]
    others[0].cancel()
    held.executor.shutdown(wait=False)
    assert not any(future.cancelled() for future in others[1:])
    with pytest.raises(InputError, match="shut down"):
        held.executor.submit("")
    held.executor.shutdown(wait=False, cancel_futures=True)
    assert wait(others, timeout=60).not_done == set()  # who waits is told
    assert all(future.cancelled() for future in others)
    assert not held.running.done()
    held.goes_on.set()
    held.executor.shutdown()
    assert held.running.done()


def test_results_of_a_map_are_in_the_order_of_the_texts(model, held):
    with pytest.raises(TimeoutError):
        next(held.executor.map(["cab"], timeout=0.01))
    results = held.executor.map(["fed", "decade " * 100, *["dab"] * 3])
    held.goes_on.set()
    assert next(results).text == Translator(model)("fed").text
    with pytest.raises(InputError, match="tokens long"):
        next(results)
    assert isinstance(held.executor, Executor)
    texts = ["decade cab fed", "a", "", "cab", "fed"] * 3
    expected = [result.text for result in Translator(model)(texts)]
    assert [result.text for result in held.executor.map(iter(texts), timeout=60.0)] == expected


def test_an_error_of_a_map_cancels_the_texts_that_have_not_begun(held, monkeypatch):
    futures, submit = [], held.executor.submit
    monkeypatch.setattr(
        held.executor, "submit", lambda text: futures.append(submit(text)) or futures[-1]
    )
    with pytest.raises(InputError):
        list(held.executor.map(["decade " * 100, "cab", "fed"]))
    assert [future.cancelled() for future in futures] == [False, True, True]


def test_a_callback_can_shut_down_and_can_leave(held, caplog):
    def leaves(_):
        raise SystemExit(3)

    held.running.add_done_callback(leaves)
    shut, beside = held.executor.submit("cab"), held.executor.submit("cab fed dab bead")
    shut.add_done_callback(lambda _: held.executor.shutdown())
    dropped = held.executor.submit("fed")
    dropped.add_done_callback(leaves)
    held.goes_on.set()
    assert all(future.result(60).text for future in (held.running, shut, beside, dropped))
    held.executor.shutdown()
    assert [type(record.exc_info[1]) for record in caplog.records] == [SystemExit] * 2


def test_the_end_of_a_process_translates_what_was_submitted(model, monkeypatch):
    at_exit = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.setattr(atexit, "unregister", at_exit.remove)
    executor = Translator(model).executor()
    futures = [executor.submit("cab") for _ in range(30)]
    at_exit[0]()
    assert all(future.done() for future in futures)
    assert at_exit == []


ENDS_WITHOUT_SHUTDOWN = """
import sys
from jax_transformer import Translator
from tests.models import tiny_model

if __name__ == "__main__":
    executor = Translator(tiny_model(["a cab fed dab bead"], vocab_size=16)).executor()
    for _ in range(300):
        executor.submit("cab fed").add_done_callback(lambda _: print("done", flush=True))
    if sys.argv[1] == "error":
        raise RuntimeError("the program ends")
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("end", ["normal", "error"])
def test_a_process_that_ends_without_shutdown_loses_no_text(end):
    done = subprocess.run(
        [sys.executable, "-c", ENDS_WITHOUT_SHUTDOWN, end],
        capture_output=True,
        cwd=ROOT,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.stdout.count("done") == 300
    assert done.returncode == (end == "error"), done.stderr


@pytest.mark.filterwarnings("ignore:.*fork:RuntimeWarning", "ignore:.*fork:DeprecationWarning")
def test_a_forked_process_is_told_that_the_thread_is_not_there(model):
    with Translator(model).executor() as executor:
        if (child := os.fork()) == 0:  # where nothing but the end of the process is of the test
            signal.alarm(60)
            try:
                executor.submit("a").result()
            except InputError as error:
                os._exit(3 if "os.fork" in str(error) else 1)
            os._exit(2)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 3
        assert executor.submit("a").result(60)
