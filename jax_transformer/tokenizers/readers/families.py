"""The tokenizers of the families: how a folder's files are read, and written for transformers."""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import InputError
from jax_transformer.tokenizers.readers.family_settings import (
    M2M100_CODES,
    MBART_50_CODES,
    MBART_CODES,
    LanguageRule,
    class_of,
    codes_in,
    family_settings,
    read_tokenizer_config,
    special_tokens,
)
from jax_transformer.tokenizers.readers.library import (
    BYTE_LEVEL,
    TOKENIZER_JSON,
    UNIGRAM,
    library_of,
    parse,
    template,
)
from jax_transformer.tokenizers.readers.model_files import (
    FAIRSEQ,
    MBART_MODEL,
    MERGES,
    T5_MODEL,
    TOKENIZER_FILE,
    VOCABULARY,
    read_files,
    read_vocabulary,
)
from jax_transformer.tokenizers.readers.sentencepiece import (
    FILES,
    SENTENCEPIECE,
    fairseq_ids,
    marian_config,
    read_marian,
    read_sentencepiece,
)
from jax_transformer.tokenizers.segmenters import LibrarySegmenter
from jax_transformer.tokenizers.tokenizer import Tokenizer

Reader = Callable[[Path, TransformerConfig], Tokenizer]


@dataclasses.dataclass(frozen=True)
class FamilyTokenizer:
    """How a family's tokenizer is read and written."""

    kinds: tuple[str, ...]  # in `READERS`, whose files the family's class in transformers reads
    # The readers for a folder by the names of their files: the first whose first file is there.
    readers: Callable[[Path], Mapping[tuple[str, ...], Reader]]
    # What tokenizer_config.json must say for a tokenizer that comes from no folder.
    settings: Callable[[Tokenizer], dict[str, Any]] | None = None

    def names(self, folder: Path) -> tuple[str, ...]:
        """Return the names of the tokenizer's files in a folder, present or not."""
        names = [*self.readers(folder)]
        return next((files for files in names if (folder / files[0]).exists()), names[0])

    def read(self, folder: Path, config: TransformerConfig) -> Tokenizer:
        """Return the tokenizer of a folder; its languages are those of the folder."""
        return self.readers(folder)[self.names(folder)](folder, config)

    def config(self, tokenizer: Tokenizer, config: TransformerConfig) -> dict[str, Any]:
        """Return the content of tokenizer_config.json; empty if the files need none."""
        if self.settings is None:
            return {}
        written = {
            "clean_up_tokenization_spaces": tokenizer.target.clean_up_spaces,
            "model_max_length": config.max_length,
            **self.settings(tokenizer),
        }
        if tokenizer.languages is not None:
            written["src_lang"] = tokenizer.languages.source
            written["tgt_lang"] = tokenizer.languages.target
        return written


def _read(
    folder: Path,
    config: TransformerConfig,
    kind: str,
    names: Sequence[str],
    splitting: Mapping[str, Any],
    *,
    rule: LanguageRule | None = None,
    by_template: bool = False,
    **options: Any,
) -> Tokenizer:
    """Return the tokenizer in files that the library tokenizers splits by some settings.

    Args:
        by_template: Whether the affixes of sources are those of the file's own template.
        options: Those of `family_settings`; language codes are those of the files.
    """
    contents, path = read_files(folder, names), folder / names[0]
    library = library_of(kind, contents, splitting, str(folder))
    vocabulary = library.get_vocab(with_added_tokens=True)
    if by_template:
        tokens = special_tokens(read_tokenizer_config(folder))
        usual = {token: key for key, token in tokens.items()}
        options["prefix"], options["suffix"] = (
            [usual[token] for token in tokens if token in usual] for tokens in template(library)
        )
    if rule is not None:
        added = [token.content for token in library.get_added_tokens_decoder().values()]
        options |= {"codes": codes_in(vocabulary, added), "rule": rule}
    settings = splitting | family_settings(path, vocabulary, config, **options)
    return Tokenizer.build(kind, contents, settings, str(folder), (LibrarySegmenter(library),) * 2)


