"""Small texts in files, and what it takes to prepare them."""

import contextlib
import gzip
import io
import lzma
import random
import tracemalloc

import numpy as np
import pytest
from rich.console import Console

from jax_transformer.text.corpus import Corpus, packed_part
from jax_transformer.text.encoding import Filters
from jax_transformer.text.parallel_text import Reading, TextFiles
from jax_transformer.text.prepare import Task, prepared_corpus
from jax_transformer.text.samples import trained_tokenizer
from jax_transformer.text.store import with_known_facts
from jax_transformer.text.text_files import decode_lines, open_text
from jax_transformer.tokenizers import LineError, Tokenizer, train_byte_pair

WORDS = "eins zwei drei vier fünf sechs sieben acht neun".split()
TOKENIZER = train_byte_pair(WORDS, vocab_size=40)
FILTERS = Filters(max_length=30)
SKIP = Reading(bad_lines="skip")
PACK = {  # for each kind, a function that returns the one that compresses bytes
    "gzip": lambda: gzip.compress,
    "xz": lambda: lzma.compress,
    "zstd": lambda: pytest.importorskip("zstandard").ZstdCompressor(write_checksum=True).compress,
}
FORMS = {"plain": lambda: bytes, **PACK}


@contextlib.contextmanager
def memory_below(size):
    """Check that Python takes less memory in the block."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < size


def quiet():
    return Console(file=io.StringIO(), soft_wrap=True)


def lines(count, seed=0):
    """Return sources and targets, each of 1 to 6 words."""
    generator = random.Random(seed)
    sides = [
        [" ".join(generator.choices(WORDS, k=generator.randint(1, 6))) for _ in range(count)]
        for _ in range(2)
    ]
    return tuple(sides)


def write(folder, sources, targets, name="text"):
    """Write two files; return them as a text."""
    paths = [folder / f"{name}.{side}" for side in ("de", "en")]
    for path, side in zip(paths, (sources, targets), strict=True):
        path.write_text("".join(f"{line}\n" for line in side), encoding="utf-8")
    return TextFiles((paths[0],), (paths[1],))


def write_bad(folder, count):
    """Write pairs, every seventh with a bad line; return the text, and which pairs are good."""
    sides = [[line.encode() for line in side] for side in lines(count)]
    for number in range(3, count, 7):
        sides[number % 2][number] = (b"eins\xff", b"\0zwei")[number % 3 == 0]
    paths = folder / "bad.de", folder / "bad.en"
    for path, side in zip(paths, sides, strict=True):
        path.write_bytes(b"".join(line + b"\n" for line in side))
    good = [number for number in range(count) if number % 7 != 3]
    return TextFiles((paths[0],), (paths[1],), reading=SKIP), good


def task(store, text, filters=FILTERS, tokenizer=TOKENIZER, drop_duplicates=False):
    text = with_known_facts(store, text, quiet())
    return Task(text, tokenizer, filters, np.zeros(0, np.int64), drop_duplicates)


def corpus(store, text, **options):
    return prepared_corpus(store, task(store, text, **options), quiet())


def trained(store, text, size, longest, console):
    """Return the tokenizer that is trained on all pairs of a text."""
    none, every = np.zeros(0, np.int64), 10**6
    return trained_tokenizer(
        store, [text], none, size, False, every, longest, seed=0, console=console
    )


def refuse_lines(monkeypatch, method, word, fault):
    """Let a method of the tokenizers refuse the lines that hold a word."""
    encode = getattr(Tokenizer, method)

    def encode_others(tokenizer, lines, *rest):
        for row, line in enumerate(lines):
            if word in line:
                raise LineError(row, fault)
        return encode(tokenizer, lines, *rest)

    monkeypatch.setattr(Tokenizer, method, encode_others)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def sides(corpus):
    return corpus.read(np.arange(len(corpus))).sides()


def corpus_of(sources, targets, src_vocab_size, tgt_vocab_size, pad_id=0):
    """Return the corpus of ids: sources with EOS, targets with BOS and EOS."""
    pairs = [np.concatenate(pair) for pair in zip(sources, targets, strict=True)]
    part = packed_part(pairs, [len(source) for source in sources])
    return Corpus([part], src_vocab_size, tgt_vocab_size, pad_id)


def random_corpus(random, source_lengths, target_lengths):
    """Return a corpus of random ids; the lengths are in tokens, EOS included."""
    return corpus_of(
        [random.integers(4, 90, n).astype(np.int32) for n in source_lengths],
        [random.integers(4, 90, n + 1).astype(np.int32) for n in target_lengths],
        src_vocab_size=90,
        tgt_vocab_size=90,
    )


def read_lines(path, **options):
    with open_text(path) as file:
        return list(decode_lines(file, str(path), **options))
