"""What the readers of the families' tokenizers share: special tokens, affixes, languages."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import InputError
from jax_transformer.storage.folder import CONFIG_FILE
from jax_transformer.storage.reading import read_json

if TYPE_CHECKING:
    from jax_transformer.tokenizers import ByteLevelTokenizer, SentencePieceUnigram, TokenizerJson

TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER_JSON = "tokenizer.json"
VOCABULARY, MERGES = "vocab.json", "merges.txt"
MODEL = "sentencepiece.bpe.model"
T5_MODEL = "spiece.model"
# The names of special tokens where tokenizer_config.json has no others.
USUAL = {
    "bos": "<s>",
    "eos": "</s>",
    "unk": "<unk>",
    "sep": "</s>",
    "pad": "<pad>",
    "cls": "<s>",
    "mask": "<mask>",
}
LANGUAGE = re.compile(r"[a-z]{2,3}_[A-Z][A-Za-z]{1,3}")  # as de_DE and deu_Latn


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's tokenizer_config.json; {} where it is absent."""
    path = folder / TOKENIZER_CONFIG
    return read_json(path) if path.exists() else {}


def class_of(folder: Path) -> str:
    """Return the name of the tokenizer's class in transformers; "" if the folder names none."""
    name = read_tokenizer_config(folder).get("tokenizer_class")
    if name is None and (folder / CONFIG_FILE).exists():
        name = read_json(folder / CONFIG_FILE).get("tokenizer_class")
    return name.removesuffix("Fast") if isinstance(name, str) else ""


