"""Preparing and reading a large corpus: python -m benchmarks.corpora --pairs N --store DIR.

Makes a text by code, or takes --source FILE --target FILE. The made words are drawn by Zipf's law
from a lexicon of syllables, so that byte-pair encoding has something to learn.

Prints, for one core and for all: pairs a second of preparing, beside those of the tokenizer alone
on the same lines; tokens a second of the batches made from the prepared corpus, in buckets and
packed; the time to the first batch at the beginning of an epoch and far into it; and the peak
memory of each. Each measurement is a process of its own. Needs Linux (sched_setaffinity).
"""

import contextlib
import dataclasses
import io
import json
import multiprocessing
import os
import queue
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.systems import processor
from jax_transformer.text.batches import epoch_batches
from jax_transformer.text.corpus import Corpus
from jax_transformer.text.encoding import Filters
from jax_transformer.text.parallel_text import TextFiles
from jax_transformer.text.plan import epoch_layout
from jax_transformer.text.prepare import Task, corpus_folder, open_folder, prepared_corpus
from jax_transformer.text.samples import trained_tokenizer
from jax_transformer.text.store import with_known_facts
from jax_transformer.training.config import TrainingConfig

QUIET = Console(file=io.StringIO())
NOTHING = np.zeros(0, np.int64)
BLOCK = 100_000  # pairs that are made at a time
WORDS, SYLLABLES = 50_000, 300
MEAN_WORDS = 17  # of a sentence


def make(folder: Path, pairs: int) -> tuple[Path, Path]:
    """Write two line-aligned files of so many lines; return their paths."""
    random = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "made.source", folder / "made.target"
    lexicons = [_lexicon(random) for _ in paths]
    chances = 1 / (np.arange(WORDS) + 10.0)
    chances = chances.cumsum() / chances.sum()
    with paths[0].open("w") as source, paths[1].open("w") as target:
        for start in track(range(0, pairs, BLOCK), "making the text"):
            count = min(BLOCK, pairs - start)
            counts = np.clip(random.gamma(3, MEAN_WORDS / 3, count).astype(int), 1, 80)
            words = np.searchsorted(chances, random.random(counts.sum()))
            ends = counts.cumsum()
            for file, lexicon in zip((source, target), lexicons, strict=True):
                spelled = lexicon[words].tolist()
                lines = (
                    " ".join(spelled[end - length : end])
                    for end, length in zip(ends.tolist(), counts.tolist(), strict=True)
                )
                file.write("\n".join(lines) + "\n")
    return paths


def _lexicon(random: np.random.Generator) -> np.ndarray:
    letters = [list("bcdfghjklmnprstvwz"), list("aeiou"), [*list("lnrst"), ""]]
    syllables = ["".join(random.choice(kind) for kind in letters) for _ in range(SYLLABLES)]
    parts = random.integers(1, 5, WORDS)
    return np.array(["".join(random.choice(syllables, count)) for count in parts], object)


def main(
    source: Path | None = None,
    target: Path | None = None,
    store: Path | None = None,
    pairs: int = 10_000_000,
    vocab_size: int = 8000,
    max_length: int = 128,
    tokenizer_pairs: int = 200_000,
    alone_pairs: int = 100_000,
    batches: int = 3000,
    rounds: int = 3,
) -> None:
    """Measure.

    Args:
        source: Training text; None makes one.
        target: Its translation.
        store: Where it is made and prepared; None takes a temporary folder.
        pairs: Lines of a text that is made.
        vocab_size: Entries of the byte-pair encoding.
        max_length: Most tokens of a side.
        tokenizer_pairs: Pairs that the tokenizer is trained on.
        alone_pairs: Pairs that the tokenizer encodes alone.
        batches: Batches that are made in each mode.
        rounds: How often preparing and the tokenizer are measured, in turn.
    """
    cores = sorted(os.sched_getaffinity(0))
    print(f"processor: {processor()}; {len(cores)} cores")
    with tempfile.TemporaryDirectory() as folder:
        kept = store or Path(folder)
        texts = (source, target) if source and target else make(kept, pairs)
        shared = *texts, vocab_size, max_length, tokenizer_pairs
        prepared = _apart(cores, _prepare_whole, *shared, kept)
        print(json.dumps({"preparing all, once": prepared}))
        table = Table("cores", "prepared, pairs/s", "tokenizer alone, pairs/s", "share")
        for count in (1, len(cores)):
            for _ in range(rounds):
                own, alone = (
                    _apart(cores[:count], work, *shared, kept, alone_pairs)["pairs a second"]
                    for work in (_prepare_part, _tokenizer_alone)
                )
                table.add_row(str(count), f"{own:,.0f}", f"{alone:,.0f}", f"{own / alone:.0%}")
        Console().print(table)
        table = Table("batching", "tokens/s on one core", "first batch", "far into the epoch", "GB")
        for batching in ("buckets", "packed"):
            found = _apart(cores[:1], _read, prepared["folder"], batching, batches)
            table.add_row(
                batching,
                f"{found['tokens a second']:,.0f}",
                f"{found['first batch']:.2f} s",
                f"{found['far batch']:.2f} s",
                f"{found['peak GB']:.2f}",
            )
        Console().print(table)


