"""Gives hostile texts to the reader of lines, the tokenizers, the corpora and `translate`."""

import functools
import gzip
import itertools
import lzma
from pathlib import Path

from hypothesis import strategies as st

from jax_transformer.text.text_files import decode_lines
from jax_transformer.tokenizers import Tokenizer
from tests.fuzz import files, stock
from tests.fuzz.mutations import Draw, changed_bytes
from tests.fuzz.outcomes import OTHER, Attempt, Fault, command

MOST_LINES = 10**6  # that are read of a bomb
BOMB = 2**29  # bytes of a text that is compressed to little
MAGICS = (b"\x1f\x8b", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd", b"\x50\x2a\x4d\x18")
SHORT = (
    *("", " ", "\t", "\r", "\ufeff", "\u2028", "\u0085", "\x0b\x0c\x1c\x1d\x1e", "\x7f", "\u200b"),
    *("one", "two hundred", "ß", "e\u0301", "\u202eabc", "\U0001f469\u200d\U0001f4bb", "\uffff"),
    *("▁", "▁▁a", "<s>", "</s>", "<pad>", "<unk>", "<s></s>", ">>de<<", "[PAD]", "@@"),
    *("one@@ two", "Ġ", "a\tb"),
    *("\U0010ffff", "ﷺ" * 10, "\u0e33" * 20, "zalgo" + "\u0301" * 200, "a" * 1000, "one " * 500),
)
BAD = (b"\0", b"\xff\xfe", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\x80", b"\xe2\x82")
LINE = st.sampled_from(SHORT) | st.text(max_size=60)
LINES = st.lists(
    st.tuples(LINE, st.sampled_from(("\n", "\n", "\r\n", "\r", "\u2028\n", "\n\n\n"))),
    min_size=1,
    max_size=12,
).map(lambda pairs: "".join(map("".join, pairs)).encode("utf-8", "surrogatepass"))
PACKED = st.builds(
    lambda pack, lines, more: pack(lines) + more,
    st.sampled_from((gzip.compress, lzma.compress)),
    LINES,
    st.sampled_from((b"", b"\0" * 100, gzip.compress(b"more\n"), b"x")),
)


@functools.cache
def bomb(line: bytes) -> bytes:
    """Return a compressed text of many equal lines."""
    return gzip.compress(line * (BOMB // len(line)), 1)


SMALL = st.one_of(
    st.binary(max_size=200),
    LINES,
    st.builds(lambda start, bad, end: start + bad + end, LINES, st.sampled_from(BAD), LINES),
    st.builds(bytes.__add__, st.sampled_from(MAGICS), st.binary(max_size=100)),
    PACKED,
    PACKED.flatmap(changed_bytes),
    LINES.map(gzip.compress).map(gzip.compress),
    st.just(b""),
    st.sampled_from((b"x", b"one ", "ü".encode())).map(lambda word: word * 10**6 + b"\n"),
)
MANY_LINES = st.sampled_from((b"\n", b"\r\n", b" \n")).map(lambda line: line * 10**5)
BOMBS = st.sampled_from((b"x", b"\n", b"one two\n", b" ")).map(bomb)


def _count(data: bytes) -> int | None:
    """Return the number of lines of a text that is not compressed."""
    packed = data.startswith((b"\x1f\x8b", b"\xfd7zXZ", b"\x28\xb5", b"\x50\x2a"))
    return None if packed else data.count(b"\n") + (data[-1:] not in (b"", b"\n"))


def _read(draw: Draw, folder: Path, _: Path) -> Attempt:
    data, path = draw(SMALL | MANY_LINES | BOMBS), folder / "text.txt"
    path.write_bytes(data)

    def run() -> str:
        count = 0
        with path.open("rb") as file:
            for line in itertools.islice(decode_lines(file, str(path)), MOST_LINES):
                count += 1
                if "\n" in line or "\0" in line:
                    raise Fault("a line with a line end or a NUL")
                line.encode()
        if _count(data) not in (None, count):
            raise Fault(f"{count} lines were read")
        return OTHER

    return run, (folder,)


@functools.cache
def _tokenizer(stock_folder: Path, name: str) -> Tokenizer:
    if name == "own":
        return stock.model().tokenizer
    return files.load(files.published(stock_folder, name), name).tokenizer


def _encoded(draw: Draw, folder: Path, stock_folder: Path) -> Attempt:
    tokenizer = _tokenizer(stock_folder, draw(st.sampled_from(["own", *files.PUBLISHED])))
    longest = draw(st.sampled_from((None, None, 1, 2, 5, 64)))
    # Of a text that would be refused when it is read, each line as a text of Python.
    text = draw(SMALL)[: 2**18].decode("utf-8", draw(st.sampled_from(("replace", "ignore"))))
    ids = draw(st.lists(st.integers(0, tokenizer.tgt_vocab_size - 1), max_size=20))

    def run() -> str:
        files.check_tokenizer(tokenizer, text.split("\n")[:50], longest)
        tokenizer.decode(ids).encode()
        if tokenizer.target_texts(ids) is None:
            raise Fault("no texts of tokens")
        return OTHER

    return run, ()


def _translated(draw: Draw, folder: Path, stock_folder: Path) -> Attempt:
    model = stock.stocked(stock_folder, "own model", stock.own_folder)
    data, overlong = draw(SMALL), draw(st.sampled_from(("refuse", "cut", "cut")))

    def run() -> str:
        printed = command(["translate", str(model), f"--overlong={overlong}"], data)
        if _count(data) not in (None, printed.count(b"\n")):
            raise Fault(f"{printed.count(bytes([10]))} lines of output for {_count(data)}")
        return OTHER

    return run, (folder, model)


def prepare(draw: Draw, folder: Path, stock_folder: Path) -> Attempt:
    """Return an attempt on a text."""
    return draw(st.sampled_from((_read, _encoded, _translated)))(draw, folder, stock_folder)
