"""The tokenizers of the families: how a folder's files are read, and written for transformers."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import InputError
from jax_transformer.tokenizers.readers import language_codes
from jax_transformer.tokenizers.readers.family_settings import (
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
from jax_transformer.tokenizers.readers.marian import marian_config, read_marian
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
    read_sentencepiece,
)
from jax_transformer.tokenizers.segmenters import LibrarySegmenter
from jax_transformer.tokenizers.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class FamilyTokenizer:
    """How a family's tokenizer is read and written.

    Attributes:
        kinds: The kinds in `READERS` whose files the family's class in transformers reads.
        names: Returns the names of the tokenizer's files in a folder, present or not.
        read: Returns the tokenizer of a folder; its languages are those of the folder.
        settings: Returns what tokenizer_config.json must say for a tokenizer that comes from no
            folder; None where transformers needs nothing.
    """

    kinds: tuple[str, ...]
    names: Callable[[Path], tuple[str, ...]]
    read: Callable[[Path, TransformerConfig], Tokenizer]
    settings: Callable[[Tokenizer], dict[str, Any]] | None = None

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


def _names_without_json(*names: str) -> Callable[[Path], tuple[str, ...]]:
    """Return a function that names these files where there is no tokenizer.json."""

    def chosen(folder: Path) -> tuple[str, ...]:
        has_json = (folder / TOKENIZER_FILE).exists()
        return names if (folder / names[0]).exists() and not has_json else (TOKENIZER_FILE,)

    return chosen


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
    """Return the tokenizer in files that the library tokenizers splits.

    Args:
        splitting: Settings that decide how text is split.
        rule: As for `family_settings`; the codes are those of the files.
        by_template: Whether the affixes of sources are those of the file's own template.
        options: The other options of `family_settings`.
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
    for name in (T5_MODEL, MBART_MODEL):  # from which transformers writes a tokenizer.json
        if (folder / name).exists() and not (folder / TOKENIZER_FILE).exists():
            raise InputError(
                f"{folder} has {name} but no {TOKENIZER_FILE}; write one with transformers: "
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
    names=lambda folder: FILES["marian"],
    read=read_marian,
    settings=marian_config,
)

# Pegasus, T5, mT5 and UMT5: EOS after the text.

PEGASUS = FamilyTokenizer(
    kinds=(TOKENIZER_JSON,),
    names=lambda folder: (TOKENIZER_FILE,),
    read=_read_json,
    settings=lambda tokenizer: {"tokenizer_class": "PegasusTokenizer"},
)
_t5_names = _names_without_json(T5_MODEL)


def _read_t5(folder: Path, config: TransformerConfig) -> Tokenizer:
    # The table is padded: t5-small has 32,128 rows for 32,100 tokens.
    if _t5_names(folder) == (TOKENIZER_FILE,):
        return _read_json(folder, config, fit="padded")
    extra_ids = read_tokenizer_config(folder).get("extra_ids", 100)
    extra = [f"<extra_id_{number}>" for number in reversed(range(extra_ids))]
    return _read_model(folder, config, T5_MODEL, extra, fit="padded")


def _t5_settings(tokenizer: Tokenizer) -> dict[str, Any]:
    added = tokenizer.target.segmenter.library.get_added_tokens_decoder().values()
    extra_ids = sum(token.content.startswith("<extra_id_") for token in added)
    return {"tokenizer_class": "T5Tokenizer", "extra_ids": extra_ids}


T5 = FamilyTokenizer((TOKENIZER_JSON, UNIGRAM), _t5_names, _read_t5, _t5_settings)

# BART, MVP and Blenderbot: byte-level byte-pair encoding.

_byte_level_names = _names_without_json(VOCABULARY, MERGES)