def _read_json(folder: Path, config: TransformerConfig, **options: Any) -> Tokenizer:
    """Return the tokenizer in the tokenizer.json of a folder; options are those of `_read`."""
    if (folder / T5_MODEL).exists() and not (folder / TOKENIZER_FILE).exists():
        raise InputError(
            f"{folder} has {T5_MODEL} but no {TOKENIZER_FILE}; write one with transformers: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    return _read(folder, config, TOKENIZER_JSON, [TOKENIZER_FILE], {}, **options)


def _read_model(
    folder: Path, config: TransformerConfig, name: str, more_tokens: Sequence[str], **options: Any
) -> Tokenizer:
    """Return the tokenizer in a sentencepiece model; the ids of `more_tokens` follow."""
    tokens = special_tokens(read_tokenizer_config(folder))
    splitting = {
        "rule": "t5" if name == T5_MODEL else "mbart_50",
        "more_tokens": list(more_tokens),
        "special_tokens": list(dict.fromkeys([*tokens.values(), *more_tokens])),
        "mask_token": tokens["mask"],
    }
    return _read(folder, config, UNIGRAM, [name], splitting, **options)


MARIAN = FamilyTokenizer(
    kinds=(SENTENCEPIECE,),
    readers=lambda folder: {FILES["marian"]: read_marian},
    settings=marian_config,
)

# Pegasus, T5, mT5 and UMT5: EOS after the text.

PEGASUS = FamilyTokenizer(
    kinds=(TOKENIZER_JSON,),
    readers=lambda folder: {(TOKENIZER_FILE,): _read_json},
    settings=lambda tokenizer: {"tokenizer_class": "PegasusTokenizer"},
)


def _read_t5_model(folder: Path, config: TransformerConfig) -> Tokenizer:
    extra_ids = read_tokenizer_config(folder).get("extra_ids", 100)
    extra = [f"<extra_id_{number}>" for number in reversed(range(extra_ids))]
    return _read_model(folder, config, T5_MODEL, extra, fit="padded")


def _t5_settings(tokenizer: Tokenizer) -> dict[str, Any]:
    added = tokenizer.target.segmenter.library.get_added_tokens_decoder().values()
    extra_ids = sum(token.content.startswith("<extra_id_") for token in added)
    return {"tokenizer_class": "T5Tokenizer", "extra_ids": extra_ids}


T5 = FamilyTokenizer(
    kinds=(TOKENIZER_JSON, UNIGRAM),
    readers=lambda folder: {
        # The table is padded: t5-small has 32,128 rows for 32,100 tokens.
        (TOKENIZER_FILE,): functools.partial(_read_json, fit="padded"),
        (T5_MODEL,): _read_t5_model,
    },
    settings=_t5_settings,
)

# BART, MVP and Blenderbot: byte-level byte-pair encoding. The table of bart-large-cnn lacks the row
# of the last token, <mask>.


def _read_byte_level(
    folder: Path, config: TransformerConfig, *, spaces: bool, **options: Any
) -> Tokenizer:
    """Return the tokenizer in the vocab.json and merges.txt of a folder.

    Without tokenizer_config.json, `spaces` decides whether a line gets a space before it, and
    whether the mask token includes one.
    """
    values = read_tokenizer_config(folder)
    tokens = special_tokens(values)
    space, mask = values.get("add_prefix_space"), values.get("mask_token")
    takes_space = bool(mask.get("lstrip")) if isinstance(mask, Mapping) else spaces
    splitting = {
        "special_tokens": list(dict.fromkeys(tokens.values())),
        "mask_token": tokens["mask"] if takes_space else None,
        "add_prefix_space": spaces if space is None else bool(space),
    }
    names = [VOCABULARY, MERGES]
    return _read(folder, config, BYTE_LEVEL, names, splitting, fit="cut", **options)


def _byte_level_settings(tokenizer_class: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return also the rule of the first space, by which transformers builds its own."""
    rule = json.loads(tokenizer.target.segmenter.library.to_str())["pre_tokenizer"] or {}
    space = rule.get("add_prefix_space", False)
    return {"tokenizer_class": tokenizer_class, "add_prefix_space": space}


# RobertaTokenizer puts its own template in the place of the file's.
_ROBERTA = {"prefix": ["cls"], "suffix": ["sep"]}
BART = FamilyTokenizer(
    kinds=(TOKENIZER_JSON, BYTE_LEVEL),
    readers=lambda folder: {
        (TOKENIZER_FILE,): functools.partial(_read_json, fit="cut", **_ROBERTA),
        (VOCABULARY, MERGES): functools.partial(_read_byte_level, spaces=False, **_ROBERTA),
    },
    settings=functools.partial(_byte_level_settings, "RobertaTokenizer"),
)
# BlenderbotTokenizer has the template of tokenizer.json, and without the file none. A target always
# ends with EOS here: without it a model would not learn where to end.
_END = {"target_suffix": ["eos"]}
BLENDERBOT = FamilyTokenizer(
    kinds=BART.kinds,
    readers=lambda folder: {
        (TOKENIZER_FILE,): functools.partial(_read_json, by_template=True, fit="cut", **_END),
        (VOCABULARY, MERGES): functools.partial(_read_byte_level, spaces=True, suffix=[], **_END),
    },
    settings=functools.partial(_byte_level_settings, "BlenderbotTokenizer"),
)

# mBART: X </s> en_XX, and the target's code starts the decoder. mBART-50: en_XX X </s>, and the
# target's code is forced as the first token.


def _is_mbart_50(folder: Path) -> bool:
    """Return whether a folder of mBART has the tokenizer of mBART-50."""
    name = class_of(folder)
    if name in ("MBartTokenizer", "MBart50Tokenizer"):
        return name == "MBart50Tokenizer"
    if (folder / TOKENIZER_FILE).exists():
        content = read_files(folder, [TOKENIZER_FILE])[TOKENIZER_FILE]
        vocabulary = parse(content, str(folder / TOKENIZER_FILE)).get_vocab()
        return set(MBART_50_CODES) <= set(vocabulary)
    return False


def _mbart_readers(folder: Path) -> dict[tuple[str, ...], Reader]:
    if _is_mbart_50(folder):
        rule = LanguageRule("before", "en_XX")
        more_tokens = [*MBART_50_CODES, "<mask>"]
        return {
            (TOKENIZER_FILE,): functools.partial(_read_json, rule=rule),
            (MBART_MODEL,): functools.partial(
                _read_model, name=MBART_MODEL, more_tokens=more_tokens, rule=rule
            ),
        }
    # MBartTokenizer does not normalise text; the sentencepiece model does, as mBART was trained.
    rule = LanguageRule("after", "en_XX", starts=True)
    return {
        (MBART_MODEL,): functools.partial(_read_mbart_model, rule=rule),
        (TOKENIZER_FILE,): functools.partial(_read_json, rule=rule),
    }


def _read_mbart_model(folder: Path, config: TransformerConfig, rule: LanguageRule) -> Tokenizer:
    """Return the tokenizer of a model whose codes and <mask> follow the pieces."""
    contents, path = read_files(folder, [MBART_MODEL]), folder / MBART_MODEL
    vocabulary = fairseq_ids(contents[MBART_MODEL], str(path))
    codes = {code: i for i, code in enumerate(MBART_CODES, 1 + max(vocabulary.values()))}
    mask = {special_tokens(read_tokenizer_config(folder))["mask"]: 1 + max(codes.values())}
    settings = family_settings(path, vocabulary, config, codes=codes, rule=rule)
    fairseq = {token: i for i, token in enumerate(FAIRSEQ)}
    settings |= {"rule": "mbart", "added_tokens": {**fairseq, **codes, **mask}}
    return read_sentencepiece(contents, settings, str(folder))


def _mbart_settings(tokenizer: Tokenizer) -> dict[str, Any]:
    starts = tokenizer.languages is not None and tokenizer.languages.starts
    return {"tokenizer_class": "MBartTokenizer" if starts else "MBart50Tokenizer"}


MBART = FamilyTokenizer(
    kinds=(TOKENIZER_JSON, SENTENCEPIECE, UNIGRAM), readers=_mbart_readers, settings=_mbart_settings
)

# M2M100: __en__ X </s>. NLLB: eng_Latn X </s>, or X </s> eng_Latn with its legacy behaviour. Both
# have padded tables, and the target's code is forced as the first token.


def _is_nllb(folder: Path) -> bool:
    """Return whether a folder of M2M100 has the tokenizer of NLLB."""
    name = class_of(folder)
    if name in ("M2M100Tokenizer", "NllbTokenizer"):
        return name == "NllbTokenizer"
    return not (folder / VOCABULARY).exists()


def _read_nllb(folder: Path, config: TransformerConfig) -> Tokenizer:
    if (folder / MBART_MODEL).exists() and not (folder / TOKENIZER_FILE).exists():
        raise InputError(
            f"{folder} has {MBART_MODEL} but no {TOKENIZER_FILE}, which lists the ids of the "
            "language codes; fetch this file too"
        )
    is_legacy = read_tokenizer_config(folder).get("legacy_behaviour")
    rule = LanguageRule("after" if is_legacy else "before", "eng_Latn")
    return _read_json(folder, config, fit="padded", rule=rule)


def _read_m2m100(folder: Path, config: TransformerConfig) -> Tokenizer:
    """Return the tokenizer of a folder in which the codes follow vocab.json."""
    values = read_tokenizer_config(folder)
    contents, path = read_files(folder, [MBART_MODEL, VOCABULARY]), folder / VOCABULARY
    vocabulary = read_vocabulary(contents[VOCABULARY], str(path))
    which = values.get("language_codes", "m2m100")
    if which not in M2M100_CODES:
        raise InputError(
            f"{folder}: language_codes={which!r:.40} must be one of {', '.join(M2M100_CODES)}"
        )
    codes = {code: i for i, code in enumerate(M2M100_CODES[which], len(vocabulary))}
    rule = LanguageRule("before", "en")
    settings = family_settings(path, vocabulary, config, codes=codes, rule=rule)
    special = {token for token in special_tokens(values).values() if token in vocabulary}
    settings |= {
        "rule": "m2m_100",
        "added_tokens": {token: vocabulary[token] for token in sorted(special)}
        | {f"__{code}__": token_id for code, token_id in codes.items()},
        "vocab_size": config.src_vocab_size,
    }
    return read_sentencepiece(contents, settings, str(folder))


def _m2m100_settings(tokenizer: Tokenizer) -> dict[str, Any]:
    languages = tokenizer.languages
    if tokenizer.kind == TOKENIZER_JSON:
        legacy = languages is not None and languages.placement == "after"
        return {"tokenizer_class": "NllbTokenizer", "legacy_behaviour": legacy}
    which = [name for name, codes in M2M100_CODES.items() if codes == (*languages.ids,)]
    return {
        "tokenizer_class": "M2M100Tokenizer",
        "language_codes": which[0],
        "additional_special_tokens": [f"__{code}__" for code in languages.ids],
    }


M2M100 = FamilyTokenizer(
    kinds=(TOKENIZER_JSON, SENTENCEPIECE),
    readers=lambda folder: (
        {(TOKENIZER_FILE,): _read_nllb}
        if _is_nllb(folder)
        else {(MBART_MODEL, VOCABULARY): _read_m2m100}
    ),
    settings=_m2m100_settings,
)

# By the names that `Family.tokenizer` has.
FAMILIES = {
    "marian": MARIAN,
    "pegasus": PEGASUS,
    "t5": T5,
    "bart": BART,
    "blenderbot": BLENDERBOT,
    "mbart": MBART,
    "m2m_100": M2M100,
}
