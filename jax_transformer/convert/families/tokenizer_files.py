"""The tokenizers of the families: how a folder's files are read, and written for transformers.

Each constant is the tokenizer of one family or of several: `Family.tokenizer` names it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.families import language_codes
from jax_transformer.convert.families.tokenizer_settings import (
    MERGES,
    MODEL,
    T5_MODEL,
    TOKENIZER_JSON,
    VOCABULARY,
    class_of,
    common_settings,
    language_settings,
    read_byte_level,
    read_tokenizer_config,
    read_tokenizer_json,
    read_unigram,
    special_tokens,
)
from jax_transformer.errors import InputError

if TYPE_CHECKING:
    from jax_transformer.tokenizers import SentencePieceLanguages, SentencePieceTokenizer, Tokenizer


@dataclasses.dataclass(frozen=True)
class TokenizerFiles:
    """How a family's tokenizer is read and written.

    Attributes:
        kinds: The kinds of tokenizers in `TOKENIZERS` whose files the family's class reads.
        names: Returns the names of the tokenizer's own files in a folder, whether or not they are
            there.
        read: Returns the tokenizer of a folder, given the folder and the model's config. The
            languages are those of the folder.
        config: Returns the content of tokenizer_config.json with which transformers reads the
            files, for a tokenizer that comes from no folder; None where they need none.
    """

    kinds: tuple[str, ...]
    names: Callable[[Path], tuple[str, ...]]
    read: Callable[[Path, TransformerConfig], Tokenizer]
    config: Callable[[Any, TransformerConfig], dict[str, Any]] | None = None


def _json_names(folder: Path) -> tuple[str, ...]:
    return (TOKENIZER_JSON,)


def _written(
    tokenizer: Tokenizer, config: TransformerConfig, tokenizer_class: str, **values: Any
) -> dict[str, Any]:
    """Return the tokenizer_config.json of a class."""
    written = {
        "tokenizer_class": tokenizer_class,
        "clean_up_tokenization_spaces": tokenizer.settings().get("clean_up_spaces", False),
        "model_max_length": config.max_length,
        **values,
    }
    if tokenizer.languages is not None:
        written["src_lang"] = tokenizer.languages.source
        written["tgt_lang"] = tokenizer.languages.target
    return written


# Marian: two sentencepiece models and a vocabulary.


def _read_marian(folder: Path, config: TransformerConfig) -> SentencePieceTokenizer:
    from jax_transformer.tokenizers import SentencePieceTokenizer

    return SentencePieceTokenizer.load(folder, config.bos_id)


MARIAN = TokenizerFiles(
    kinds=("sentencepiece_vocabulary",),
    names=lambda folder: ("source.spm", "target.spm", VOCABULARY),
    read=_read_marian,
    config=lambda tokenizer, config: (
        tokenizer.tokenizer_config() | {"model_max_length": config.max_length}
    ),
)

# Pegasus, T5, mT5 and UMT5: tokenizer.json, EOS after the text.

PEGASUS = TokenizerFiles(
    kinds=("tokenizer_json",),
    names=_json_names,
    read=read_tokenizer_json,
    config=lambda tokenizer, config: _written(tokenizer, config, "PegasusTokenizer"),
)


def _t5_config(tokenizer: Tokenizer, config: TransformerConfig) -> dict[str, Any]:
    if tokenizer.kind == "tokenizer_json":
        added = json.loads(tokenizer.files()[TOKENIZER_JSON])["added_tokens"]
        tokens = [token["content"] for token in added]
    else:
        tokens = tokenizer.settings().get("more_tokens", [])
    extra_ids = sum(token.startswith("<extra_id_") for token in tokens)
    return _written(tokenizer, config, "T5Tokenizer", extra_ids=extra_ids)


def _t5_names(folder: Path) -> tuple[str, ...]:
    if (folder / T5_MODEL).exists() and not (folder / TOKENIZER_JSON).exists():
        return (T5_MODEL,)
    return (TOKENIZER_JSON,)


def _read_t5(folder: Path, config: TransformerConfig) -> Tokenizer:
    # The table is padded: t5-small has 32,128 rows for 32,100 tokens.
    if _t5_names(folder) == (TOKENIZER_JSON,):
        return read_tokenizer_json(folder, config, fit="padded")
    extra_ids = read_tokenizer_config(folder).get("extra_ids", 100)
    extra = [f"<extra_id_{number}>" for number in reversed(range(extra_ids))]
    return read_unigram(folder, config, T5_MODEL, "t5", extra, fit="padded")


T5 = TokenizerFiles(
    kinds=("tokenizer_json", "sentencepiece_unigram"),
    names=_t5_names,
    read=_read_t5,
    config=_t5_config,
)

# BART, MVP and Blenderbot: byte-level byte-pair encoding.


def _byte_level_names(folder: Path) -> tuple[str, ...]:
    if (folder / VOCABULARY).exists() and not (folder / TOKENIZER_JSON).exists():
        return (VOCABULARY, MERGES)
    return (TOKENIZER_JSON,)


def _byte_level_config(
    tokenizer: Tokenizer, config: TransformerConfig, tokenizer_class: str
) -> dict[str, Any]:
    """Return a tokenizer_config.json; transformers builds the rule of the first space by it."""
    space = tokenizer.settings().get("add_prefix_space", False)
    if tokenizer.kind == "tokenizer_json":
        rule = json.loads(tokenizer.files()[TOKENIZER_JSON])["pre_tokenizer"] or {}
        space = rule.get("add_prefix_space", False)
    return _written(tokenizer, config, tokenizer_class, add_prefix_space=space)


def _read_bart(folder: Path, config: TransformerConfig) -> Tokenizer:
    # RobertaTokenizer puts its own template in the place of the file's.
    affixes = {"prefix": ["cls"], "suffix": ["sep"]}
    if _byte_level_names(folder) == (TOKENIZER_JSON,):
        # The table of bart-large-cnn lacks the row of the last token, <mask>.
        return read_tokenizer_json(folder, config, **affixes, fit="cut")
    return read_byte_level(folder, config, **affixes)


def _read_blenderbot(folder: Path, config: TransformerConfig) -> Tokenizer:
    # BlenderbotTokenizer has the template of tokenizer.json, and without the file none. A target
    # always ends with EOS here: without it a model would not learn where to end.
    if _byte_level_names(folder) == (TOKENIZER_JSON,):
        return read_tokenizer_json(folder, config, suffix=None, target_suffix=["eos"], fit="cut")
    return read_byte_level(
        folder, config, target_suffix=["eos"], add_prefix_space=True, mask_takes_space=True
    )


BART = TokenizerFiles(
    kinds=("tokenizer_json", "byte_level"),
    names=_byte_level_names,
    read=_read_bart,
    config=lambda tokenizer, config: _byte_level_config(tokenizer, config, "RobertaTokenizer"),
)
MVP = BART
BLENDERBOT = TokenizerFiles(
    kinds=("tokenizer_json", "byte_level"),
    names=_byte_level_names,
    read=_read_blenderbot,
    config=lambda tokenizer, config: _byte_level_config(tokenizer, config, "BlenderbotTokenizer"),
)

# mBART: X </s> en_XX, and the target's code starts the decoder. mBART-50: en_XX X </s>, and the
# target's code is forced as the first token.


def _is_mbart_50(folder: Path) -> bool:
    """Return whether a folder of mBART has the tokenizer of mBART-50."""
    from jax_transformer.tokenizers import TokenizerJson, read_files

    name = class_of(folder)
    if name in ("MBartTokenizer", "MBart50Tokenizer"):
        return name == "MBart50Tokenizer"
    if (folder / TOKENIZER_JSON).exists():
        content = read_files(folder, [TOKENIZER_JSON])[TOKENIZER_JSON]
        vocabulary = TokenizerJson.vocabulary(content, str(folder / TOKENIZER_JSON))
        return set(language_codes.MBART_50) <= set(vocabulary)
    return False


def _mbart_names(folder: Path) -> tuple[str, ...]:
    # MBartTokenizer does not normalise text; the sentencepiece model does, as mBART was trained.
    is_json = (folder / TOKENIZER_JSON).exists() and _is_mbart_50(folder)
    return (MODEL,) if (folder / MODEL).exists() and not is_json else (TOKENIZER_JSON,)


def _read_mbart(folder: Path, config: TransformerConfig) -> Tokenizer:
    if _is_mbart_50(folder):
        languages = {"placement": "before", "usual": "en_XX"}
        if _mbart_names(folder) == (MODEL,):
            more = [*language_codes.MBART_50, "<mask>"]
            return read_unigram(folder, config, MODEL, "mbart_50", more, languages=languages)
    else:
        languages = {"placement": "after", "starts": True, "usual": "en_XX"}
        if _mbart_names(folder) == (MODEL,):
            return _read_mbart_model(folder, config, languages)
    return read_tokenizer_json(folder, config, languages=languages)


def _read_mbart_model(
    folder: Path, config: TransformerConfig, languages: Mapping[str, Any]
) -> SentencePieceLanguages:
    """Return mBART's tokenizer by its sentencepiece model: codes and <mask> follow the pieces."""
    from jax_transformer.tokenizers import SentencePieceLanguages, read_files
    from jax_transformer.tokenizers.sentencepiece_languages import fairseq_ids
    from jax_transformer.tokenizers.sentencepiece_model import FAIRSEQ

    contents, path = read_files(folder, [MODEL]), folder / MODEL
    values, vocabulary = read_tokenizer_config(folder), fairseq_ids(contents[MODEL], str(path))
    codes = {code: i for i, code in enumerate(language_codes.MBART, 1 + max(vocabulary.values()))}
    mask = 1 + max(codes.values())
    settings = common_settings(values, vocabulary, path, config)
    settings |= {
        "special_tokens": {
            **{token: i for i, token in enumerate(FAIRSEQ)},
            **codes,
            special_tokens(values)["mask"]: mask,
        },
        "vocab_size": mask + 1,
        "languages": language_settings(codes, values, path, **languages),
    }
    return SentencePieceLanguages(contents, settings, str(folder))


