"""Preparing a corpus: its text is encoded once, on all cores, into a folder of shards."""

import concurrent.futures
import contextlib
import errno
import fcntl
import functools
import math
import multiprocessing
import os
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int64
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jax_transformer.errors import InputError
from jax_transformer.storage.writing import staged_file
from jax_transformer.text.parallel_text import (
    Block,
    FileFacts,
    check_unchanged,
    decode_pairs,
    has_text,
)
from jax_transformer.text.prepared.corpus import MANIFEST, PreparedCorpus, merged_facts, open_folder
from jax_transformer.text.prepared.shards import ShardFacts, read_facts, sealed, write_shard
from jax_transformer.tokenizers import Tokenizer, from_text, to_text

SHARD_PAIRS = 2**16  # pairs of the text that a worker encodes at a time
CHUNK = 1024  # lines that a tokenizer encodes at a time, whose results take much memory
# A side with more characters for each token of max_length is too long; it is not encoded.
CHARACTERS_OF_A_TOKEN = 64


@runtime_checkable
class Text(Protocol):
    """A parallel text that is read in blocks.

    Attributes:
        names: Names of its files, for messages.
    """

    names: str

    def blocks(self, pairs: int) -> Iterator[Block]:
        """Yield the text in blocks of so many pairs; equal blocks each time."""


class Filters(NamedTuple):
    """Which pairs of a text are kept.

    Attributes:
        max_length: Most tokens of a side that the model takes, EOS (or BOS) included.
        longest_side: Most tokens of a side, EOS included; None is `max_length`.
        max_ratio: Most tokens of the longer side for each token of the shorter one; None is any.
    """

    max_length: int
    longest_side: int | None = None
    max_ratio: float | None = None

    def check(self) -> None:
        """Refuse values that keep nothing.

        Raises:
            InputError: A value is out of range.
        """
        if self.longest_side is not None and self.longest_side < 1:
            raise InputError(f"longest_side={self.longest_side} must be at least 1")
        if self.max_ratio is not None and not 1 <= self.max_ratio < math.inf:
            raise InputError(f"max_ratio={self.max_ratio} must be a number of at least 1")

    def reason_to_drop(self, source: int, target: int) -> str | None:
        """Return why a pair of sides with so many tokens, EOS included, is not kept."""
        longer, shorter = max(source, target), min(source, target)
        if longer > self.max_length or longer > (self.longest_side or longer):
            return "dropped as too long"
        if self.max_ratio is not None and longer > self.max_ratio * shorter:
            return "dropped for unequal lengths"
        return None


class _Work(NamedTuple):
    """What a worker does: encode a block into a shard.

    Attributes:
        number: Number of the shard.
        block: The text.
        left_out: Pairs of the block that are not kept, by their place, and why.
        filters: Which of the others are kept.
        folder: Where the shard is written; None writes nothing.
        key: Key of the corpus.
        tokenizer: What `to_text` returned for the tokenizer.
    """

    number: int
    block: Block
    left_out: dict[int, str]
    filters: Filters
    folder: Path | None
    key: str
    tokenizer: str


class Task(NamedTuple):
    """A corpus to prepare.

    Attributes:
        text: The text.
        files: Facts of its files, none for a text in memory.
        pairs: Pairs of the text.
        left_out: Numbers of pairs that are not kept, ascending, by the reason.
        filters: Which of the others are kept.
        tokenizer: The tokenizer of both sides.
        key: Digest of all this.
    """

    text: Text
    files: tuple[FileFacts, ...]
    pairs: int
    left_out: dict[str, Int64[np.ndarray, "_"]]
    filters: Filters
    tokenizer: Tokenizer
    key: str


