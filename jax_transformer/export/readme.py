"""The README of an exported model, and the program in it: lines in, translations out.

The README copies the functions from `by_tokenizers` to `translate`, which therefore have plain
types and use nothing of this library, and the search of the export, which the proof has run too.
"""

import importlib.resources
import inspect
import json
import re
import string
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import tokenizers

from jax_transformer.errors import InputError
from jax_transformer.tokenizers import Tokenizer
from jax_transformer.tokenizers.segmenters import LibrarySegmenter, SentencePieceSegmenter, Words
from jax_transformer.tokenizers.tokenizer import CLEANED
from jax_transformer.translation.model_folder import TrainedModel
from jax_transformer.translation.pools import usual_target_length

README, SETTINGS = "README.md", "settings.json"
PROGRAM = """folder, *arguments = sys.argv[1:]
settings = json.loads(Path(folder, "settings.json").read_text("utf-8"))
text_and_ids = {reader}(Path(folder), settings)
search = {search}(Path(folder), settings, *arguments)
lines = [line.rstrip("\\n") for line in sys.stdin]
print(*translate(lines, text_and_ids, search, settings), sep="\\n")"""


def write_readme(
    folder: Path,
    model: TrainedModel,
    template: str,
    functions: Sequence[Callable[..., Any]],
    settings: Mapping[str, Any],
    **values: Any,
) -> dict[str, Any]:
    """Write the README, its settings and the files of the tokenizer; return the settings.

    Args:
        template: File of this room in which `$code`, `$program`, `$library` and `values` are
            filled in.
        functions: Those of the search that the README shows. The first one returns the search,
            from a folder, settings and further arguments of the program.
        settings: What they read beside the settings for text.

    Raises:
        InputError: The source and the target have tokenizers of two libraries.
    """
    reader, files, of_tokenizer = _tokenizer_files(model.tokenizer)
    settings = {**_text_settings(model), **of_tokenizer, **settings}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / SETTINGS).write_text(json.dumps(settings), "utf-8")
    shown = (reader, as_sources, as_text, translate, *functions)
    text = importlib.resources.files(__package__).joinpath(template).read_text("utf-8")
    filled = string.Template(text).substitute(
        code="\n\n".join(map(inspect.getsource, shown)).rstrip(),
        program=PROGRAM.format(reader=reader.__name__, search=functions[0].__name__),
        library=reader.__name__.removeprefix("by_"),
        **values,
    )
    (folder / README).write_text(filled, "utf-8")
    return settings


def _text_settings(model: TrainedModel) -> dict[str, Any]:
    config, generation, target = model.config, model.generation, model.tokenizer.target
    prefix, suffix = model.tokenizer.affixes("source")
    return {
        "pad_id": config.pad_id,
        "prefix": prefix,
        "suffix": suffix,
        "longest": config.max_length,
        "max_new_tokens": generation.get("max_new_tokens", config.max_length),
        "extra_tokens": usual_target_length(0) + (generation.get("min_new_tokens") or 0),
        "left_out": sorted(target.segmenter.left_out or target.segmenter.special_ids),
        "without_space": CLEANED if target.clean_up_spaces else (),
    }


def _tokenizer_files(
    tokenizer: Tokenizer,
) -> tuple[Callable[..., Any], dict[str, bytes], dict[str, Any]]:
    """Return what reads a tokenizer in the README, its files, and the settings that it needs."""
    source, target = tokenizer.source.segmenter, tokenizer.target.segmenter
    if isinstance(source, LibrarySegmenter) and isinstance(target, LibrarySegmenter):
        libraries = {"source.json": source.library, "target.json": target.library}
        files = {name: library.to_str().encode() for name, library in libraries.items()}
        as_text = source.library.encode_special_tokens
        return by_tokenizers, files, {"tokenizers": [*files], "special_tokens_are_text": as_text}
    if not isinstance(source, SentencePieceSegmenter) or not isinstance(
        target, SentencePieceSegmenter
    ):
        raise InputError(
            "the source and the target have tokenizers of two libraries, tokenizers and "
            "sentencepiece; the README of an export reads those of one library"
        )
    if isinstance(source.model, Words):
        raise InputError(
            "the vocabulary is one of words that spaces hold apart; the README of an export reads "
            "sentencepiece models"
        )
    models = {"source.spm": source.model, "target.spm": target.joiner}
    files = {name: model.serialized_model_proto() for name, model in models.items()}
    added = {} if source.rule == "marian_npz" else source.added  # which are text there
    longest_first = sorted(added, key=len, reverse=True)
    patterns = [*map(re.escape, longest_first), *(f"^{re.escape(code)}" for code in source.codes)]
    return (
        by_sentencepiece,
        files,
        {
            "tokenizers": [*files],
            "ids": dict(source.ids),
            "added": {**source.codes, **added},
            "added_pattern": "|".join(patterns) or "(?!)",  # which matches nothing
            "unk_id": tokenizer.unk_id,
            "tokens": [target.token(i) for i in range(tokenizer.tgt_vocab_size)],
        },
    )


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