def _mbart_config(tokenizer: Tokenizer, config: TransformerConfig) -> dict[str, Any]:
    starts = tokenizer.languages is not None and tokenizer.languages.starts
    return _written(tokenizer, config, "MBartTokenizer" if starts else "MBart50Tokenizer")


MBART = TokenizerFiles(
    kinds=("tokenizer_json", "sentencepiece_languages", "sentencepiece_unigram"),
    names=_mbart_names,
    read=_read_mbart,
    config=_mbart_config,
)

# M2M100: __en__ X </s>. NLLB: eng_Latn X </s>, or X </s> eng_Latn with its legacy behaviour. Both
# have padded tables, and the target's code is forced as the first token.


def _is_nllb(folder: Path) -> bool:
    """Return whether a folder of M2M100 has the tokenizer of NLLB."""
    name = class_of(folder)
    if name in ("M2M100Tokenizer", "NllbTokenizer"):
        return name == "NllbTokenizer"
    return not (folder / VOCABULARY).exists()


def _m2m100_names(folder: Path) -> tuple[str, ...]:
    return (TOKENIZER_JSON,) if _is_nllb(folder) else (MODEL, VOCABULARY)


def _read_m2m100(folder: Path, config: TransformerConfig) -> Tokenizer:
    if _is_nllb(folder):
        if (folder / MODEL).exists() and not (folder / TOKENIZER_JSON).exists():
            raise InputError(
                f"{folder} has {MODEL} but no {TOKENIZER_JSON}, which lists the ids of the "
                "language codes; fetch this file too"
            )
        legacy = bool(read_tokenizer_config(folder).get("legacy_behaviour"))
        languages = {"placement": "after" if legacy else "before", "usual": "eng_Latn"}
        return read_tokenizer_json(folder, config, fit="padded", languages=languages)
    return _read_m2m100_model(folder, config)