def prepare(task: Task, folder: Path, console: Console) -> PreparedCorpus:
    """Encode a text into shards; go on where an earlier call was killed.

    Memory is bounded by two blocks for each worker, whatever the text. The caller holds `locked`.

    Args:
        task: The corpus.
        folder: Where the shards are written.
        console: Shows the progress.

    Raises:
        InputError: The text cannot be used, no pair is kept, or the disk is full.
    """
    shards = 0

    def works() -> Iterator[_Work]:
        nonlocal shards
        for number, block in enumerate(task.text.blocks(SHARD_PAIRS)):
            shards += 1
            check_unchanged(task.files)  # no shard of another text gets the key of this one
            if read_facts(folder, number, task.key) is None:
                yield _work(task, number, block, folder)

    with _one_line(folder), _progress(console, task.pairs) as progress:
        shown = progress.add_task("encoding", total=task.pairs)
        for facts in _on_all_cores(works()):
            progress.advance(shown, facts.pairs + sum(facts.dropped.values()))
    found = [read_facts(folder, number, task.key) for number in range(shards)]
    _check_kept(task, merged_facts(found))
    manifest = {
        "key": task.key,
        "src_vocab_size": task.tokenizer.src_vocab_size,
        "tgt_vocab_size": task.tokenizer.tgt_vocab_size,
        "pad_id": task.tokenizer.pad_id,
        "shards": shards,
    }
    write_whole(folder / MANIFEST, sealed(manifest))
    return open_folder(folder)


def dry_run(task: Task, console: Console) -> ShardFacts:
    """Encode a text and write nothing; return what would be kept.

    Raises:
        InputError: As `prepare`.
    """
    works = (
        _work(task, number, block, None)
        for number, block in enumerate(task.text.blocks(SHARD_PAIRS))
    )
    with _progress(console, task.pairs) as progress:
        shown = progress.add_task("encoding", total=task.pairs)
        shards = []
        for facts in _on_all_cores(works):
            shards.append(facts)
            progress.advance(shown, facts.pairs + sum(facts.dropped.values()))
    total = merged_facts(shards)
    _check_kept(task, total)
    return total


def _check_kept(task: Task, total: ShardFacts) -> None:
    if not total.pairs:
        if total.dropped.keys() <= {"dropped for an empty side"}:
            raise InputError(
                f"{task.text.names} hold no pair with text on both sides in {task.pairs:,} lines; "
                "name other files"
            )
        filters = ", ".join(f"{name}={value}" for name, value in task.filters._asdict().items())
        raise InputError(
            f"{filters} leave none of {task.pairs:,} pairs; raise them or name a corpus with "
            "shorter lines"
        )


def _work(task: Task, number: int, block: Block, folder: Path | None) -> _Work:
    left_out = _names_within(task.left_out, block)
    return _Work(number, block, left_out, task.filters, folder, task.key, to_text(task.tokenizer))


def encode_block(
    block: Block, left_out: dict[int, str], filters: Filters, tokenizer: Tokenizer, key: str
) -> tuple[list[tuple[np.ndarray, np.ndarray]], ShardFacts]:
    """Return the ids of the pairs of a block that are kept, and what became of the others.

    Args:
        block: Lines of the text.
        left_out: Pairs that are not kept, by their place in the block, and why.
        filters: Which of the others are kept.
        tokenizer: The tokenizer of both sides.
        key: Key of the corpus.

    Raises:
        InputError: A line is not UTF-8 text or cannot be encoded.
    """
    dropped, lines = Counter(), []
    most = CHARACTERS_OF_A_TOKEN * filters.max_length
    for place, pair in enumerate(decode_pairs(block)):
        if place in left_out:
            dropped[left_out[place]] += 1
        elif place in block.overlong or max(map(len, pair)) > most:
            dropped["dropped as too long"] += 1
        elif not has_text(pair):
            dropped["dropped for an empty side"] += 1
        else:
            lines.append(pair)
    smallest = np.min_scalar_type(max(tokenizer.src_vocab_size, tokenizer.tgt_vocab_size) - 1)
    sides, unknown = [], 0
    counts = np.zeros(filters.max_length + 1, np.int64)
    for start in range(0, len(lines), CHUNK):
        chunk = list(zip(*lines[start : start + CHUNK], strict=True))
        encoded = zip(
            tokenizer.encode_source(chunk[0]), tokenizer.encode_target(chunk[1]), strict=True
        )
        for source, target in encoded:
            reason = filters.reason_to_drop(len(source), len(target))
            if reason:
                dropped[reason] += 1
                continue
            unknown += source.count(tokenizer.unk_id) + target.count(tokenizer.unk_id)
            counts[max(len(source), len(target))] += 1
            ids = (np.array(side, smallest) for side in (source, [tokenizer.bos_id, *target]))
            sides.append(tuple(ids))
    ids = sum(len(source) + len(target) for source, target in sides)
    facts = ShardFacts(
        key=key,
        pairs=len(sides),
        ids=ids,
        dtype=smallest.str,
        tokens=ids - len(sides),
        unknown=unknown,
        dropped=dict(dropped),
        length_counts=counts.tolist(),
    )
    return sides, facts


