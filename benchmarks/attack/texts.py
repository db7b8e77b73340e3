"""Tries that give texts: to the reader of lines, the tokenizers, the corpora and `translate`."""

import functools
import gzip
import io
import itertools
import lzma
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.attack import files, stock
from benchmarks.attack.mutations import choose, mutate_bytes
from benchmarks.attack.outcomes import Attempt, Outcome, WrongResult, command
from jax_transformer.runs.run_model import read_tokenizer
from jax_transformer.text.text_files import LONGEST_LINE, decode_lines
from jax_transformer.tokenizers import Tokenizer

MOST_LINES = 10**6  # that are read of a bomb
MOST_TEXT = 2**18  # bytes that are encoded; tokenizers take some 400 bytes for each character
SPECIAL = 3  # ids of a line that are not of its text
BOMB_NAME = "a compression bomb"
BOMB = 2**29  # bytes of a text that is compressed to little
SHORT = (
    *("", " ", "\t", "\r", "\ufeff", "\u2028", "\u0085", "\x0b\x0c\x1c\x1d\x1e", "\x7f", "\u200b"),
    *("one", "two hundred", "ß", "e\u0301", "\u202eabc", "\U0001f469\u200d\U0001f4bb", "￿"),
    *("▁", "▁▁a", "<s>", "</s>", "<pad>", "<unk>", "<s></s>", ">>de<<", "[PAD]", "@@"),
    *("one@@ two", "Ġ", "a\tb"),
    *("\U0010ffff", "ﷺ" * 10, "\u0e33" * 20, "zalgo" + "\u0301" * 200, "a" * 1000, "one " * 500),
)
BAD = (b"\0", b"\xff\xfe", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\x80", b"\xe2\x82")


def text(draw: np.random.Generator) -> tuple[bytes, str]:
    """Return a hostile text, and what it is."""
    return TEXTS[name := choose(draw, list(TEXTS))](draw), name


def _lines(draw: np.random.Generator) -> bytes:
    ends = choose(draw, (["\n"], ["\n"], ["\r\n"], ["\n", "\r\n", "\r", "\u2028\n", "\n\n\n"]))
    chosen = [choose(draw, SHORT) for _ in range(int(draw.integers(1, 12)))]
    return "".join(line + choose(draw, ends) for line in chosen).encode("utf-8", "surrogatepass")


def _broken_lines(draw: np.random.Generator) -> bytes:
    data = bytearray(_lines(draw))
    place = int(draw.integers(len(data) + 1))
    data[place:place] = choose(draw, BAD)
    return bytes(data)


def _characters(draw: np.random.Generator) -> bytes:
    points = draw.integers(1, choose(draw, (128, 2**11, 2**16, 0x110000)), 60)
    return "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000).encode()


def _magic(draw: np.random.Generator) -> bytes:
    start = choose(draw, (b"\x1f\x8b", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd", b"\x50\x2a\x4d\x18"))
    return start + draw.bytes(int(draw.integers(100)))


def _packed(draw: np.random.Generator) -> bytes:
    pack = choose(draw, (gzip.compress, lzma.compress))
    data = pack(_lines(draw)) + choose(draw, (b"", b"\0" * 100, pack(_lines(draw)), b"x"))
    return mutate_bytes(draw, data)[0] if draw.random() < 0.5 else data


@functools.cache
def _bomb_of(line: bytes, kind: str) -> bytes:
    block = line * (2**20 // len(line))
    out = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=out, mode="wb")
        if kind == "gzip"
        else lzma.LZMAFile(out, "wb", preset=0) as file
    ):
        for _ in range(BOMB // 2**20):
            file.write(block)
    return out.getvalue()


def _bomb(draw: np.random.Generator) -> bytes:
    return _bomb_of(choose(draw, (b"x", b"\n", b"one two\n", b" ")), "gzip")


def _nested(draw: np.random.Generator) -> bytes:
    return gzip.compress(gzip.compress(_lines(draw)))


TEXTS: dict[str, Callable[[np.random.Generator], bytes]] = {
    "random bytes": lambda draw: draw.bytes(int(draw.integers(200))),
    "odd lines": _lines,
    "lines with bytes that are not UTF-8": _broken_lines,
    "random characters": _characters,
    "the start of a compressed file": _magic,
    "a compressed file, perhaps damaged": _packed,
    "a compressed file in another": _nested,
    BOMB_NAME: _bomb,
    "a line of 3 MB": lambda draw: choose(draw, (b"x", b"one ", "ü".encode())) * 10**6 + b"\n",
    "100,000 empty lines": lambda draw: choose(draw, (b"\n", b"\r\n", b" \n")) * 10**5,
    "nothing": lambda draw: b"",
}


def prepare(draw: np.random.Generator, folder: Path, stock_folder: Path, quick: bool) -> Attempt:
    """Return a try on a text; arguments as for the files."""
    makers = [_read, _read, _encoded, _encoded, _translated]
    if not quick:
        makers += [_prepared, _alone]
    return choose(draw, makers)(draw, folder, stock_folder, quick)


def _read(draw: np.random.Generator, folder: Path, _: Path, __: bool) -> Attempt:
    data, what = text(draw)
    path = folder / "text.txt"
    path.write_bytes(data)

    def run() -> Outcome:
        count, plain = 0, not data.startswith((b"\x1f\x8b", b"\xfd7zXZ", b"\x28\xb5", b"\x50\x2a"))
        with path.open("rb") as file:
            for line in itertools.islice(decode_lines(file, str(path), LONGEST_LINE), MOST_LINES):
                count += 1
                if "\n" in line or "\0" in line:
                    raise WrongResult("a line with a line end or a NUL")
                line.encode()
        if plain and count != data.count(b"\n") + (data[-1:] not in (b"", b"\n")):
            raise WrongResult(f"{count} lines were read")
        return Outcome.OTHER

    return Attempt(f"decode_lines; {what}", run, (folder,))


@functools.cache
def _tokenizer(stock_folder: Path, name: str) -> Tokenizer:
    if name == "own":
        return stock.tokenizer()
    return read_tokenizer(
        stock.stocked(stock_folder, f"folder-of-{name}", stock.family_folder(name))
    )


def _encoded(draw: np.random.Generator, folder: Path, stock_folder: Path, quick: bool) -> Attempt:
    names = ["own"]
    if not quick and stock.has("transformers", "sentencepiece"):
        names += files.FAMILIES
    name = choose(draw, names)
    tokenizer = _tokenizer(stock_folder, name)
    data, what = text(draw)
    # Of a text that would be refused when it is read, each line as a text of Python.
    lines = data[:MOST_TEXT].decode("utf-8", choose(draw, ("replace", "ignore"))).split("\n")[:50]
    longest = choose(draw, (None, None, 1, 2, 5, 64))
    (folder / "lines.txt").write_bytes("\n".join(lines).encode())
    ids = draw.integers(0, tokenizer.tgt_vocab_size, int(draw.integers(20)))

    def run() -> Outcome:
        one = int(ids.sum()) % len(lines)
        for encode, size in (
            (tokenizer.encode_source, tokenizer.src_vocab_size),
            (tokenizer.encode_target, tokenizer.tgt_vocab_size),
        ):
            sides = encode(lines, longest)
            if len(sides) != len(lines):
                raise WrongResult(f"{len(sides)} lines of ids")
            if list(sides[one]) != list(encode([lines[one]], longest)[0]):
                raise WrongResult("a line alone has other ids than among others")
            for side in sides:
                if not all(0 <= token < size for token in side):
                    raise WrongResult("an id is outside the vocabulary")
                if longest is not None and len(side) > max(longest, SPECIAL):
                    raise WrongResult(f"{len(side)} ids, though max_length={longest}")
                tokenizer.decode(side).encode()
        tokenizer.decode(ids).encode()
        tokenizer.source_texts(list(range(min(20, tokenizer.src_vocab_size))))
        if tokenizer.target_texts(ids) is None:
            raise WrongResult("no texts of tokens")
        return Outcome.OTHER

    return Attempt(f"tokenizer of {name}, max_length={longest}; {what}", run)


def _prepared(draw: np.random.Generator, folder: Path, _: Path, __: bool) -> Attempt:
    data, what = text(draw)
    if what == BOMB_NAME:  # one of a single line: to prepare millions of lines is long work
        data = _bomb_of(b" ", "gzip")
    sources, targets = (["\n".join(side) + "\n"] for side in stock.lines())
    pair = [sources[0].encode(), targets[0].encode()]
    pair[int(draw.integers(2))] = data
    for name, content in zip(("source.txt", "target.txt"), pair, strict=True):
        (folder / name).write_bytes(content)
    if draw.random() < 0.3:  # both are hostile, and as long
        (folder / "source.txt").write_bytes(data)
        (folder / "target.txt").write_bytes(data)
        what += ", on both sides"

    def run() -> Outcome:
        names = [f"--{name}={folder / name}.txt" for name in ("source", "target")]
        limits = ["--vocab-size=300", "--valid-pairs=2", f"--prepared={folder / 'prepared'}"]
        command(["prepare", *names, *limits])
        return Outcome.OTHER

    guarded = (folder / "source.txt", folder / "target.txt")
    return Attempt(f"prepare; {what}", run, guarded)


def _translated(draw: np.random.Generator, folder: Path, stock_folder: Path, _: bool) -> Attempt:
    model = stock.stocked(stock_folder, "own-model", stock.own_folder)
    data, what = text(draw)
    if what in ("100,000 empty lines", "a compression bomb"):  # takes minutes, rightly
        data, what = _lines(draw), "odd lines"
    (folder / "stdin").write_bytes(data)
    overlong = choose(draw, ("refuse", "cut", "cut"))

    def run() -> Outcome:
        printed = command(["translate", str(model), f"--overlong={overlong}"], data)
        plain = not data.startswith((b"\x1f\x8b", b"\xfd7zXZ", b"\x28\xb5", b"\x50\x2a"))
        lines = data.count(b"\n") + (data[-1:] not in (b"", b"\n"))
        if plain and printed.count(b"\n") != lines:
            raise WrongResult(f"{printed.count(bytes([10]))} lines of output for {lines}")
        return Outcome.OTHER

    return Attempt(f"translate, --overlong={overlong}; {what}", run, (folder, model))


def _alone(draw: np.random.Generator, folder: Path, stock_folder: Path, _: bool) -> Attempt:
    """Return a try that translates lines together and one of them alone."""
    model = stock.stocked(stock_folder, "own-model", stock.own_folder)
    lines = [choose(draw, SHORT).replace("\r", " ") for _ in range(int(draw.integers(2, 9)))]
    data = "".join(f"{line}\n" for line in lines).encode()
    one = int(draw.integers(1, len(lines)))  # a byte-order mark at the start would be removed
    (folder / "stdin").write_bytes(data)
    flags = ["translate", str(model), "--overlong=cut"]

    def run() -> Outcome:
        together = command(flags, data).decode().split("\n")
        alone = command(flags, f"one\n{lines[one]}\n".encode()).decode().split("\n")
        if together[one] != alone[1]:
            raise WrongResult(f"{lines[one]!r} gives {alone[1]!r} alone, not {together[one]!r}")
        return Outcome.SAME

    return Attempt(f"translate; line {one} of {lines!r:.200} alone", run, (model,))
