"""A model of a Hugging Face folder with languages, characters and words that it did not have."""

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jax_transformer.config import TransformerConfig
from jax_transformer.config.lengths import VOCABULARIES
from jax_transformer.convert import huggingface
from jax_transformer.convert.families import get_family
from jax_transformer.convert.families.family import config_to_json
from jax_transformer.convert.origin import read_origin
from jax_transformer.convert.table import flatten, nest
from jax_transformer.errors import InputError, shorten
from jax_transformer.model.checks import check_text
from jax_transformer.model.tree import PARAMETERS
from jax_transformer.storage.folder import CONFIG_FILE
from jax_transformer.storage.marian_files import is_marian
from jax_transformer.storage.writing import json_bytes
from jax_transformer.tokenizers import Tokenizer, extended
from jax_transformer.tokenizers.formats import TARGET_VOCABULARY
from jax_transformer.tokenizers.readers.class_settings import read_tokenizer_config
from jax_transformer.tokenizers.readers.library import BYTES
from jax_transformer.tokenizers.segmenters import MARK


class Extension(NamedTuple):
    """What was added to a model.

    Attributes:
        ids: Id of each new token.
        unknown: Share of the text's tokens that were unknown before and are now; 0 without text.
        left: Files of the folder that were not carried over.
    """

    ids: dict[str, int]
    unknown: tuple[float, float]
    left: list[str]


def extend(
    folder: Path,
    output: Path,
    *,
    languages: Mapping[str, str | None] | None = None,
    tokens: Sequence[str] = (),
    text: Sequence[str] = (),
    sentencepiece: int | None = None,
    overwrite: bool = False,
) -> Extension:
    """Write a folder of transformers with more tokens: the ids of the others stay.

    The row of a code is that of its relative; that of another token is the mean of the rows of the
    pieces by which the tokenizer has written it. Where it has written nothing but unknown tokens,
    and of a code without a relative, it is the mean of all rows, or of all codes.

    Args:
        folder: Folder of transformers.
        output: The folder to write, whose parent exists.
        languages: New language codes, each with a code that the model has, or None.
        tokens: Texts that become one token each.
        text: Lines of text, whose unknown characters become tokens.
        sentencepiece: Size of a sentencepiece model that is trained on the text: its pieces that
            have such a character become tokens too.
        overwrite: Whether files of the same names are replaced.

    Raises:
        InputError: A code or a token is there already, a relative is not, nothing would be added,
            or the tokenizer's class takes no more of these. Nothing is written then.
    """
    if not huggingface.is_huggingface(folder) or is_marian(folder):
        raise InputError(f"{folder} is no folder of transformers; convert the model to one first")
    huggingface.check_free(output, [CONFIG_FILE], overwrite)
    config, before = huggingface.load_tokenizer(folder)
    check_text(config)  # behind the tokens of Whisper stand its times
    _check(before, tokens)
    relatives = {
        extended.code_token(before, code): relative for code, relative in (languages or {}).items()
    }
    lines = [extended.normalized(before, line) for line in text]
    pieces = extended.new_pieces(before, lines, sentencepiece)
    values = read_tokenizer_config(folder)
    files, ids = extended.extended_files(before, values, pieces, [*relatives], tokens)
    if not ids:
        raise InputError("the tokenizer has all these tokens, so nothing would be added")
    rows = {ids[token]: _old_ids(before, token, relatives) for token in ids}

    config, params = huggingface.from_huggingface(folder)
    sizes = {name: max(getattr(config, name), 1 + max(rows)) for name in VOCABULARIES}
    larger = dataclasses.replace(config, **sizes)
    params = _with_rows(params, larger, rows, before.source.segmenter.size)
    origin, left = read_origin(folder)
    old, new = (config_to_json(get_family(origin.model_type), each) for each in (config, larger))
    new = huggingface.brought_up(origin.config, old, new)
    files = {**origin.files, **before.contents, **files}
    with tempfile.TemporaryDirectory() as staging:
        for name, content in {**files, CONFIG_FILE: json_bytes(new)}.items():
            (Path(staging) / name).write_bytes(content)
        _, after = huggingface.load_tokenizer(staging)
    if wrong := [token for token in ids if after.source.segmenter.token_id(token) != ids[token]]:
        raise InputError(f"{folder}: the tokenizer has gaps, so {wrong[0]!r:.40} gets another id")
    huggingface.to_huggingface(
        params,
        larger,
        output,
        tokenizer=after,
        origin=dataclasses.replace(
            origin,
            config=new,
            files={name: files[name] for name in files if name not in after.contents},
        ),
        overwrite=overwrite,
    )
    return Extension(ids, (_unknown_share(before, text), _unknown_share(after, text)), left)


def _check(tokenizer: Tokenizer, tokens: Sequence[str]) -> None:
    """Refuse a tokenizer that takes no tokens, and a text that cannot be one."""
    if tokenizer.kind == BYTES:
        raise InputError("the tokenizer writes every text as bytes, so it lacks no token")
    if TARGET_VOCABULARY in tokenizer.contents:
        raise InputError("the languages have a vocabulary each, and tokens need one for both")
    for token in tokens:
        token_id = tokenizer.source.segmenter.token_id(token)
        fault = None if token_id is None else f"is there already: its id is {token_id}"
        fault = fault if token.strip() == token != "" else "must not begin or end with a space"
        if fault or tokens.count(token) > 1:
            raise InputError(f"the token {shorten(token)} {fault or 'is named twice'}; remove it")


def _old_ids(
    tokenizer: Tokenizer, token: str, relatives: Mapping[str, str | None]
) -> list[int] | None:
    """Return the ids whose rows decide the row of a new token; None means all."""
    if token in relatives:
        codes, relative = extended.known_codes(tokenizer), relatives[token]
        if relative is None:
            return [*codes.values()]
        if relative not in codes:
            raise InputError(
                f"language {relative!r:.40}: is no code of the model; name one of its "
                f"{len(codes)}, such as {', '.join([*codes][:3])}"
            )
        return [codes[relative]]
    (ids,) = tokenizer.encode_text([token.replace(MARK, " ").strip()])
    nothing = {tokenizer.unk_id, tokenizer.source.segmenter.token_id(MARK)}
    return [token_id for token_id in ids if token_id not in nothing] or None


def _with_rows(
    params: dict[str, Any],
    config: TransformerConfig,
    rows: Mapping[int, list[int] | None],
    known: int,
) -> dict[str, Any]:
    """Return parameters whose tables and output projection have the rows of a larger config.

    Args:
        rows: By new id, the ids of which its row is the mean; None means all.
        known: Number of ids that had tokens.
    """
    leaves = flatten(params)
    for path in leaves.keys() & PARAMETERS.keys():
        axes = PARAMETERS[path].lengths
        for axis in (i for i, name in enumerate(axes) if name in VOCABULARIES):
            table = np.moveaxis(np.asarray(leaves[path]), axis, 0)
            size = getattr(config, axes[axis])
            mean = table[:known].mean(axis=0, dtype=np.float64)
            more = np.full((size - len(table), *table.shape[1:]), mean, table.dtype)
            grown = np.concatenate([table, more])
            for token_id, ids in rows.items():
                grown[token_id] = mean if ids is None else table[ids].mean(axis=0, dtype=np.float64)
            leaves[path] = np.moveaxis(grown, 0, axis)
    return nest(leaves)


def _unknown_share(tokenizer: Tokenizer, text: Sequence[str]) -> float:
    """Return the share of the tokens of lines that are unknown."""
    ids = [i for row in tokenizer.encode_text(text) for i in row]
    return ids.count(tokenizer.unk_id) / max(1, len(ids))