@contextlib.contextmanager
def locked(folder: Path, console: Console) -> Iterator[None]:
    """Make a folder, and keep other processes out of it; wait for one that is in it."""
    with _one_line(folder):
        folder.mkdir(parents=True, exist_ok=True)
        opened = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            console.print(f"another process prepares {folder}; waiting for it")
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file whole or not at all.

    Raises:
        InputError: The disk is full, or the folder cannot be written.
    """
    with _one_line(path.parent), staged_file(path) as scratch:
        scratch.write_bytes(content)


def _names_within(left_out: dict[str, Int64[np.ndarray, "_"]], block: Block) -> dict[int, str]:
    """Return the places of a block that are left out, and why."""
    last = block.first + len(block.sources)
    found = {}
    for reason, numbers in left_out.items():
        begin, end = np.searchsorted(numbers, [block.first, last])
        found |= {int(number) - block.first: reason for number in numbers[begin:end]}
    return found


def _on_all_cores(works: Iterator[_Work]) -> Iterator[ShardFacts]:
    """Do all work, in several processes if there is more than one piece; yield the facts."""
    first = next(works, None)
    second = next(works, None)
    if second is None:
        if first is not None:
            yield _do(first)
        return
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    spawn = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    with concurrent.futures.ProcessPoolExecutor(workers, spawn, _begin_worker) as pool:
        running = {pool.submit(_do, first), pool.submit(_do, second)}
        try:
            for work in works:
                running.add(pool.submit(_do, work))
                if len(running) > workers + 1:
                    yield from _finished(running)
            while running:
                yield from _finished(running)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _finished(running: set[concurrent.futures.Future]) -> Iterator[ShardFacts]:
    """Wait for a piece of work; take what is finished out of the set."""
    done, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
    running -= done
    for future in done:
        yield future.result()


def _begin_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each core has a worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the main process too
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when the main one has ended, also by SIGKILL."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _do(work: _Work) -> ShardFacts:
    """Encode a block, write its shard where there is a folder, and return its facts."""
    tokenizer = _tokenizer(work.tokenizer)
    block, left_out, filters = work.block, work.left_out, work.filters
    try:
        sides, facts = encode_block(block, left_out, filters, tokenizer, work.key)
    except InputError as error:
        raise InputError(str(error)) from None  # one that a process can hand to another one
    if work.folder is not None:
        write_shard(work.folder, work.number, sides, facts)
    return facts


@functools.lru_cache(maxsize=1)  # a worker reads it once; each copy would take memory anew
def _tokenizer(text: str) -> Tokenizer:
    return from_text(text, "tokenizer")


@contextlib.contextmanager
def _one_line(folder: Path) -> Iterator[None]:
    """Turn failures of the disk and of workers into one line.

    Raises:
        InputError: There was one.
    """
    try:
        yield
    except OSError as error:
        remedy = "name a folder that can be written with --prepared"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(folder.parent).free
            remedy = (
                f"{free / 1e9:.1f} GB are free; make room, or name another disk with --prepared"
            )
        raise InputError(f"{folder}: {error.strerror}; {remedy}; what is done stays") from error
    except BrokenProcessPool as error:
        raise InputError(
            f"{folder}: a process that encodes was killed, as when memory is full; start again: "
            "what is done stays"
        ) from error


@contextlib.contextmanager
def _progress(console: Console, pairs: int) -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    shown = console.is_terminal and pairs > SHARD_PAIRS
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not shown) as progress:
        yield progress