def _read_m2m100_model(folder: Path, config: TransformerConfig) -> SentencePieceLanguages:
    """Return the tokenizer of M2M100: the codes follow vocab.json."""
    from jax_transformer.tokenizers import SentencePieceLanguages, read_files
    from jax_transformer.tokenizers.sentencepiece_model import read_vocabulary

    contents, path = read_files(folder, [MODEL, VOCABULARY]), folder / VOCABULARY
    values = read_tokenizer_config(folder)
    vocabulary = read_vocabulary(contents[VOCABULARY], str(path))
    which = values.get("language_codes", "m2m100")
    if which not in language_codes.M2M100:
        raise InputError(
            f"{folder}: language_codes={which!r:.40} must be one of "
            f"{', '.join(language_codes.M2M100)}"
        )
    codes = {code: i for i, code in enumerate(language_codes.M2M100[which], len(vocabulary))}
    settings = common_settings(values, vocabulary, path, config)
    special = {token for token in special_tokens(values).values() if token in vocabulary}
    settings |= {
        "special_tokens": {token: vocabulary[token] for token in sorted(special)}
        | {f"__{code}__": token_id for code, token_id in codes.items()},
        "vocab_size": config.src_vocab_size,
        "languages": language_settings(codes, values, path, placement="before", usual="en"),
    }
    return SentencePieceLanguages(contents, settings, str(folder))


def _m2m100_config(tokenizer: Tokenizer, config: TransformerConfig) -> dict[str, Any]:
    languages = tokenizer.languages
    if tokenizer.kind == "tokenizer_json":
        legacy = languages is not None and languages.placement == "after"
        return _written(tokenizer, config, "NllbTokenizer", legacy_behaviour=legacy)
    tokens = [f"__{code}__" for code in languages.ids]
    which = [name for name, codes in language_codes.M2M100.items() if codes == (*languages.ids,)]
    return _written(
        tokenizer,
        config,
        "M2M100Tokenizer",
        language_codes=which[0],
        additional_special_tokens=tokens,
    )


M2M100 = TokenizerFiles(
    kinds=("tokenizer_json", "sentencepiece_languages"),
    names=_m2m100_names,
    read=_read_m2m100,
    config=_m2m100_config,
)