def _read_byte_level(
    folder: Path, config: TransformerConfig, *, spaces: bool, **options: Any
) -> Tokenizer:
    """Return the tokenizer in the vocab.json and merges.txt of a folder.

    Where tokenizer_config.json does not say so, `spaces` decides whether a line gets a space before
    it, and whether the mask token includes the space before it.
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


def _read_bart(folder: Path, config: TransformerConfig) -> Tokenizer:
    # RobertaTokenizer puts its own template in the place of the file's.
    affixes = {"prefix": ["cls"], "suffix": ["sep"]}
    if _byte_level_names(folder) == (TOKENIZER_FILE,):
        # The table of bart-large-cnn lacks the row of the last token, <mask>.
        return _read_json(folder, config, **affixes, fit="cut")
    return _read_byte_level(folder, config, spaces=False, **affixes)


def _read_blenderbot(folder: Path, config: TransformerConfig) -> Tokenizer:
    # BlenderbotTokenizer has the template of tokenizer.json, and without the file none. A target
    # always ends with EOS here: without it a model would not learn where to end.
    end = ["eos"]
    if _byte_level_names(folder) == (TOKENIZER_FILE,):
        return _read_json(folder, config, by_template=True, target_suffix=end, fit="cut")
    return _read_byte_level(folder, config, spaces=True, suffix=[], target_suffix=end)


def _prefix_space(tokenizer: Tokenizer) -> dict[str, bool]:
    """Return the rule of the first space, by which transformers builds its own."""
    rule = json.loads(tokenizer.target.segmenter.library.to_str())["pre_tokenizer"] or {}
    return {"add_prefix_space": rule.get("add_prefix_space", False)}


BART = FamilyTokenizer(
    kinds=(TOKENIZER_JSON, BYTE_LEVEL),
    names=_byte_level_names,
    read=_read_bart,
    settings=lambda tokenizer: {
        "tokenizer_class": "RobertaTokenizer",
        **_prefix_space(tokenizer),
    },
)
BLENDERBOT = dataclasses.replace(
    BART,
    read=_read_blenderbot,
    settings=lambda tokenizer: {
        "tokenizer_class": "BlenderbotTokenizer",
        **_prefix_space(tokenizer),
    },
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
        return set(language_codes.MBART_50) <= set(vocabulary)
    return False


def _mbart_names(folder: Path) -> tuple[str, ...]:
    # MBartTokenizer does not normalise text; the sentencepiece model does, as mBART was trained.
    is_json = (folder / TOKENIZER_FILE).exists() and _is_mbart_50(folder)
    return (MBART_MODEL,) if (folder / MBART_MODEL).exists() and not is_json else (TOKENIZER_FILE,)


def _read_mbart(folder: Path, config: TransformerConfig) -> Tokenizer:
    is_mbart_50, is_json = _is_mbart_50(folder), _mbart_names(folder) == (TOKENIZER_FILE,)
    rule = LanguageRule("after", "en_XX", starts=True)
    if is_mbart_50:
        rule = LanguageRule("before", "en_XX")
    if is_json:
        return _read_json(folder, config, rule=rule)
    if is_mbart_50:
        more_tokens = [*language_codes.MBART_50, "<mask>"]
        return _read_model(folder, config, MBART_MODEL, more_tokens, rule=rule)
    # The codes and <mask> follow the pieces.
    contents, path = read_files(folder, [MBART_MODEL]), folder / MBART_MODEL
    vocabulary = fairseq_ids(contents[MBART_MODEL], str(path))
    codes = {code: i for i, code in enumerate(language_codes.MBART, 1 + max(vocabulary.values()))}
    mask = {special_tokens(read_tokenizer_config(folder))["mask"]: 1 + max(codes.values())}
    settings = family_settings(path, vocabulary, config, codes=codes, rule=rule)
    fairseq = {token: i for i, token in enumerate(FAIRSEQ)}
    settings |= {"rule": "mbart", "added_tokens": {**fairseq, **codes, **mask}}
    return read_sentencepiece(contents, settings, str(folder))


def _mbart_settings(tokenizer: Tokenizer) -> dict[str, Any]:
    starts = tokenizer.languages is not None and tokenizer.languages.starts
    return {"tokenizer_class": "MBartTokenizer" if starts else "MBart50Tokenizer"}


MBART = FamilyTokenizer(
    (TOKENIZER_JSON, SENTENCEPIECE, UNIGRAM), _mbart_names, _read_mbart, _mbart_settings
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
    return (TOKENIZER_FILE,) if _is_nllb(folder) else (MBART_MODEL, VOCABULARY)


def _read_m2m100(folder: Path, config: TransformerConfig) -> Tokenizer:
    values = read_tokenizer_config(folder)
    if _is_nllb(folder):
        if (folder / MBART_MODEL).exists() and not (folder / TOKENIZER_FILE).exists():
            raise InputError(
                f"{folder} has {MBART_MODEL} but no {TOKENIZER_FILE}, which lists the ids of the "
                "language codes; fetch this file too"
            )
        rule = LanguageRule("after" if values.get("legacy_behaviour") else "before", "eng_Latn")
        return _read_json(folder, config, fit="padded", rule=rule)
    # The codes follow vocab.json.
    contents, path = read_files(folder, [MBART_MODEL, VOCABULARY]), folder / VOCABULARY
    vocabulary = read_vocabulary(contents[VOCABULARY], str(path))
    which = values.get("language_codes", "m2m100")
    if which not in language_codes.M2M100:
        raise InputError(
            f"{folder}: language_codes={which!r:.40} must be one of "
            f"{', '.join(language_codes.M2M100)}"
        )
    codes = {code: i for i, code in enumerate(language_codes.M2M100[which], len(vocabulary))}
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
    which = [name for name, codes in language_codes.M2M100.items() if codes == (*languages.ids,)]
    return {
        "tokenizer_class": "M2M100Tokenizer",
        "language_codes": which[0],
        "additional_special_tokens": [f"__{code}__" for code in languages.ids],
    }


M2M100 = FamilyTokenizer(
    (TOKENIZER_JSON, SENTENCEPIECE), _m2m100_names, _read_m2m100, _m2m100_settings
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
