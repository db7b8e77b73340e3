"""A text becomes a corpus on disk, whatever kills the work, fills the disk or comes twice."""

import dataclasses
import errno
import gzip
import io
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from jax_transformer.errors import InputError
from jax_transformer.text import prepare as preparing
from jax_transformer.text import samples
from jax_transformer.text.encoding import Filters, encode_text
from jax_transformer.text.parallel_text import Text, TextFiles
from jax_transformer.text.prepare import (
    MANIFEST,
    UNFINISHED,
    Task,
    corpus_folder,
    pair_records,
    prepared_corpus,
    repeated_numbers,
    repeated_pairs,
)
from jax_transformer.text.samples import chosen_pairs, held_out
from jax_transformer.text.store import one_line_faults, read_entry, with_known_facts
from jax_transformer.tokenizers import LineError, to_text
from tests.programs import ROOT, largest_file, run_python, wait_until
from tests.text.texts import (
    FILTERS,
    SKIP,
    TOKENIZER,
    contents,
    corpus,
    lines,
    memory_below,
    quiet,
    refuse_lines,
    task,
    trained,
    write,
    write_bad,
)


def assert_same_pairs(prepared, expected):
    """Compare all ids with those of an encoded corpus in memory."""
    assert len(prepared) == len(expected)
    every = np.arange(len(expected))
    ours, theirs = prepared.read(every), expected.read(every)
    for actual, wanted in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(actual, wanted)
    np.testing.assert_array_equal(prepared.side_lengths(every), expected.side_lengths(every))
    np.testing.assert_array_equal(prepared.length_counts, expected.length_counts)
    assert prepared.counts.tokens == expected.counts.tokens
    assert prepared.pad_id == expected.pad_id


def test_a_prepared_corpus_is_what_is_encoded_in_memory(tmp_path, small_blocks):
    paths = []
    for number, count in enumerate((90, 50)):
        text = write(tmp_path, *lines(count, number), name=f"part{number}")
        paths.append([text.sources[0], text.targets[0]])
    packed = tmp_path / "part1.de.gz"
    packed.write_bytes(gzip.compress(paths[1][0].read_bytes()))
    paths[1][0] = packed
    text = TextFiles(*zip(*paths, strict=True))
    prepared = corpus(tmp_path / "store", text)
    expected = encode_text(text.read(), TOKENIZER, 30)
    assert_same_pairs(prepared, expected)
    manifest = read_entry(prepared.parts[0].folder / MANIFEST, dict)
    assert manifest["blocks"] == 3 + 2  # a block ends with its file
    assert prepared.read(np.arange(3)).ids.dtype == np.uint8
    shuffled = np.random.default_rng(0).permutation(len(prepared))
    np.testing.assert_array_equal(prepared.read(shuffled).ids, expected.read(shuffled).ids)
    assert prepared.counts == expected.counts


def test_an_error_of_a_worker_reaches_another_process(monkeypatch):
    monkeypatch.setattr(preparing, "encode_pairs", mock.Mock(side_effect=LineError(0, "is odd")))
    (block,) = Text(("a",), ("b",)).blocks(1)
    with pytest.raises(InputError) as refusal:
        preparing.encode_block(block, {}, FILTERS, to_text(TOKENIZER), 0)
    assert str(pickle.loads(pickle.dumps(refusal.value))) == "line 1 is odd"


