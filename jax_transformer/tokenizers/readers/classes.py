"""The classes of tokenizers in transformers: how a folder is read, and written for transformers.

The class that a folder names decides; where it names none, the usual class of the model's family. A
class that is not known here, and each class without an own way to split text, is read by the
tokenizer.json alone.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import InputError
from jax_transformer.tokenizers.readers.class_settings import (
    FLAGS,
    M2M100_CODES,
    MBART_50_CODES,
    MBART_CODES,
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
Readers = Mapping[tuple[str, ...], Reader]  # by the names of their files


@dataclasses.dataclass(frozen=True)
class TokenizerClass:
    """How the tokenizer of a class is read and written."""

    # The readers by the names of their files: the first whose first file is there.
    readers: Readers
    kinds: tuple[str, ...] = ()  # in `READERS`, of tokenizers of no class that it can be given
    # What tokenizer_config.json must say for a tokenizer that comes from no folder.
    settings: Callable[[Tokenizer], dict[str, Any]] | None = None

    def names(self, folder: Path) -> tuple[str, ...]:
        """Return the names of the tokenizer's files in a folder, present or not."""
        files = [*self.readers]
        return next((names for names in files if (folder / (*names, "")[0]).exists()), files[0])


def _read(
    folder: Path,
    config: TransformerConfig,
    kind: str,
    names: Sequence[str],
    splitting: Mapping[str, Any],
    *,
    rule: LanguageRule | None = None,
    by_template: bool = False,
    usual: Mapping[str, Any] = USUAL,
    more: Sequence[str] = (),
    **affixes: Sequence[str],
) -> Tokenizer:
    """Return the tokenizer in files that the library tokenizers splits by some settings.

    Args:
        by_template: Whether the ids before and after a line are those of the file's own template.
        usual: Special tokens that tokenizer_config.json need not name, by their names; `more`:
            those without a name.
        affixes: Those of `class_settings`; language codes are those of the files.
    """
    values = read_tokenizer_config(folder)
    splitting = {**splitting, "tokens": tokens_to_add(values, usual, more)}
    contents, path = read_files(folder, names), folder / (*names, "tokenizer")[0]
    library = library_of(kind, contents, splitting, str(folder))
    vocabulary = library.get_vocab(with_added_tokens=True)
    options: dict[str, Any] = {"usual": usual, **affixes}
    if by_template:
        options["template"] = template(library)
    if rule is not None:
        added = [token.content for token in library.get_added_tokens_decoder().values()]
        options |= {"codes": codes_in(vocabulary, added), "rule": rule}
    settings = splitting | class_settings(path, vocabulary, config, **options)
    settings["special_tokens"] = special_tokens(values, usual)
    return Tokenizer.build(kind, contents, settings, str(folder), (LibrarySegmenter(library),) * 2)


def _read_json(folder: Path, config: TransformerConfig, **options: Any) -> Tokenizer:
    """Return the tokenizer in the tokenizer.json of a folder; options are those of `_read`."""
    splitting = options.pop("splitting", {})
    return _read(folder, config, TOKENIZER_JSON, [TOKENIZER_FILE], splitting, **options)


