"""Preparing a corpus: its text is encoded once, on all cores, into a folder.

The folder contains the ids of all pairs, an index of them, and a manifest. Until all blocks of the
text are done, the manifest has another name, and counts them.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import math
import multiprocessing
import os
import signal
import threading
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64, UInt64
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jax_transformer.errors import InputError
from jax_transformer.storage.reading import json_digest
from jax_transformer.storage.writing import to_disk
from jax_transformer.text.corpus import INDEX_TYPE, NOTHING, Corpus, Counts, FileArray, Part, again
from jax_transformer.text.encoding import Filters, encode_documents, encode_pairs
from jax_transformer.text.parallel_text import (
    BLOCK_PAIRS,
    Block,
    Text,
    TextFiles,
    has_text,
    no_pairs,
)
from jax_transformer.text.store import FORMAT, locked, one_line_faults, read_entry, write_entry
from jax_transformer.text.text_files import BadLine
from jax_transformer.tokenizers import Tokenizer, from_text, to_text

IDS, INDEX = "ids", "index"
HELD_OUT = "held out for validation"
MANIFEST, UNFINISHED = "manifest.json", "unfinished.json"
# A side with more characters for each token of max_length is too long; it is not encoded.
CHARACTERS_OF_A_TOKEN = 64
DIGEST_BYTES = 16  # among 10**12 pairs, two differing ones share a digest with probability 1.5e-15
PARTITIONS = 256  # files, one for each first byte of a digest


@dataclasses.dataclass(frozen=True)
class Task:
    """A corpus to prepare."""

    text: Text | TextFiles
    tokenizer: Tokenizer
    filters: Filters
    held_out: Int64[np.ndarray, "_"]  # numbers of the pairs for validation, ascending
    drop_duplicates: bool = False
    prefix: str = ""  # before each source of a pair

    @functools.cached_property
    def key(self) -> str:
        """Digest of all this."""
        recipe = {
            "format": FORMAT,
            "text": self.text.sha256,
            "tokenizer": self.tokenizer.digest(),
            "filters": self.filters._asdict(),
            "left_out": {HELD_OUT: hashlib.sha256(self.held_out.tobytes()).hexdigest()},
            "drop_duplicates": self.drop_duplicates,
            **({"prefix": self.prefix} if self.prefix else {}),
        }
        return json_digest(recipe)


def repeated_pairs(blocks: Iterable[Block], folder: Path) -> Int64[np.ndarray, "_"]:
    """Return the numbers of the pairs that repeat an earlier one, ascending; blank ones do not.

    A digest and a number of each pair, 24 bytes, go to the file of its first byte; one block, then
    one file, is in memory at a time. Files of a killed process are replaced.
    """
    paths = [folder / f"{first:02x}.digests" for first in range(PARTITIONS)]
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context(path.open("wb")) for path in paths]
        for block in blocks:
            records = pair_records(block)
            first_bytes = records.view(np.uint8)[:, 0]
            for first in np.unique(first_bytes):
                files[first].write(records[first_bytes == first].data)
    repeated = [repeated_numbers(np.fromfile(path, np.uint64).reshape(-1, 3)) for path in paths]
    for path in paths:
        path.unlink()
    return np.sort(np.concatenate(repeated)).astype(np.int64)


def pair_records(block: Block) -> UInt64[np.ndarray, "_ 3"]:
    r"""Return the digest, as two numbers, and the number of each pair that is not blank.

    The digest is BLAKE2b of source, "\n" (which no side contains) and target, or of a document.
    """
    pairs = block.pairs()
    places = [place for place, pair in enumerate(pairs) if has_text(pair)]
    digests = b"".join(
        hashlib.blake2b("\n".join(pairs[place]).encode(), digest_size=DIGEST_BYTES).digest()
        for place in places
    )
    records = np.empty((len(places), 3), np.uint64)
    records[:, :2] = np.frombuffer(digests, np.uint64).reshape(-1, 2)
    records[:, 2] = np.array(places, np.uint64) + np.uint64(block.first)
    return records


def repeated_numbers(records: UInt64[np.ndarray, "_ 3"]) -> UInt64[np.ndarray, "_"]:
    """Return the numbers of the records whose digest is that of an earlier one."""
    records = records[np.lexsort(records.T[::-1])]  # equal digests in the order of numbers
    return records[1:, 2][(records[1:, :2] == records[:-1, :2]).all(axis=1)]


def prepared_corpus(store: Path, task: Task, console: Console) -> Corpus:
    """Return a prepared corpus; prepare it, if it is not there."""
    folder = corpus_folder(store, task.key)
    if not (folder / MANIFEST).exists():
        with locked(folder, console):
            if not (folder / MANIFEST).exists():
                return prepare(store, task, folder, console)
    return open_folder(folder)


def corpus_folder(store: Path, key: str) -> Path:
    """Return the folder of a prepared corpus."""
    return store / "corpora" / key[:32]


def prepare(store: Path, task: Task, folder: Path, console: Console) -> Corpus:
    """Encode a text into a locked folder; go on where an earlier call was killed."""
    unfinished = folder / UNFINISHED
    blocks, counts = 0, NOTHING
    if unfinished.exists():
        manifest = read_entry(unfinished, dict[str, Any], again(folder))
        blocks, counts = manifest["blocks"], _counts(manifest)
    with one_line_faults(folder):
        for part in _encoded(store, task, blocks, counts.read, console):
            start = counts.tokens + counts.pairs
            part.index["start"] += np.uint64(start)
            _append(folder / IDS, start, part.ids)
            _append(folder / INDEX, counts.pairs, part.index)
            blocks, counts = blocks + 1, counts.plus(part.counts)
            manifest = {
                "key": task.key,
                "src_vocab_size": task.tokenizer.src_vocab_size,
                "tgt_vocab_size": task.tokenizer.tgt_vocab_size,
                "pad_id": task.tokenizer.pad_id,
                "dtype": part.ids.dtype.str,
                "blocks": blocks,
                **counts._replace(lengths=sorted(counts.lengths.items()))._asdict(),
            }
            write_entry(unfinished, manifest)
        _check_kept(task, counts)
        os.replace(unfinished, folder / MANIFEST)
        to_disk(folder)
    return open_folder(folder)


def dry_run(store: Path, task: Task, console: Console) -> Counts:
    """Encode a text and write nothing; return what would be kept."""
    counts = NOTHING
    for part in _encoded(store, task, 0, 0, console):
        counts = counts.plus(part.counts)
    _check_kept(task, counts)
    return counts


def open_folder(folder: Path) -> Corpus:
    """Return the corpus that `prepare` has written."""
    manifest = read_entry(folder / MANIFEST, dict[str, Any], again(folder))
    counts = _counts(manifest)
    ids = FileArray(folder / IDS, np.dtype(manifest["dtype"]), counts.tokens + counts.pairs)
    index = FileArray(folder / INDEX, INDEX_TYPE, counts.pairs)
    part = Part(index, ids, counts, zlib.crc32(manifest["key"].encode()), folder)
    return Corpus(
        [part], manifest["src_vocab_size"], manifest["tgt_vocab_size"], manifest["pad_id"]
    )


def _counts(manifest: dict[str, Any]) -> Counts:
    counts = Counts(*(manifest[name] for name in Counts._fields))
    lengths, bad_lines = Counter(dict(counts.lengths)), tuple(counts.bad_lines)
    return counts._replace(dropped=Counter(counts.dropped), lengths=lengths, bad_lines=bad_lines)


def _append(path: Path, size: int, content: np.ndarray) -> None:
    """Write after the first elements of a file; what a killed process left after them is cut."""
    with path.open("ab") as file:
        file.truncate(size * content.itemsize)
        file.write(content.data)
        file.flush()
        os.fsync(file.fileno())


def _check_kept(task: Task, counts: Counts) -> None:
    if counts.pairs:
        return
    if counts.dropped.keys() <= {"dropped for an empty side", "dropped for a bad line"}:
        raise no_pairs(task.text.names, task.text.pairs)
    if task.text.reading.documents:
        raise InputError(f"{task.text.names}: no document has two tokens; name other files")
    filters = ", ".join(f"{name}={value}" for name, value in task.filters._asdict().items())
    raise InputError(
        f"{filters} leave none of {task.text.pairs:,} pairs; raise them or name a corpus with "
        "shorter lines"
    )


def _encoded(store: Path, task: Task, blocks: int, pairs: int, console: Console) -> Iterator[Part]:
    """Encode the blocks of a text in order, after those that are done with their pairs."""
    left_out = {HELD_OUT: task.held_out}
    if task.drop_duplicates:
        scratch = store / "duplicates" / task.key
        with locked(scratch, console):
            repeated = repeated_pairs(task.text.blocks(BLOCK_PAIRS), scratch)
        left_out["dropped as duplicates"] = repeated
    tokenizer, seed = to_text(task.tokenizer), zlib.crc32(task.key.encode())

    def works() -> Iterator[Callable[[], Part]]:
        for block in itertools.islice(task.text.blocks(BLOCK_PAIRS), blocks, None):
            places = _places(left_out, block)
            yield functools.partial(
                encode_block, block, places, task.filters, tokenizer, seed, task.prefix
            )

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal or task.text.pairs <= BLOCK_PAIRS,
    ) as progress:
        bar = progress.add_task("encoding", total=task.text.pairs, completed=pairs)
        for part in _on_all_cores(works()):
            progress.advance(bar, part.counts.read)
            yield part


def _places(left_out: dict[str, Int64[np.ndarray, "_"]], block: Block) -> dict[int, str]:
    """Return why pairs of a block are left out, by their places."""
    span = [block.first, block.first + len(block.sources)]
    return {
        number - block.first: reason
        for reason, numbers in left_out.items()
        for number in numbers[slice(*np.searchsorted(numbers, span))].tolist()
    }


def encode_block(
    block: Block,
    left_out: dict[int, str],
    filters: Filters,
    tokenizer: str,
    seed: int,
    prefix: str = "",
) -> Part:
    """Return the ids of a block's pairs that are kept; runs in a worker.

    `left_out` has the reasons why pairs are not kept, by their place in the block.
    """
    dropped, lines = Counter(), []
    documents = block.reading.documents
    bad_lines = [] if block.reading.bad_lines == "skip" else None
    # A document of any length becomes several texts.
    most = math.inf if documents else CHARACTERS_OF_A_TOKEN * filters.max_length
    try:
        for place, pair in enumerate(block.pairs()):
            if place in left_out:
                dropped[left_out[place]] += 1
            elif isinstance(pair, BadLine):
                bad_lines.append(pair.place)
            elif pair is None or max(map(len, pair)) > most:
                dropped["dropped as too long"] += 1
            elif not has_text(pair):
                dropped["dropped for an empty side"] += 1
            else:
                lines.append((prefix + pair[0], *pair[1:], block.place(place)))
        read = _tokenizer(tokenizer)
        if documents:
            return encode_documents(lines, read, documents, dropped, bad_lines, seed)
        return encode_pairs(lines, read, filters, dropped, bad_lines, seed)
    except InputError as error:
        raise InputError(str(error)) from None  # one that a process can hand to another one


@functools.lru_cache(maxsize=1)  # a worker reads it once; each copy would take memory anew
def _tokenizer(text: str) -> Tokenizer:
    return from_text(text, "tokenizer")


def _on_all_cores(works: Iterator[Callable[[], Part]]) -> Iterator[Part]:
    """Do all work, in several processes if there is more than one piece; yield results in order."""
    first = list(itertools.islice(works, 2))
    if len(first) < 2:
        yield from (work() for work in first)
        return
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    spawn = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    with concurrent.futures.ProcessPoolExecutor(workers, spawn, _begin_worker) as pool:
        works = itertools.chain(first, works)
        running = deque(pool.submit(work) for work in itertools.islice(works, workers + 1))
        try:
            while running:
                running.extend(pool.submit(work) for work in itertools.islice(works, 1))
                yield running.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def _begin_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each core has a worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the main process too
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()  # until it has ended, also by SIGKILL
    os._exit(1)