def test_bad_lines_drop_their_pairs_and_are_counted_and_named(tmp_path, one_process):
    text, good = write_bad(tmp_path, 250)
    found = corpus(tmp_path / "store", text)
    sources, targets = ([side[number] for number in good] for side in lines(250))
    assert_same_pairs(found, encode_text(Text(tuple(sources), tuple(targets)), TOKENIZER, 30))
    assert found.counts.dropped == {"dropped for a bad line": 250 - len(good)}
    de, en = text.sources[0], text.targets[0]
    named = [f"{en}:4:1", f"{de}:11:5", f"{en}:18:5", f"{de}:25:1", f"{en}:32:5"]
    assert found.counts.bad_lines == tuple(named)
    told = found.counts.report()
    assert "250 pairs read, 36 dropped for a bad line; 214 pairs of" in told
    assert told.endswith(f"; first bad lines: {', '.join(named)}")
    again = corpus(tmp_path / "store", text, drop_duplicates=True).counts
    assert again.dropped["dropped for a bad line"] == 250 - len(good)

    refused = TextFiles(text.sources, text.targets)
    for drop_duplicates in (False, True):
        with pytest.raises(InputError, match=r"bad.en:4:1: NUL character; .* bad_lines to 'skip'"):
            corpus(tmp_path / "store", refused, drop_duplicates=drop_duplicates)


def test_pairs_that_the_tokenizer_refuses_are_bad_lines(tmp_path, one_process, monkeypatch):
    fault = "has the token 'neun', which the model lacks"
    refuse_lines(monkeypatch, "encode_target", "neun", fault)
    sources, targets = lines(150)
    nine = [number for number, line in enumerate(targets) if "neun" in line]
    assert len(nine) > 20
    text = write(tmp_path, sources, targets)
    files = f"{text.sources[0]} or {text.targets[0]}"
    with pytest.raises(InputError) as refusal:
        corpus(tmp_path / "store", text)
    assert str(refusal.value) == f"{files}:{nine[0] + 1}: {fault}"
    found = corpus(tmp_path / "store", dataclasses.replace(text, reading=SKIP))
    assert found.counts.dropped == {"dropped for a bad line": len(nine)}
    assert found.counts.bad_lines == tuple(f"{files}:{number + 1}" for number in nine[:5])
    monkeypatch.undo()
    kept = [[side[n] for n in range(150) if n not in nine] for side in (sources, targets)]
    assert_same_pairs(found, encode_text(Text(*map(tuple, kept)), TOKENIZER, 30))


# A child is killed before its first, second, ... file gets its name, and before that is on disk.
CRASHES = """
import os, signal, sys
from pathlib import Path
from jax_transformer.text import prepare, samples
from tests.text.texts import corpus, write_bad

folder, moments = Path(sys.argv[1]), 0
prepare.BLOCK_PAIRS = samples.BLOCK_PAIRS = 40
prepare._on_all_cores = lambda works: (work() for work in works)

def killed_at(function, moment):
    def killed(*arguments):
        global moments
        moments += 1
        if moments == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)
    return killed

def child(moment):
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.replace = killed_at(os.replace, moment)
    os.fsync = killed_at(os.fsync, moment)
    corpus(folder / "store", write_once)
    os._exit(0)

write_once, _ = write_bad(folder, 250)
deaths = 0
while code := child(1 + deaths % 8):  # of 5 calls a block: in the midst of the next one
    assert code == -signal.SIGKILL, code
    deaths += 1
    assert deaths < 200
print(deaths)
"""


@pytest.mark.exhaustive
def test_killed_at_any_moment_and_started_again_it_writes_the_same_bytes(tmp_path, one_process):
    """The manifest too, with its counts and the places of bad lines."""
    text, _ = write_bad(tmp_path, 250)
    expected = contents(corpus(tmp_path / "undisturbed", text).parts[0].folder)
    done = run_python("-c", CRASHES, tmp_path, timeout=120)
    assert int(done.stdout) > 10
    found = contents(corpus_folder(tmp_path / "store", task(tmp_path / "store", text).key))
    assert len(expected) == 3
    assert found == expected  # no *.writing either


KILLED = """
import os, sys, time
from pathlib import Path
from jax_transformer.text import prepare, samples
from tests.text.texts import corpus, write, lines

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one worker
prepare.BLOCK_PAIRS = samples.BLOCK_PAIRS = 40
folder = Path(sys.argv[1])
corpus(folder / "store", write(folder, *lines(4_000)))
"""


def children(pid):
    tasks = Path(f"/proc/{pid}/task")
    found = [part for path in tasks.glob("*/children") for part in path.read_text().split()]
    return [int(number) for number in found]


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def blocks_done(folder):
    manifest = folder / UNFINISHED
    return read_entry(manifest, dict)["blocks"] if manifest.exists() else 0