def _read_alone(folder: Path, config: TransformerConfig) -> Tokenizer:
    """Return the tokenizer in a tokenizer.json, whatever the class: it says all that is done."""
    if not (folder / TOKENIZER_FILE).exists():
        name = class_of(folder) or "a tokenizer without tokenizer_class"
        raise InputError(
            f"{folder} has no {TOKENIZER_FILE}, and this library cannot read the other files of "
            f"{name}; write it with transformers, where the class can: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    return _read_json(folder, config, by_template=True, usual={})


def _written(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what tokenizer_config.json says of the special and the added tokens."""
    named = tokenizer.settings.get("special_tokens", {})
    added = tokenizer.target.segmenter.library.get_added_tokens_decoder()
    return {
        **{f"{key}_token": token for key, token in named.items()},
        "added_tokens_decoder": {
            str(i): {"content": token.content} | {flag: getattr(token, flag) for flag in FLAGS}
            for i, token in added.items()
        },
    }


def _with_options(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return also the settings of tokenizer_config.json that decide how text is split."""
    return {**_written(tokenizer), **tokenizer.settings.get("options", {})}


PLAIN_NAME = "TokenizersBackend"
PLAIN = TokenizerClass({(TOKENIZER_FILE,): _read_alone}, settings=_written)
MARIAN = TokenizerClass({FILES["marian"]: read_marian}, (SENTENCEPIECE,), written_tokens)

# T5 and Pegasus: EOS after the text. T5's sentinels follow the pieces of its model.


def _read_model(
    folder: Path,
    config: TransformerConfig,
    *,
    name: str,
    splitting: Mapping[str, Any],
    **options: Any,
) -> Tokenizer:
    """Return the tokenizer in a sentencepiece model; options are those of `_read`."""
    return _read(folder, config, UNIGRAM, [name], splitting, **options)


_T5 = {key: USUAL[key] for key in ("pad", "eos", "unk")}


def _read_t5_model(folder: Path, config: TransformerConfig) -> Tokenizer:
    extra_ids = read_tokenizer_config(folder).get("extra_ids", 100)
    extra = [f"<extra_id_{number}>" for number in reversed(range(extra_ids))]
    splitting = {"rule": "t5", "more_tokens": extra}
    return _read(folder, config, UNIGRAM, [T5_MODEL], splitting, more=extra, usual=_T5)


def _t5_settings(tokenizer: Tokenizer) -> dict[str, Any]:
    added = tokenizer.target.segmenter.library.get_added_tokens_decoder().values()
    extra_ids = sum(token.content.startswith("<extra_id_") for token in added)
    return {**_written(tokenizer), "extra_ids": extra_ids}


T5 = TokenizerClass(
    {
        (TOKENIZER_FILE,): functools.partial(_read_json, splitting={"rule": "t5"}, usual=_T5),
        (T5_MODEL,): _read_t5_model,
    },
    (TOKENIZER_JSON, UNIGRAM),
    _t5_settings,
)
_PEGASUS = {
    "splitting": {"rule": "pegasus"},
    "usual": {**_T5, "mask": "<mask_2>"},
    "more": PEGASUS_SPECIAL[2:],
}
PEGASUS = TokenizerClass(
    {
        (TOKENIZER_FILE,): functools.partial(_read_json, **_PEGASUS),
        (T5_MODEL,): functools.partial(_read_model, name=T5_MODEL, **_PEGASUS),
    },
    (TOKENIZER_JSON,),
    _written,
)

# BART, MVP, CodeT5 (RobertaTokenizer) and Blenderbot: byte-level byte-pair encoding.


def _read_byte_level(
    folder: Path,
    config: TransformerConfig,
    *,
    kind: str,
    names: Sequence[str],
    spaces: bool,
    **options: Any,
) -> Tokenizer:
    """Return the tokenizer in files; `spaces`: whether a line usually gets a space before it."""
    space = read_tokenizer_config(folder).get("add_prefix_space")
    prefix = {"add_prefix_space": spaces if space is None else bool(space)}
    return _read(folder, config, kind, names, {"rule": "byte_level", "options": prefix}, **options)


def _byte_level_class(**options: Any) -> TokenizerClass:
    return TokenizerClass(
        {
            (TOKENIZER_FILE,): functools.partial(
                _read_byte_level, kind=TOKENIZER_JSON, names=[TOKENIZER_FILE], **options
            ),
            (VOCABULARY, MERGES): functools.partial(
                _read_byte_level, kind=BYTE_LEVEL, names=[VOCABULARY, MERGES], **options
            ),
        },
        (TOKENIZER_JSON, BYTE_LEVEL),
        _with_options,
    )


_MASK = {"content": "<mask>", "lstrip": True}  # with the space before it
ROBERTA = _byte_level_class(spaces=False, prefix=["cls"], suffix=["sep"])
# BlenderbotTokenizer has the template of tokenizer.json, and without the file none.
BLENDERBOT = _byte_level_class(spaces=True, by_template=True, usual={**USUAL, "mask": _MASK})

# Word pieces (bart-base-chinese), and bytes, which need no file.

_BERT = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
_BERT_OPTIONS = ("do_lower_case", "strip_accents", "tokenize_chinese_chars")


def _read_bert(folder: Path, config: TransformerConfig, *, kind: str, name: str) -> Tokenizer:
    values = read_tokenizer_config(folder)
    options = {key: values[key] for key in _BERT_OPTIONS if isinstance(values.get(key), bool)}
    splitting = {"rule": "bert", "options": options}
    affixes = {"prefix": ["cls"], "suffix": ["sep"]}
    return _read(folder, config, kind, [name], splitting, usual=_BERT, **affixes)


BERT = TokenizerClass(
    {
        (TOKENIZER_FILE,): functools.partial(_read_bert, kind=TOKENIZER_JSON, name=TOKENIZER_FILE),
        (WORD_PIECES,): functools.partial(_read_bert, kind=WORD_PIECE, name=WORD_PIECES),
    },
    settings=_with_options,
)


def _read_bytes(folder: Path, config: TransformerConfig) -> Tokenizer:
    extra_ids = read_tokenizer_config(folder).get("extra_ids", 125)
    extra = [f"<extra_id_{number}>" for number in range(extra_ids)]
    usual = {key: {"content": token, "lstrip": True, "rstrip": True} for key, token in _T5.items()}
    return _read(folder, config, BYTES, [], {"more_tokens": extra}, usual=usual, more=extra)


BYT5 = TokenizerClass({(): _read_bytes}, settings=_written)

# mBART: X </s> en_XX, and the target's code starts the decoder. mBART-50: en_XX X </s>, and the
# target's code is forced as the first token. MBartTokenizer does not normalise text; the
# sentencepiece model does, as mBART was trained.

_AFTER = LanguageRule("after", "en_XX", starts=True)


def _read_mbart_model(folder: Path, config: TransformerConfig) -> Tokenizer:
    """Return the tokenizer of a model whose codes and <mask> follow the pieces."""
    contents, path = read_files(folder, [MBART_MODEL]), folder / MBART_MODEL
    values, vocabulary = (
        read_tokenizer_config(folder),
        fairseq_ids(contents[MBART_MODEL], str(path)),
    )
    codes = {code: i for i, code in enumerate(MBART_CODES, 1 + max(vocabulary.values()))}
    mask = {special_tokens(values)["mask"]: 1 + max(codes.values())}
    settings = class_settings(path, vocabulary, config, codes=codes, rule=_AFTER)
    fairseq = {token: i for i, token in enumerate(FAIRSEQ)}
    known = {**fairseq, **codes, **mask}
    added = added_settings(values, vocabulary, known, path, by_flag=True)
    return read_sentencepiece(contents, settings | {"rule": "mbart"} | added, str(folder))


MBART = TokenizerClass(
    {
        (MBART_MODEL,): _read_mbart_model,
        (TOKENIZER_FILE,): functools.partial(_read_json, rule=_AFTER),
    },
    (TOKENIZER_JSON, SENTENCEPIECE),
    lambda tokenizer: (_written if tokenizer.kind == TOKENIZER_JSON else written_tokens)(tokenizer),
)
_MBART_50 = {
    "splitting": {"rule": "mbart_50", "more_tokens": [*MBART_50_CODES, "<mask>"]},
    "rule": LanguageRule("before", "en_XX"),
    "usual": {key: token for key, token in USUAL.items() if key != "bos"} | {"mask": _MASK},
    "more": MBART_50_CODES,
}
MBART_50 = TokenizerClass(
    {
        (TOKENIZER_FILE,): functools.partial(_read_json, **_MBART_50),
        (MBART_MODEL,): functools.partial(_read_model, name=MBART_MODEL, **_MBART_50),
    },
    (TOKENIZER_JSON, UNIGRAM),
    _written,
)

# M2M100: __en__ X </s>. NLLB: eng_Latn X </s>, or X </s> eng_Latn with its legacy behaviour. The
# target's code is forced as the first token.


def _read_nllb(folder: Path, config: TransformerConfig) -> Tokenizer:
    if (folder / MBART_MODEL).exists() and not (folder / TOKENIZER_FILE).exists():
        raise InputError(
            f"{folder} has {MBART_MODEL} but no {TOKENIZER_FILE}, which lists the ids of the "
            "language codes; fetch this file too"
        )
    is_legacy = read_tokenizer_config(folder).get("legacy_behaviour")
    rule = LanguageRule("after" if is_legacy else "before", "eng_Latn")
    usual = {**USUAL, "mask": {**_MASK, "normalized": True}}
    return _read_json(folder, config, splitting={"rule": "mbart_50"}, rule=rule, usual=usual)


def _nllb_settings(tokenizer: Tokenizer) -> dict[str, Any]:
    legacy = tokenizer.languages is not None and tokenizer.languages.placement == "after"
    return {**_written(tokenizer), "legacy_behaviour": legacy}


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


def _m2m100_settings(tokenizer: Tokenizer) -> dict[str, Any]:
    codes = (*tokenizer.languages.ids,)
    which = [name for name, members in M2M100_CODES.items() if members == codes]
    return {**written_tokens(tokenizer), "language_codes": which[0]}


NLLB = TokenizerClass({(TOKENIZER_FILE,): _read_nllb}, (TOKENIZER_JSON,), _nllb_settings)
M2M100 = TokenizerClass({(MBART_MODEL, VOCABULARY): _read_m2m100}, settings=_m2m100_settings)

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
    """Return the name in `CLASSES` of a folder's tokenizer.

    Args:
        usual: The class where the folder names none: that of the model's family.
    """
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
    return dataclasses.replace(tokenizer, settings={**tokenizer.settings, "class_name": name})


def written_config(
    tokenizer: Tokenizer, config: TransformerConfig, usual: str
) -> dict[str, Any] | None:
    """Return the content of tokenizer_config.json, {} where the class needs none.

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
