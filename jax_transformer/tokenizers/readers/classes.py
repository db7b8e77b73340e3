"""The classes of tokenizers in transformers: how a folder is read, and written for transformers.

The class that a folder names decides; if it names none, the usual class of the model's family. A
class that is unknown here, or that splits text as its tokenizer.json says, is read by that file.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import InputError
from jax_transformer.tokenizers.readers.class_settings import (
    FLAGS,
    M2M100_CODES,
    MBART_50_CODES,
    MBART_CODES,
    TOKENIZER_CONFIG,
    USUAL,
    LanguageRule,
    class_of,
    class_settings,
    codes_in,
    read_tokenizer_config,
    special_tokens,
    tokens_to_add,
)
from jax_transformer.tokenizers.readers.library import (
    BYTE_LEVEL,
    BYTES,
    PEGASUS_SPECIAL,
    TOKENIZER_JSON,
    UNIGRAM,
    WORD_PIECE,
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
    WORD_PIECES,
    read_files,
    read_vocabulary,
)
from jax_transformer.tokenizers.readers.sentencepiece import (
    FILES,
    SENTENCEPIECE,
    added_settings,
    fairseq_ids,
    read_marian,
    read_sentencepiece,
    written_tokens,
)
from jax_transformer.tokenizers.segmenters import LibrarySegmenter
from jax_transformer.tokenizers.tokenizer import Tokenizer

Reader = Callable[[Path, TransformerConfig], Tokenizer]


@dataclasses.dataclass(frozen=True)
class TokenizerClass:
    """How the tokenizer of a class is read and written."""

    # The readers by the names of their files: the first whose first file is there.
    readers: Mapping[tuple[str, ...], Reader]
    # What tokenizer_config.json must say for a tokenizer that comes from no folder.
    settings: Callable[[Tokenizer], dict[str, Any]] | None = None
    kinds: tuple[str, ...] = ()  # in `READERS`, of tokenizers of no class that it can be given

    def names(self, folder: Path) -> tuple[str, ...]:
        """Return the names of the tokenizer's files in a folder, present or not."""
        files = [*self.readers]
        return next((names for names in files if (folder / (*names, "")[0]).exists()), files[0])


# Classes of the library tokenizers.


class Rules(NamedTuple):
    """How a class of the library tokenizers reads lines."""

    split: str | None = None  # how text is split, a name in `SPLITTING`; None as the file says
    # Keys of tokenizer_config.json that decide how, and what an absent one means.
    options: Mapping[str, bool | None] = MappingProxyType({})
    more_tokens: Sequence[str] = ()  # behind the vocabulary of a sentencepiece model
    # Special tokens that tokenizer_config.json need not name: by their names, and without names.
    usual: Mapping[str, Any] = USUAL
    unnamed: Sequence[str] = ()
    # What surrounds a line: tokens by their names in `USUAL`, the ids of the file's own template,
    # or the language codes that are among the added tokens.
    prefix: Sequence[str] = ()
    suffix: Sequence[str] = ("eos",)
    by_template: bool = False
    bare_targets: bool = False  # the prefix is the decoder's start token, which is no label
    languages: LanguageRule | None = None


def _read(
    folder: Path, config: TransformerConfig, *, kind: str, names: Sequence[str], rules: Rules
) -> Tokenizer:
    """Return the tokenizer in the files of a kind."""
    values = read_tokenizer_config(folder)
    said = {key: values[key] for key in rules.options if isinstance(values.get(key), bool)}
    splitting = {
        "rule": rules.split,
        "options": {**rules.options, **said},
        "more_tokens": [*rules.more_tokens],
        "tokens": tokens_to_add(values, rules.usual, rules.unnamed),
    }
    contents, path = read_files(folder, names), folder / (*names, TOKENIZER_CONFIG)[0]
    library = library_of(kind, contents, splitting, str(folder))
    vocabulary = library.get_vocab(with_added_tokens=True)
    added = [token.content for token in library.get_added_tokens_decoder().values()]
    settings = splitting | class_settings(
        path,
        vocabulary,
        config,
        usual=rules.usual,
        prefix=rules.prefix,
        suffix=rules.suffix,
        template=template(library) if rules.by_template else None,
        codes=codes_in(vocabulary, added),
        rule=rules.languages,
    )
    settings["special_tokens"] = special_tokens(values, rules.usual)
    if rules.bare_targets:
        settings["target_prefix"] = []
    return Tokenizer.build(kind, contents, settings, str(folder), (LibrarySegmenter(library),) * 2)