@pytest.mark.exhaustive
def test_workers_end_with_a_killed_process_and_the_next_goes_on(tmp_path, one_process, monkeypatch):
    folder = tmp_path / "store" / "corpora"
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT) as process:
        wait_until(lambda: any(blocks_done(path) > 3 for path in folder.glob("*")))
        workers = children(process.pid)
        process.kill()
    assert len(workers) >= 1
    wait_until(lambda: not any(map(is_running, workers)), 5)
    (left,) = folder.iterdir()
    done = blocks_done(left)
    assert 3 < done < 100
    assert not (left / MANIFEST).exists()
    encoded, encode = [], preparing.encode_block

    def counted(block, *arguments, **options):
        encoded.append(block.first)
        return encode(block, *arguments, **options)

    monkeypatch.setattr(preparing, "encode_block", counted)
    text = TextFiles((tmp_path / "text.de",), (tmp_path / "text.en",))
    assert corpus(tmp_path / "store", text).parts[0].folder == left
    assert encoded == list(range(40 * done, 4_000, 40))  # what is done is not done again
    assert contents(left) == contents(corpus(tmp_path / "undisturbed", text).parts[0].folder)


def test_a_killed_worker_is_one_line(tmp_path, small_blocks, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    text = write(tmp_path, *lines(400))
    blocks = TextFiles.blocks

    def killing(*arguments):
        for number, block in enumerate(blocks(*arguments)):
            if number == 2:
                for worker in multiprocessing.active_children():
                    worker.kill()
            yield block

    monkeypatch.setattr(TextFiles, "blocks", killing)
    with pytest.raises(InputError, match="a process that encodes was killed") as refusal:
        corpus(tmp_path / "store", text)
    assert "what is done stays" in str(refusal.value)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("drop_duplicates", [False, True])
def test_of_two_at_once_one_prepares_and_one_waits(
    tmp_path, one_process, monkeypatch, drop_duplicates
):
    text = Text(*map(tuple, lines(90)))
    ready, reads, corpora, said, read_blocks = threading.Event(), [], [], [], Text.blocks

    def blocks(text, pairs):
        reads.append(pairs)
        assert ready.wait(30)  # until the other thread is refused the folder
        yield from read_blocks(text, pairs)

    def run():
        console = quiet()
        console.print = lambda line: (said.append(line), ready.set())
        work = Task(text, TOKENIZER, FILTERS, np.zeros(0, np.int64), drop_duplicates)
        corpora.append(prepared_corpus(tmp_path, work, console))

    monkeypatch.setattr(Text, "blocks", blocks)
    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    first, second = corpora
    assert len(reads) == (2 if drop_duplicates else 1)
    assert "waiting for it" in said[0]
    every = np.arange(len(first))
    np.testing.assert_array_equal(first.read(every).ids, second.read(every).ids)
    assert first.counts == second.counts
    pairs = list(zip(text.sources, text.targets, strict=True))
    assert len(every) == len(set(pairs) if drop_duplicates else pairs)


def test_a_full_disk_is_one_line_and_what_is_done_stays(tmp_path, one_process, monkeypatch):
    text = write(tmp_path, *lines(120))
    expected = contents(corpus(tmp_path / "undisturbed", text).parts[0].folder)
    work = task(tmp_path / "store", text)
    folder = corpus_folder(tmp_path / "store", work.key)
    with (
        largest_file(len(expected["index"]) - 100),
        pytest.raises(InputError, match="File too large") as refusal,
    ):
        prepared_corpus(tmp_path / "store", work, quiet())
    assert blocks_done(folder) == 2
    assert not (folder / MANIFEST).exists()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        with pytest.raises(InputError, match="GB are free; make room") as refusal:
            prepared_corpus(tmp_path / "store", work, quiet())
    assert "what is done stays" in str(refusal.value)
    assert contents(corpus(tmp_path / "store", text).parts[0].folder) == expected


def no_space(_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_is_full_before_a_block_is_one_line(tmp_path, monkeypatch):
    text = write(tmp_path, *lines(9))
    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(InputError, match="No space left on device") as refusal:
        with_known_facts(tmp_path / "store", text, quiet())
    assert str(tmp_path / "store") in str(refusal.value)


def test_a_changed_text_is_encoded_again(tmp_path, one_process):
    text = write(tmp_path, *lines(90))
    first = corpus(tmp_path / "store", text)
    path = text.sources[0]
    before = path.stat()
    content = path.read_text()
    place = content.index("drei")
    path.write_text(content[:place] + "vier" + content[place + 4 :])  # of the same size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # and of the same time
    second = corpus(tmp_path / "store", text)
    assert second.parts[0].folder != first.parts[0].folder
    every = np.arange(90)
    assert second.read(every).ids.tobytes() != first.read(every).ids.tobytes()
    os.utime(path, ns=(0, 0))  # the content is the same: only its digest is made again
    assert corpus(tmp_path / "store", text).parts[0].folder == second.parts[0].folder


def test_a_text_that_changes_while_it_is_encoded_is_refused(tmp_path, one_process):
    text = write(tmp_path, *lines(90))
    work = task(tmp_path / "store", text)
    write(tmp_path, *lines(90, seed=1))
    os.utime(text.sources[0], ns=(0, 0))
    with pytest.raises(InputError, match="changed while it was encoded") as refusal:
        prepared_corpus(tmp_path / "store", work, quiet())
    assert str(text.sources[0]) in str(refusal.value)
    assert not (corpus_folder(tmp_path / "store", work.key) / MANIFEST).exists()
    expected = encode_text(text.read(), TOKENIZER, 30)
    assert_same_pairs(corpus(tmp_path / "store", text), expected)


@pytest.mark.parametrize("is_tsv", [False, True])
def test_a_line_of_10_megabytes_is_dropped_and_takes_no_memory(tmp_path, one_process, is_tsv):
    sources, targets = lines(90)
    sources[50] = "eins " * 2_000_000
    text = write(tmp_path, sources, targets)
    if is_tsv:
        text = TextFiles((tmp_path / "text.tsv",))
        text.sources[0].write_text("".join(map("{}\t{}\n".format, sources, targets)))
    del sources
    store = tmp_path / "store"
    with memory_below(6e6):  # blocks of 2**18 bytes, and what Python needs
        text = with_known_facts(store, text, quiet())
        tokenizer = trained(store, text, 40, 1000, quiet())
        prepared = corpus(store, text, tokenizer=tokenizer)
        lines_read = dict(chosen_pairs(text, np.array([50, 51])))
    assert prepared.counts.dropped == {"dropped as too long": 1}
    assert len(prepared) == 89
    assert lines_read[50] is None
    assert lines_read[51][1] == targets[51]


@pytest.mark.parametrize("texts", [0, 3])
def test_of_a_text_of_newlines_a_bounded_number_of_pairs_is_looked_at(tmp_path, monkeypatch, texts):
    content = b"\n" * 10_000 + b"eins\n" * texts
    paths = tmp_path / "text.de.gz", tmp_path / "text.en.gz"
    for path in paths:
        path.write_bytes(gzip.compress(content, compresslevel=1))
    text = TextFiles(paths[:1], paths[1:])
    monkeypatch.setattr(samples, "MOST_CANDIDATES", 2**12)
    text = with_known_facts(tmp_path / "store", text, quiet())
    with pytest.raises(InputError, match=r"text on both sides (in|among) 4,096"):
        held_out(tmp_path / "store", text, 10, 0, quiet())
    with pytest.raises(InputError, match=r"leaves none|no pair with text on both sides in 10,000"):
        held_out(tmp_path / "store", text, 5_000, 0, quiet())  # 4 for each that is wanted
    repeats = repeated_pairs(text.blocks(10**6), tmp_path)
    assert repeats.tolist() == list(range(10_001, 10_000 + texts))


def test_words_too_long_for_the_tokenizer_are_counted_before_the_user(tmp_path):
    sources, targets = lines(90)
    sources[50] = "ä" * 1001
    text = with_known_facts(tmp_path / "store", write(tmp_path, sources, targets), quiet())
    console = Console(file=io.StringIO(), width=200)
    tokenizer = trained(tmp_path / "store", text, 40, 2000, console)
    assert console.file.getvalue() == (
        "1 lines left out of the training of the tokenizer: of more than 2,000 characters, or with "
        "a word of more than 1,000\n"
    )
    assert tokenizer.encode_source(["ä"])[0][:-1].count(tokenizer.unk_id)


def test_what_is_written_is_as_long_as_what_occurs_whatever_the_limit(tmp_path):
    prepared = corpus(
        tmp_path / "store", write(tmp_path, *lines(9)), filters=Filters(max_length=30_000_000)
    )
    manifest = prepared.parts[0].folder / MANIFEST
    assert manifest.stat().st_size < 1000
    assert len(prepared) == prepared.length_counts.sum() == 9


@pytest.mark.parametrize(
    "content",
    ['[{"path": 1}]', "[[1, [2], [3]]]", "{}", "[" * 100_000, "[1", '["1", [], []]', "\xff"],
)
def test_a_damaged_entry_is_one_line_and_remedy(tmp_path, content):
    store, text = tmp_path / "store", write(tmp_path, ["a", "b", "c"], ["d", "e", "f"])
    reads = {
        "texts": lambda: with_known_facts(store, text, quiet()),
        "held_out": lambda: held_out(store, with_known_facts(store, text, quiet()), 1, 0, quiet()),
    }
    for name, read in reads.items():
        read()
        (entry,) = (store / name).glob("*.json")
        whole = entry.read_bytes()
        entry.write_text(content, "latin-1")
        with pytest.raises(InputError, match="delete it"):
            read()
        entry.write_bytes(whole)


PARTS = st.sampled_from(["", "a", "b", "ab", "ä", "a b"])


def blocks(pairs, size=100):
    return Text(*(tuple(pair[side] for pair in pairs) for side in (0, 1))).blocks(size)


@given(pairs=st.lists(st.tuples(PARTS, PARTS), max_size=60), size=st.integers(1, 20))
@settings(deadline=None, max_examples=12)
def test_all_but_the_first_of_equal_pairs_with_text_repeat(tmp_path_factory, pairs, size):
    folder, seen, expected = tmp_path_factory.mktemp("duplicates"), set(), []
    for number, pair in enumerate(pairs):
        if all(pair):
            if pair in seen:
                expected.append(number)
            seen.add(pair)
    (folder / "61.digests").write_bytes(bytes(48))  # of a process that was killed
    assert repeated_pairs(blocks(pairs, size), folder).tolist() == expected
    assert list(folder.iterdir()) == []


def test_digests_differ_where_a_pair_is_split():
    pairs = [("a", "b"), ("ab", "c"), ("a", "bc"), ("a", "b "), ("b", "a")]
    (block,) = blocks(pairs)
    records = pair_records(block)
    assert (records.shape, records.dtype) == ((5, 3), np.uint64)
    assert len(np.unique(records[:, :2], axis=0)) == 5


def test_digests_that_differ_in_one_byte_do_not_repeat():
    for byte in range(16):
        digests = np.zeros((3, 24), np.uint8)
        digests[1, byte] = 1
        digests[:, 16] = range(3)
        assert repeated_numbers(digests.view(np.uint64)).tolist() == [2]


def test_a_folder_that_cannot_be_written_is_refused_by_name(tmp_path):
    (tmp_path / "61.digests").mkdir()
    with pytest.raises(InputError) as refusal, one_line_faults(tmp_path):
        repeated_pairs(blocks([("a", "b")]), tmp_path)
    assert str(refusal.value).startswith(f"{tmp_path}: ")
    assert "name a folder that can be written with --prepared" in str(refusal.value)