def special_tokens(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of each special token, by its names in `USUAL`."""
    tokens = {}
    for key, usual in USUAL.items():
        token = values.get(f"{key}_token") or usual
        tokens[key] = token.get("content") if isinstance(token, Mapping) else token
    return tokens


def special_ids(
    values: Mapping[str, Any], vocabulary: Mapping[str, int], path: Path, *keys: str
) -> dict[str, int]:
    """Return the ids of special tokens by their names in `USUAL`.

    Raises:
        InputError: The vocabulary lacks one.
    """
    tokens = special_tokens(values)
    for key in keys:
        if tokens[key] not in vocabulary:
            raise InputError(f"{path}: lacks the special token {tokens[key]!r:.60}; add it")
    return {key: vocabulary[tokens[key]] for key in keys}


def common_settings(
    values: Mapping[str, Any], vocabulary: Mapping[str, int], path: Path, config: TransformerConfig
) -> dict[str, Any]:
    """Return the settings that all kinds of tokenizers have, from tokenizer_config.json."""
    ids = special_ids(values, vocabulary, path, "pad", "eos", "unk")
    return {
        **{f"{key}_id": token_id for key, token_id in ids.items()},
        "bos_id": config.bos_id,
        "clean_up_spaces": bool(values.get("clean_up_tokenization_spaces")),
    }


def _json_content(folder: Path) -> bytes:
    """Return the tokenizer.json of a folder.

    Raises:
        InputError: It is missing; names the command that writes it.
    """
    from jax_transformer.tokenizers import read_files

    for name in (T5_MODEL, MODEL):  # from which transformers writes a tokenizer.json
        if (folder / name).exists() and not (folder / TOKENIZER_JSON).exists():
            raise InputError(
                f"{folder} has {name} but no {TOKENIZER_JSON}; write one with transformers: "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
    return read_files(folder, [TOKENIZER_JSON])[TOKENIZER_JSON]


def read_tokenizer_json(
    folder: Path,
    config: TransformerConfig,
    *,
    prefix: Sequence[str] = (),
    suffix: Sequence[str] | None = ("eos",),
    target_suffix: Sequence[str] | None = None,
    fit: Literal["padded", "cut"] | None = None,
    languages: Mapping[str, Any] | None = None,
) -> TokenizerJson:
    """Return the tokenizer in the tokenizer.json of a folder.

    Args:
        folder: The folder.
        config: The shape of the model; its start token is that of targets.
        prefix: Names in `USUAL` of the tokens before the text of a source and of a target.
        suffix: The same for the tokens after it; None for those of the file's own template.
        target_suffix: The same for the tokens after a target; None for those of a source.
        fit: Whether the model may have more ids than the file, because its table is padded, or
            may lack the file's last special tokens; None for neither.
        languages: Attributes of `Languages` except the ids, which are those of the file.

    Raises:
        InputError: The file is missing or damaged, or lacks a special token.
    """
    from jax_transformer.tokenizers import TokenizerJson

    content, path = _json_content(folder), folder / TOKENIZER_JSON
    values = read_tokenizer_config(folder)
    vocabulary = TokenizerJson.vocabulary(content, str(path))
    settings = common_settings(values, vocabulary, path, config)
    if suffix is None:
        usual = {token: key for key, token in special_tokens(values).items()}
        prefix, suffix = (
            [usual[token] for token in tokens if token in usual]
            for tokens in TokenizerJson.template(content, str(path))
        )
    if languages is None:
        settings |= affix_settings(values, vocabulary, path, (prefix, suffix), target_suffix)
    else:
        added = {token["content"] for token in json.loads(content)["added_tokens"]}
        codes = {token: vocabulary[token] for token in added if LANGUAGE.fullmatch(token)}
        codes = dict(sorted(codes.items(), key=lambda code: code[1]))
        settings["languages"] = language_settings(codes, values, path, **languages)
    settings |= size_settings(1 + max(vocabulary.values()), config, fit)
    return TokenizerJson(content, settings, str(path))


def size_settings(
    size: int, config: TransformerConfig, fit: Literal["padded", "cut"] | None
) -> dict[str, int]:
    """Return the number of ids of a model as a setting, where it is not that of the tokenizer.

    Args:
        size: Number of ids of the tokenizer.
        config: The shape of the model.
        fit: As for `read_tokenizer_json`.
    """
    fitting = {None: size, "padded": max(size, config.src_vocab_size)}
    fitting["cut"] = min(size, config.src_vocab_size)
    return {} if fitting[fit] == size else {"vocab_size": fitting[fit]}


def read_unigram(
    folder: Path,
    config: TransformerConfig,
    name: str,
    rule: Literal["t5", "mbart_50"],
    more_tokens: Sequence[str],
    *,
    fit: Literal["padded"] | None = None,
    languages: Mapping[str, Any] | None = None,
) -> SentencePieceUnigram:
    """Return the tokenizer in the sentencepiece model of a folder; EOS ends each line.

    Args:
        folder: The folder.
        config: The shape of the model; its start token is that of targets.
        name: The name of the sentencepiece model.
        rule: As for `SentencePieceUnigram`.
        more_tokens: Special tokens whose ids follow those of the pieces.
        fit: As for `read_tokenizer_json`.
        languages: Attributes of `Languages` except the ids, which are those of `more_tokens`.

    Raises:
        InputError: The file is missing or damaged, or lacks a special token.
    """
    from jax_transformer.tokenizers import SentencePieceUnigram, read_files
    from jax_transformer.tokenizers.sentencepiece_model import FAIRSEQ, read_model

    contents, path = read_files(folder, [name]), folder / name
    values, model = read_tokenizer_config(folder), read_model(contents[name], str(path))
    pieces = [model.id_to_piece(number) for number in range(model.get_piece_size())]
    if rule == "mbart_50":
        pieces = [*FAIRSEQ, *pieces[3:]]
    vocabulary = {token: number for number, token in enumerate([*pieces, *more_tokens])}
    settings = common_settings(values, vocabulary, path, config)
    if languages is None:
        settings |= affix_settings(values, vocabulary, path, ((), ["eos"]), None)
    else:
        codes = {token: vocabulary[token] for token in more_tokens if LANGUAGE.fullmatch(token)}
        settings["languages"] = language_settings(codes, values, path, **languages)
    tokens = special_tokens(values)
    named = [token for token in dict.fromkeys(tokens.values()) if token in vocabulary]
    settings |= {
        "rule": rule,
        "more_tokens": list(more_tokens),
        "special_tokens": [*named, *(token for token in more_tokens if token not in named)],
        "mask_token": tokens["mask"],
        **size_settings(len(vocabulary), config, fit),
    }
    return SentencePieceUnigram(contents, settings, str(folder))


def language_settings(
    ids: Mapping[str, int], values: Mapping[str, Any], path: Path, *, usual: str, **attributes: Any
) -> dict[str, Any]:
    """Return `Languages` as JSON, set to the languages in tokenizer_config.json.

    Args:
        ids: The id of each code.
        values: The content of tokenizer_config.json.
        path: The file that lists the codes.
        usual: The source's code where tokenizer_config.json has none.
        attributes: The other attributes of `Languages`.

    Raises:
        InputError: There are no codes, or a code of tokenizer_config.json is none of them.
    """
    from jax_transformer.tokenizers import Languages

    if not ids:
        raise InputError(
            f"{path}: has no language code among its added tokens; use the {path.name} that the "
            "model was published with"
        )
    languages = Languages(ids, **attributes, source=usual if usual in ids else None)
    try:
        languages = languages.changed(values.get("src_lang"), values.get("tgt_lang"))
    except InputError as error:
        raise InputError(f"{path.parent / TOKENIZER_CONFIG}: {error}") from error
    return languages.to_json()


def read_byte_level(
    folder: Path,
    config: TransformerConfig,
    *,
    prefix: Sequence[str] = (),
    suffix: Sequence[str] = (),
    target_suffix: Sequence[str] | None = None,
    add_prefix_space: bool = False,
    mask_takes_space: bool = False,
) -> ByteLevelTokenizer:
    """Return the tokenizer in the vocab.json and merges.txt of a folder.

    Args:
        folder: The folder.
        config: The shape of the model; its start token is that of targets.
        prefix: Names in `USUAL` of the tokens before the text of a source and of a target.
        suffix: The same for the tokens after it.
        target_suffix: The same for the tokens after a target; None for those of a source.
        add_prefix_space: Whether a line gets a space before it, where tokenizer_config.json does
            not say so.
        mask_takes_space: Whether the mask token includes the space before it, where
            tokenizer_config.json does not say so.

    Raises:
        InputError: A file is missing or damaged, or lacks a special token.
    """
    from jax_transformer.tokenizers import ByteLevelTokenizer, read_files
    from jax_transformer.tokenizers.sentencepiece_model import read_vocabulary

    contents, path = read_files(folder, [VOCABULARY, MERGES]), folder / VOCABULARY
    values, vocabulary = (
        read_tokenizer_config(folder),
        read_vocabulary(contents[VOCABULARY], str(path)),
    )
    tokens = special_tokens(values)
    settings = common_settings(values, vocabulary, path, config)
    settings |= affix_settings(values, vocabulary, path, (prefix, suffix), target_suffix)
    space, mask = values.get("add_prefix_space"), values.get("mask_token")
    if isinstance(mask, Mapping):
        mask_takes_space = bool(mask.get("lstrip"))
    settings |= {
        "special_tokens": list(dict.fromkeys(tokens.values())),
        "mask_token": tokens["mask"] if mask_takes_space else None,
        "add_prefix_space": add_prefix_space if space is None else bool(space),
    }
    added = [token for token in settings["special_tokens"] if token not in vocabulary]
    settings |= size_settings(1 + max(vocabulary.values()) + len(added), config, "cut")
    return ByteLevelTokenizer(contents, settings, str(folder))


def affix_settings(
    values: Mapping[str, Any],
    vocabulary: Mapping[str, int],
    path: Path,
    source: tuple[Sequence[str], Sequence[str]],
    target_suffix: Sequence[str] | None,
) -> dict[str, list[int]]:
    """Return the ids before and after the text of sources and of targets, as settings.

    Args:
        values: The content of tokenizer_config.json.
        vocabulary: The id of each token.
        path: The file of the vocabulary.
        source: Names in `USUAL` of the tokens before and after a source.
        target_suffix: The same for those after a target; None for those of a source.
    """
    prefix, suffix = source
    places = {
        "source_prefix": prefix,
        "source_suffix": suffix,
        "target_prefix": prefix,
        "target_suffix": suffix if target_suffix is None else target_suffix,
    }
    return {
        place: [*special_ids(values, vocabulary, path, *keys).values()]
        for place, keys in places.items()
    }
