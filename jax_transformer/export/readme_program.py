"""The program in the README of an exported model: lines in, translations out.

A README copies these functions. So they have plain types, and import nothing of this library.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import sentencepiece
import tokenizers


def by_tokenizers(folder: Path, settings: dict) -> tuple[Callable, Callable]:
    """Return what turns a line into ids, and ids into text, by the library tokenizers."""
    paths = (str(folder / name) for name in settings["tokenizers"])
    source, target = map(tokenizers.Tokenizer.from_file, paths)
    source.encode_special_tokens = settings["special_tokens_are_text"]
    return (
        lambda line: source.encode(line, add_special_tokens=False).ids,
        lambda ids: target.decode(ids, skip_special_tokens=False),
    )


def by_sentencepiece(folder: Path, settings: dict) -> tuple[Callable, Callable]:
    """Return what turns a line into ids, and ids into text, by the library sentencepiece."""
    paths = (str(folder / name) for name in settings["tokenizers"])
    source, joiner = (sentencepiece.SentencePieceProcessor(model_file=path) for path in paths)
    ids, added, unk_id = settings["ids"], settings["added"], settings["unk_id"]
    split = re.compile(f"({settings['added_pattern']})").split

    def encode(line: str) -> list[int]:
        parts = [[part] if part in added else source.encode_as_pieces(part) for part in split(line)]
        return [added.get(piece, ids.get(piece, unk_id)) for part in parts for piece in part]

    def decode(target: list[int]) -> str:
        pieces = [settings["tokens"][i] for i in target]
        return joiner.decode_pieces(pieces).replace("▁", " ").strip()

    return encode, decode


def as_sources(lines: list[str], encode: Callable, settings: dict) -> list[list[int]]:
    """Return the ids of each line as the encoder reads them; those of a blank line are empty."""
    sources, blank = [], encode("")
    for number, line in enumerate(lines, start=1):
        ids = [i for i in encode(line) if i != settings["pad_id"]]  # that the text spells
        source = settings["prefix"] + ids + settings["suffix"] if ids != blank else []
        if len(source) > settings["longest"]:
            sys.exit(f"line {number} has {len(source)} tokens; at most {settings['longest']} fit")
        sources.append(source)
    return sources


def as_text(ids: list[int], decode: Callable, settings: dict) -> str:
    """Return the text of the ids of a target."""
    text = decode([i for i in ids if i not in settings["left_out"]])
    for spaced in settings["without_space"]:
        text = text.replace(spaced, spaced.strip())
    return text


def translate(
    lines: list[str], text_and_ids: tuple[Callable, Callable], search: Callable, settings: dict
) -> list[str]:
    """Return the translations of lines, in batches of 64 lines of similar length."""
    encode, decode = text_and_ids
    sources, texts = as_sources(lines, encode, settings), [""] * len(lines)
    order = sorted((i for i, ids in enumerate(sources) if ids), key=lambda i: -len(sources[i]))
    for start in range(0, len(order), 64):
        members = order[start : start + 64]
        rows, length = len(members), len(sources[members[0]])
        if settings["is_compiled"]:  # for each new set of sizes: powers of two, and always 64 rows
            rows, length = 64, min(1 << (max(8, length) - 1).bit_length(), settings["longest"])
        src = np.full((rows, length), settings["pad_id"])
        for row, i in zip(src, members, strict=False):
            row[: len(sources[i])] = sources[i]
        usual = 2 * (src != settings["pad_id"]).sum(axis=1) + settings["extra_tokens"]
        found = search(src, np.minimum(usual, settings["max_new_tokens"]))
        for i, ids in zip(members, found, strict=False):
            texts[i] = as_text(ids, decode, settings)
    return texts
