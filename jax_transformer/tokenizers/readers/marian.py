"""Vocabularies of Marian: sentencepiece models, or files of words that spaces hold apart.

A vocabulary in .yml beside source.spm and target.spm has the ids of their pieces, as the folders of
OPUS-MT. Text is split as Marian splits it: a special token in a line is text, or a word.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jax_transformer.errors import InputError
from jax_transformer.storage.marian_files import MAPPINGS, SPLITTERS, SPM
from jax_transformer.storage.yaml_file import read_words
from jax_transformer.tokenizers.formats import (
    MARIAN_NPZ,
    SENTENCEPIECE,
    TARGET_VOCABULARY,
    read_sentencepiece,
)
from jax_transformer.tokenizers.readers.library import MOST_IDS
from jax_transformer.tokenizers.readers.model_files import (
    VOCABULARY,
    read_files,
    read_model,
    read_vocabulary,
)
from jax_transformer.tokenizers.tokenizer import Tokenizer


class MarianVocabulary(NamedTuple):
    """The ids of tokens; those that end a line, and of what it lacks."""

    ids: dict[str, int]
    eos_id: int
    unk_id: int


def read_marian_vocabulary(path: Path, size: int) -> MarianVocabulary:
    """Return the vocabulary in a file, without tokens behind the `size` rows of a table."""
    if path.suffix == SPM:
        model = read_model(read_files(path.parent, [path.name])[path.name], str(path))
        ids = {model.id_to_piece(number): number for number in range(model.get_piece_size())}
        eos_id, unk_id = model.eos_id(), model.unk_id()
    elif path.suffix in MAPPINGS:
        words = {k: int(v) if v.isdecimal() else v for k, v in read_words(path).items()}
        ids = read_vocabulary(json.dumps(words).encode(), str(path))
        ids = {token: token_id for token, token_id in ids.items() if token_id < size}
        eos_id, unk_id = ids.get("</s>", -1), ids.get("<unk>", -1)
    else:
        endings = ", ".join((SPM, *MAPPINGS))
        raise InputError(f"{path}: such a vocabulary is not read, only those in {endings}")
    fault = f"has {len(ids)} tokens, but the model {size}" if len(ids) > size else ""
    if min(eos_id, unk_id) < 0:
        fault = "lacks </s> or <unk>"
    if fault:
        raise InputError(f"{path}: {fault}; use the vocabulary that the model was trained with")
    return MarianVocabulary(ids, eos_id, unk_id)


def read_marian_tokenizer(paths: Sequence[Path], size: int = MOST_IDS) -> Tokenizer:
    """Return the tokenizer in the vocabularies of the source and the target.

    Args:
        size: Rows of the model's tables, without that of padding.
    """
    folder = paths[0].parent
    source, target = (read_marian_vocabulary(path, size) for path in paths)
    pad_id = max(*source.ids.values(), *target.ids.values()) + 1 if size == MOST_IDS else size
    if source[1:] != target[1:]:
        raise InputError(
            f"{folder}: </s> and <unk> have the ids {source[1:]} in {paths[0].name} and "
            f"{target[1:]} in {paths[1].name}; one model here has them once"
        )
    contents = {VOCABULARY: json.dumps(source.ids).encode()}
    if target.ids != source.ids:
        contents[TARGET_VOCABULARY] = json.dumps(target.ids).encode()
    if paths[0].suffix == SPM:
        splitters = [path.name for path in paths]
    else:
        splitters = [name for name in SPLITTERS if (folder / name).exists()]
    read = read_files(folder, splitters)
    contents |= {SPLITTERS[i]: read[name] for i, name in enumerate(splitters)}
    padding = "<pad>"
    while padding in source.ids or padding in target.ids:
        padding = f"<{padding}>"
    eos = next(token for token, token_id in target.ids.items() if token_id == target.eos_id)
    settings = {
        "class_name": "MarianVocabulary",
        "rule": MARIAN_NPZ,
        "pad_id": pad_id,
        "bos_id": pad_id,
        "eos_id": target.eos_id,
        "unk_id": target.unk_id,
        "source_suffix": [target.eos_id],
        "target_suffix": [target.eos_id],
        "vocab_size": pad_id + 1,
        "added_tokens": {eos: target.eos_id, padding: pad_id},
    }
    return read_sentencepiece(contents, settings, str(folder))


def written_vocabularies(
    tokenizer: Tokenizer | None,
) -> tuple[dict[str, bytes], list[str], list[int]]:
    """Return a tokenizer's vocabularies as Marian reads them, without the id of padding.

    Returns:
        Files by their names; the names, and the numbers of ids, of the source and the target.

    Raises:
        InputError: Marian has no tokenizer of this kind.
    """
    rule = tokenizer and tokenizer.settings.get("rule")
    if tokenizer is None or tokenizer.kind != SENTENCEPIECE or rule not in ("marian", MARIAN_NPZ):
        kind = (
            "no tokenizer" if tokenizer is None else f"a tokenizer of the kind {tokenizer.kind!r}"
        )
        raise InputError(
            f"Marian reads sentencepiece models and vocabularies, but the model has {kind}; train "
            "with --tokenizer and a folder of these"
        )
    contents = tokenizer.contents
    ids = [json.loads(contents[VOCABULARY])]
    ids += [json.loads(contents[TARGET_VOCABULARY])] if TARGET_VOCABULARY in contents else []
    for each in ids:
        each.pop(next((token for token, i in each.items() if i == tokenizer.pad_id), None), None)
    splitters = {name: contents[name] for name in SPLITTERS if name in contents}
    models = [read_model(content, name) for name, content in splitters.items()]
    own = [{m.id_to_piece(i): i for i in range(m.get_piece_size())} for m in models]
    names = ("source", "target") if len({*splitters.values()}) > 1 or len(ids) > 1 else ("vocab",)
    if own and own == [ids[0], ids[-1]]:
        pairs = zip(names, splitters.values(), strict=False)
        files = {f"{name}{SPM}": content for name, content in pairs}
        named = [f"{name}{SPM}" for name in names]
    else:
        named = [f"vocab.{side}.yml" for side in ("src", "trg")] if len(ids) > 1 else ["vocab.yml"]
        files = splitters | {name: _yaml(each) for name, each in zip(named, ids, strict=True)}
    sizes = [max(each.values()) + 1 for each in (ids[0], ids[-1])]
    return files, [named[0], named[-1]], sizes


def _yaml(ids: Mapping[str, int]) -> bytes:
    lines = (f"{json.dumps(token, ensure_ascii=False)}: {i}\n" for token, i in ids.items())
    return "".join(lines).encode()