def _apart(cores: list[int], work: Callable[..., dict[str, Any]], *arguments: Any) -> dict:
    """Return what a function returns in a process of its own, on some cores."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=_answer, args=(answers, cores, work, *arguments))
    process.start()
    while process.is_alive():
        with contextlib.suppress(queue.Empty):
            return answers.get(timeout=1)
    raise SystemExit(f"{work.__name__} failed")


def _answer(answers: Any, cores: list[int], work: Callable[..., dict], *arguments: Any) -> None:
    os.sched_setaffinity(0, cores)
    os.environ["RAYON_NUM_THREADS"] = str(len(cores))
    found = work(*arguments)
    used = [resource.getrusage(who).ru_maxrss for who in (0, resource.RUSAGE_CHILDREN)]
    answers.put(found | {"peak GB": used[0] / 1e6, "peak of a worker, GB": used[1] / 1e6})


def _task(source: Path, target: Path, vocab_size: int, length: int, pairs: int, store: Path) -> Any:
    text = with_known_facts(store, TextFiles((source,), (target,)), QUIET)
    longest = 64 * length
    tokenizer = trained_tokenizer(
        store, [text], NOTHING, vocab_size, True, pairs, longest, 0, QUIET
    )
    return Task(text, tokenizer, Filters(length), NOTHING)


def _prepare_whole(*arguments: Any) -> dict[str, Any]:
    """Prepare the whole text, if it is not prepared."""
    start = time.perf_counter()
    task = _task(*arguments)
    ready = time.perf_counter()
    corpus = prepared_corpus(arguments[-1], task, QUIET)
    return {
        "folder": str(corpus_folder(arguments[-1], task.key)),
        "pairs": len(corpus),
        "tokens": corpus.counts.tokens,
        "facts and tokenizer, s": round(ready - start, 1),
        "shards, s": round(time.perf_counter() - ready, 1),
    }


class _FirstBlocks:
    """The first blocks of a text."""

    names = "the first blocks"

    def __init__(self, text: TextFiles, pairs: int) -> None:
        self.text, self.pairs = text, pairs
        self.sha256 = f"{time.time_ns()}"  # so that its folder is a new one

    def blocks(self, pairs: int) -> Any:
        """Yield blocks until there are enough pairs."""
        for block in self.text.blocks(min(pairs, self.pairs // 4)):
            if block.first >= self.pairs:
                return
            yield block


def _prepare_part(*arguments: Any) -> dict[str, Any]:
    """Prepare the first pairs of the text, in a folder of their own."""
    *_, store, pairs = arguments
    task = _task(*arguments[:-1])
    part = dataclasses.replace(task, text=_FirstBlocks(task.text, pairs))
    with tempfile.TemporaryDirectory(dir=store) as folder:
        start = time.perf_counter()
        corpus = prepared_corpus(Path(folder), part, QUIET)
        seconds = time.perf_counter() - start
    return {"pairs a second": corpus.counts.read / seconds}


def _tokenizer_alone(*arguments: Any) -> dict[str, Any]:
    """Let the tokenizers library encode the same lines, and do nothing with the ids."""
    *_, pairs = arguments
    task = _task(*arguments[:-1])
    lines = [
        line
        for block in _FirstBlocks(task.text, pairs).blocks(2**16)
        for pair in block.pairs()
        for line in pair
    ]
    encode = task.tokenizer.source.segmenter.library.encode_batch_fast
    start = time.perf_counter()
    for first in range(0, len(lines), 2**14):
        encode(lines[first : first + 2**14])
    return {"pairs a second": len(lines) / 2 / (time.perf_counter() - start)}


def _read(folder: str, batching: str, batches: int) -> dict[str, Any]:
    """Make batches from the beginning of an epoch, and one from its last window."""
    settings = TrainingConfig(batching=batching)
    start = time.perf_counter()
    corpus = open_folder(Path(folder))
    layout = epoch_layout(corpus, settings)
    first = _first_batch(corpus, settings, layout, (0, 0), start)
    last = layout.windows - 1
    far = _first_batch(corpus, settings, layout, (last, 7), time.perf_counter())
    start, tokens = time.perf_counter(), 0
    for count, numbered in enumerate(epoch_batches(corpus, settings, layout, 1)):
        tokens += int(np.count_nonzero(numbered.batch.tgt_out != corpus.pad_id))
        tokens += int(np.count_nonzero(numbered.batch.src != corpus.pad_id))
        if count == batches:
            break
    seconds = time.perf_counter() - start
    return {"tokens a second": tokens / seconds, "first batch": first, "far batch": far}


def _first_batch(
    corpus: Corpus, settings: TrainingConfig, layout: Any, place: Any, start: float
) -> float:
    next(epoch_batches(corpus, settings, layout, 0, place))
    return time.perf_counter() - start


if __name__ == "__main__":
    tyro.cli(main)