def _written(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what tokenizer_config.json says of how text is split, and of the added tokens."""
    named = tokenizer.settings.get("special_tokens", {})
    added = tokenizer.target.segmenter.library.get_added_tokens_decoder()
    return {
        **tokenizer.settings.get("options", {}),
        **{f"{key}_token": token for key, token in named.items()},
        "added_tokens_decoder": {
            str(i): {"content": token.content} | {flag: getattr(token, flag) for flag in FLAGS}
            for i, token in added.items()
        },
    }


def _library_class(
    *formats: tuple[str, tuple[str, ...]],
    settings: Callable[[Tokenizer], dict[str, Any]] = _written,
    read: Callable[..., Tokenizer] = _read,
    **rules: Any,
) -> TokenizerClass:
    """Return a class with these `Rules`, in one of several formats: the first that is there."""
    readers = {
        names: functools.partial(read, kind=kind, names=names, rules=Rules(**rules))
        for kind, names in formats
    }
    return TokenizerClass(readers, settings, tuple(kind for kind, _ in formats))


_JSON, _BYTE_LEVEL = (TOKENIZER_JSON, (TOKENIZER_FILE,)), (BYTE_LEVEL, (VOCABULARY, MERGES))


def _read_alone(folder: Path, config: TransformerConfig, **options: Any) -> Tokenizer:
    """Return the tokenizer in a tokenizer.json, whatever the class: the file says everything."""
    if not (folder / TOKENIZER_FILE).exists():
        name = class_of(folder) or "a tokenizer without tokenizer_class"
        raise InputError(
            f"{folder} has no {TOKENIZER_FILE}, and this library cannot read the other files of "
            f"{name}; write it with transformers, where the class can: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    return _read(folder, config, **options)


PLAIN = _library_class(_JSON, read=_read_alone, by_template=True, usual={})

# T5, ByT5 and Pegasus: EOS after the text.

_T5 = {key: USUAL[key] for key in ("pad", "eos", "unk")}


def _read_with_sentinels(
    folder: Path,
    config: TransformerConfig,
    *,
    count: int,
    last_first: bool,
    rules: Rules,
    **files: Any,
) -> Tokenizer:
    """Return a tokenizer whose sentinels, `count` of them by default, follow its vocabulary."""
    count = read_tokenizer_config(folder).get("extra_ids", count)
    extra = [f"<extra_id_{number}>" for number in range(count)]
    rules = rules._replace(more_tokens=extra[::-1] if last_first else extra, unnamed=extra)
    return _read(folder, config, rules=rules, **files)


def _t5_settings(tokenizer: Tokenizer) -> dict[str, Any]:
    added = tokenizer.target.segmenter.library.get_added_tokens_decoder().values()
    extra_ids = sum(token.content.startswith("<extra_id_") for token in added)
    return {**_written(tokenizer), "extra_ids": extra_ids}


T5 = _library_class(
    *(_JSON, (UNIGRAM, (T5_MODEL,))),
    settings=_t5_settings,
    read=functools.partial(_read_with_sentinels, count=100, last_first=True),
    split="t5",
    usual=_T5,
)
BYT5 = _library_class(
    (BYTES, ()),
    settings=_t5_settings,
    read=functools.partial(_read_with_sentinels, count=125, last_first=False),
    usual={key: {"content": token, "lstrip": True, "rstrip": True} for key, token in _T5.items()},
)
PEGASUS = _library_class(
    _JSON,
    (UNIGRAM, (T5_MODEL,)),
    # Where mask_token is named, the class reads a sentencepiece model with one id less.
    settings=lambda tokenizer: {k: v for k, v in _written(tokenizer).items() if k != "mask_token"},
    split="pegasus",
    usual={**_T5, "mask": "<mask_2>"},
    unnamed=PEGASUS_SPECIAL[2:],
)

# BART, MVP, CodeT5 (RobertaTokenizer) and Blenderbot: byte-level byte-pair encoding.
# BlenderbotTokenizer has the template of tokenizer.json, and without the file none.

_MASK = {"content": "<mask>", "lstrip": True}  # with the space before it
_CLASSIFIED = {"prefix": ["cls"], "suffix": ["sep"]}
ROBERTA = _library_class(
    _JSON, _BYTE_LEVEL, split="byte_level", options={"add_prefix_space": False}, **_CLASSIFIED
)
BLENDERBOT = _library_class(
    *(_JSON, _BYTE_LEVEL),
    split="byte_level",
    options={"add_prefix_space": True},
    by_template=True,
    usual={**USUAL, "mask": _MASK},
)

# Word pieces: bart-base-chinese.

BERT = _library_class(
    *(_JSON, (WORD_PIECE, (WORD_PIECES,))),
    split="bert",
    options={"do_lower_case": True, "strip_accents": None, "tokenize_chinese_chars": True},
    usual={"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"},
    **_CLASSIFIED,
)

# T5Gemma: <bos> X, by the template of the file. The decoder starts from <bos>, so targets lack it.

GEMMA = _library_class(
    _JSON,
    read=_read_alone,
    by_template=True,
    bare_targets=True,
    usual={key: f"<{key}>" for key in ("bos", "eos", "unk", "pad", "mask")},
)

# mBART-50: en_XX X </s>. NLLB: eng_Latn X </s>, or X </s> eng_Latn with its legacy behaviour. The
# target's code is forced as the first token.

MBART_50 = _library_class(
    *(_JSON, (UNIGRAM, (MBART_MODEL,))),
    split="mbart_50",
    more_tokens=[*MBART_50_CODES, "<mask>"],
    languages=LanguageRule("before", "en_XX"),
    usual={key: token for key, token in USUAL.items() if key != "bos"} | {"mask": _MASK},
    unnamed=MBART_50_CODES,
)


def _read_nllb(folder: Path, config: TransformerConfig, *, rules: Rules, **files: Any) -> Tokenizer:
    if (folder / MBART_MODEL).exists() and not (folder / TOKENIZER_FILE).exists():
        raise InputError(
            f"{folder} has {MBART_MODEL} but no {TOKENIZER_FILE}, which lists the ids of the "
            "language codes; fetch this file too"
        )
    is_legacy = read_tokenizer_config(folder).get("legacy_behaviour")
    languages = LanguageRule("after" if is_legacy else "before", "eng_Latn")
    return _read(folder, config, rules=rules._replace(languages=languages), **files)


NLLB = _library_class(
    _JSON,
    settings=lambda tokenizer: {
        **_written(tokenizer),
        "legacy_behaviour": tokenizer.languages.placement == "after",
    },
    read=_read_nllb,
    split="mbart_50",
    usual={**USUAL, "mask": {**_MASK, "normalized": True}},
)

# Classes of sentencepiece. mBART: X </s> en_XX, and the target's code starts the decoder; the model
# normalises text, as mBART was trained, and MBartTokenizer does not. M2M100: __en__ X </s>.

_AFTER = LanguageRule("after", "en_XX", starts=True)


def _read_mbart_model(folder: Path, config: TransformerConfig) -> Tokenizer:
    """Return the tokenizer of a model whose codes and <mask> follow the pieces."""
    contents, path = read_files(folder, [MBART_MODEL]), folder / MBART_MODEL
    values = read_tokenizer_config(folder)
    vocabulary = fairseq_ids(contents[MBART_MODEL], str(path))
    codes = {code: i for i, code in enumerate(MBART_CODES, 1 + max(vocabulary.values()))}
    mask = {special_tokens(values)["mask"]: 1 + max(codes.values())}
    settings = class_settings(path, vocabulary, config, codes=codes, rule=_AFTER)
    fairseq = {token: i for i, token in enumerate(FAIRSEQ)}
    known = {**fairseq, **codes, **mask}
    added = added_settings(values, vocabulary, known, path, by_flag=True)
    return read_sentencepiece(contents, settings | {"rule": "mbart"} | added, str(folder))


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
    settings = class_settings(
        path, vocabulary, config, codes=codes, rule=LanguageRule("before", "en")
    )
    special = {token for token in special_tokens(values).values() if token in vocabulary}
    known = {token: vocabulary[token] for token in sorted(special)}
    known |= {f"__{code}__": token_id for code, token_id in codes.items()}
    added = added_settings(values, vocabulary, known, path)
    return read_sentencepiece(contents, settings | {"rule": "m2m_100"} | added, str(folder))


MARIAN = TokenizerClass({FILES["marian"]: read_marian}, written_tokens, (SENTENCEPIECE,))
M2M100 = TokenizerClass(
    {FILES["m2m_100"]: _read_m2m100},
    lambda tokenizer: {
        **written_tokens(tokenizer),
        "language_codes": {v: k for k, v in M2M100_CODES.items()}[(*tokenizer.languages.ids,)],
    },
)
MBART = TokenizerClass(
    {
        FILES["mbart"]: _read_mbart_model,
        **_library_class(_JSON, languages=_AFTER).readers,
    },
    lambda tokenizer: (_written if tokenizer.kind == TOKENIZER_JSON else written_tokens)(tokenizer),
    (TOKENIZER_JSON, SENTENCEPIECE),
)

PLAIN_NAME = "TokenizersBackend"
CLASSES = {
    "MarianTokenizer": MARIAN,
    "T5Tokenizer": T5,
    "PegasusTokenizer": PEGASUS,
    "RobertaTokenizer": ROBERTA,
    "BlenderbotTokenizer": BLENDERBOT,
    "BertTokenizer": BERT,
    "ByT5Tokenizer": BYT5,
    "MBartTokenizer": MBART,
    "MBart50Tokenizer": MBART_50,
    "NllbTokenizer": NLLB,
    "M2M100Tokenizer": M2M100,
    "GemmaTokenizer": GEMMA,
    PLAIN_NAME: PLAIN,
}
# Other names of the same classes.
SAME = {
    "BartTokenizer": "RobertaTokenizer",
    "MvpTokenizer": "RobertaTokenizer",
    "MT5Tokenizer": "T5Tokenizer",
    "PreTrainedTokenizer": PLAIN_NAME,  # without its "Fast"
}


def class_name(folder: Path, usual: str) -> str:
    """Return the name in `CLASSES` of a folder's tokenizer; `usual` is that of its family."""
    name = class_of(folder)
    name = SAME.get(name, name)
    has_json = (folder / TOKENIZER_FILE).exists()
    if usual == PLAIN_NAME:  # of UMT5, whatever it names: as in transformers
        return usual if has_json else name if name in CLASSES else "T5Tokenizer"
    if name:
        return name if name in CLASSES else PLAIN_NAME
    if usual == "M2M100Tokenizer" and not (folder / VOCABULARY).exists():
        return "NllbTokenizer"
    if usual == "MBartTokenizer" and has_json:
        content = read_files(folder, [TOKENIZER_FILE])[TOKENIZER_FILE]
        vocabulary = parse(content, str(folder / TOKENIZER_FILE)).get_vocab()
        if set(MBART_50_CODES) <= set(vocabulary):
            return "MBart50Tokenizer"
    return usual


def tokenizer_names(folder: Path, usual: str) -> tuple[str, ...]:
    """Return the names of the tokenizer's files in a folder, present or not."""
    return CLASSES[class_name(folder, usual)].names(folder)


def read_class(folder: Path, config: TransformerConfig, usual: str) -> Tokenizer:
    """Return the tokenizer of a folder; its languages are those of the folder."""
    name = class_name(folder, usual)
    found = CLASSES[name]
    tokenizer = found.readers[found.names(folder)](folder, config)
    if name == usual and tokenizer.kind in found.kinds:
        return tokenizer
    return dataclasses.replace(tokenizer, settings={**tokenizer.settings, "class_name": name})


def written_config(
    tokenizer: Tokenizer, config: TransformerConfig, usual: str
) -> dict[str, Any] | None:
    """Return the content of tokenizer_config.json, {} if the class needs none.

    None if neither the class that it was read by nor the usual one reads such a tokenizer.
    """
    name = tokenizer.settings.get("class_name", usual)
    found = CLASSES[name]
    if "class_name" not in tokenizer.settings and tokenizer.kind not in found.kinds:
        return None
    if found.settings is None:
        return {}
    written = {
        "tokenizer_class": name,
        "clean_up_tokenization_spaces": tokenizer.target.clean_up_spaces,
        "model_max_length": config.max_length,
        **found.settings(tokenizer),
    }
    if tokenizer.languages is not None:
        written["src_lang"] = tokenizer.languages.source
        written["tgt_lang"] = tokenizer.languages.target
    return written
