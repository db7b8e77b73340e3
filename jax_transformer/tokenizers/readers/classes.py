"""The classes of tokenizers in transformers: how a folder is read, and written for transformers.

The class that a folder names decides; if it names none, the usual class of the model's family. A
class that is unknown here, or that splits text as its tokenizer.json says, is read by that file.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from tokenizers import models

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import InputError
from jax_transformer.storage.marian_files import SPLITTERS, vocabularies_of
from jax_transformer.tokenizers.formats import (
    SENTENCEPIECE,
    SENTENCEPIECE_FILES,
    TARGET_VOCABULARY,
    fairseq_ids,
    read_sentencepiece,
)
from jax_transformer.tokenizers.readers.class_settings import (
    FLAGS,
    M2M100_CODE,
    M2M100_CODES,
    MBART_50_CODES,
    MBART_CODES,
    NEEDED,
    TOKENIZER_CONFIG,
    USUAL,
    LanguageRule,
    added_ids,
    added_settings,
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
from jax_transformer.tokenizers.readers.marian import read_marian_tokenizer
from jax_transformer.tokenizers.readers.model_files import (
    FAIRSEQ,
    MBART_MODEL,
    MERGES,
    T5_MODEL,
    TOKENIZER_FILE,
    VOCABULARY,
    WORD_PIECES,
    read_files,
    read_model,
    read_vocabulary,
)
from jax_transformer.tokenizers.segmenters import LibrarySegmenter
from jax_transformer.tokenizers.tokenizer import Tokenizer


class Format(NamedTuple):
    """The files of a tokenizer."""

    kind: str  # in `formats.READERS`
    names: tuple[str, ...]


def _read(
    folder: Path, config: TransformerConfig, files: Format, described: "TokenizerClass"
) -> Tokenizer:
    """Return the tokenizer in files that the library tokenizers reads."""
    values, usual = read_tokenizer_config(folder), described.usual
    if described.sentinels:
        numbers = range(values.get("extra_ids", described.sentinels))
        extra = [f"<extra_id_{number}>" for number in numbers]
        # A sentencepiece model of T5 is followed by the last one first.
        more_tokens = extra if files.kind == BYTES else extra[::-1]
        described = described._replace(more_tokens=more_tokens, unnamed=extra)
    said = {key: values[key] for key in described.options if isinstance(values.get(key), bool)}
    splitting = {
        "rule": described.split,
        "options": {**described.options, **said},
        "more_tokens": [*described.more_tokens],
        "tokens": tokens_to_add(values, usual, described.unnamed),
    }
    contents = read_files(folder, files.names)
    library = library_of(files.kind, contents, splitting, str(folder))
    vocabulary = library.get_vocab(with_added_tokens=True)
    added = [token.content for token in library.get_added_tokens_decoder().values()]
    settings = splitting | class_settings(
        folder / (*files.names, TOKENIZER_CONFIG)[0],
        vocabulary,
        config,
        usual=usual,
        prefix=described.prefix,
        suffix=described.suffix,
        template=template(library) if described.by_template else None,
        codes=codes_in(vocabulary, added),
        rule=described.languages,
    )
    settings["special_tokens"] = special_tokens(values, usual)
    # transformers 5 cleans no byte pairs up, whatever the file says.
    settings["clean_up_spaces"] &= not isinstance(library.model, models.BPE)
    if described.split == "whisper" and settings["pad_id"] == settings["eos_id"]:
        settings["pad_id"] = config.pad_id  # see `whisper.padding_beside`
    if described.bare_targets:
        settings["target_prefix"] = []
    segmenter = LibrarySegmenter(library)
    return Tokenizer.build(files.kind, contents, settings, str(folder), (segmenter, segmenter))


def written_settings(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what tokenizer_config.json says of how text is split, and of the added tokens."""
    if not isinstance(tokenizer.target.segmenter, LibrarySegmenter):
        return _written_tokens(tokenizer)
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


class TokenizerClass(NamedTuple):
    """How the tokenizer of a class is read and written: a row of `CLASSES`."""

    formats: tuple[Format, ...]  # the first whose first file is there
    reader: "Reader" = _read
    # What tokenizer_config.json must say for a tokenizer that comes from no folder; None: nothing.
    settings: Callable[[Tokenizer], dict[str, Any]] | None = written_settings
    takes_others: bool = True  # tokenizers of its kinds that were read by no class
    # How a class of the library tokenizers reads lines:
    split: str | None = None  # how text is split, a name in `SPLITTING`; None as the file says
    # Keys of tokenizer_config.json that decide how, and what an absent one means.
    options: Mapping[str, bool | None] = MappingProxyType({})
    more_tokens: Sequence[str] = ()  # behind the vocabulary of a sentencepiece model
    sentinels: int = 0  # the same and without names: so many where "extra_ids" is absent
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

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of tokenizers of no class that it can be given."""
        return tuple(each.kind for each in self.formats) if self.takes_others else ()

    def format_of(self, folder: Path) -> Format:
        """Return the format of the tokenizer in a folder, whose files may be absent."""
        there = (each for each in self.formats if (folder / (*each.names, "")[0]).exists())
        return next(there, self.formats[0])


Reader = Callable[[Path, TransformerConfig, Format, TokenizerClass], Tokenizer]


def _read_alone(
    folder: Path, config: TransformerConfig, files: Format, described: TokenizerClass
) -> Tokenizer:
    """Return the tokenizer in a tokenizer.json, whatever the class: the file says everything."""
    if not (folder / TOKENIZER_FILE).exists():
        name = class_of(folder) or "a tokenizer without tokenizer_class"
        raise InputError(
            f"{folder} has no {TOKENIZER_FILE}, and this library cannot read the other files of "
            f"{name}; write it with transformers, where the class can: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    return _read(folder, config, files, described)


def _t5_settings(tokenizer: Tokenizer) -> dict[str, Any]:
    added = tokenizer.target.segmenter.library.get_added_tokens_decoder().values()
    extra_ids = sum(token.content.startswith("<extra_id_") for token in added)
    return {**written_settings(tokenizer), "extra_ids": extra_ids}


def _read_nllb(
    folder: Path, config: TransformerConfig, files: Format, described: TokenizerClass
) -> Tokenizer:
    if (folder / MBART_MODEL).exists() and not (folder / TOKENIZER_FILE).exists():
        raise InputError(
            f"{folder} has {MBART_MODEL} but no {TOKENIZER_FILE}, which lists the ids of the "
            "language codes; fetch this file too"
        )
    is_legacy = read_tokenizer_config(folder).get("legacy_behaviour")
    languages = LanguageRule("after" if is_legacy else "before", "eng_Latn")
    return _read(folder, config, files, described._replace(languages=languages))


# Classes of sentencepiece.


def read_marian(folder: Path, config: TransformerConfig | None = None) -> Tokenizer:
    """Return the tokenizer in a folder; without a config padding is the start token of targets."""
    values, path = read_tokenizer_config(folder), folder / TOKENIZER_CONFIG
    for key in ("sp_model_kwargs", "split_special_tokens"):
        if values.get(key):
            raise InputError(f"{path}: {key}={values[key]!r:.60} is not supported; remove it")
    names = [VOCABULARY, TARGET_VOCABULARY] if values.get("separate_vocabs") else [VOCABULARY]
    contents = read_files(folder, [*SPLITTERS, *names])
    source, *target = [read_vocabulary(contents[name], str(folder / name)) for name in names]
    settings = class_settings(folder / VOCABULARY, source, config)
    tokens = special_tokens(values)
    needed = {tokens[key]: source[tokens[key]] for key in NEEDED}
    for token, token_id in needed.items() if target else ():
        if target[0].get(token) != token_id:
            raise InputError(
                f"{folder}: {token!r} must have one id, but has {token_id} in {VOCABULARY} and "
                f"{target[0].get(token)} in {TARGET_VOCABULARY}"
            )
    settings |= {"class_name": "MarianTokenizer", "rule": "marian"}
    settings |= added_settings(values, source, needed, folder)
    if target and config is not None:
        settings["tgt_vocab_size"] = config.tgt_vocab_size
    return read_sentencepiece(contents, settings, str(folder))


def _written_tokens(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return `written_settings` of a tokenizer of sentencepiece."""
    added = tokenizer.settings["added_tokens"]
    tokens = {token_id: token for token, token_id in reversed(added.items())}
    named = {f"{key}_token": tokens[getattr(tokenizer, f"{key}_id")] for key in NEEDED}
    ordinary = tokenizer.settings.get("ordinary_tokens", [])
    more = {token: i for token, i in added.items() if token not in named.values()}
    special = [token for token in more if token not in ordinary]
    flags = dict.fromkeys(FLAGS, False)
    decoder = {
        str(i): {**flags, "content": token, "special": token in special}
        for token, i in more.items()
    }
    written = {**named, "added_tokens_decoder": decoder, "extra_special_tokens": special}
    if tokenizer.settings["rule"] == "marian":
        written["separate_vocabs"] = TARGET_VOCABULARY in tokenizer.contents
    return {key: value for key, value in written.items() if value not in ({}, [])}


def _read_mbart(
    folder: Path, config: TransformerConfig, files: Format, described: TokenizerClass
) -> Tokenizer:
    """Return the tokenizer of a model whose codes and <mask> follow the pieces."""
    if files.kind == TOKENIZER_JSON:
        return _read(folder, config, files, described)
    contents, path = read_files(folder, [MBART_MODEL]), folder / MBART_MODEL
    values = read_tokenizer_config(folder)
    vocabulary = fairseq_ids(read_model(contents[MBART_MODEL], str(path)))
    codes = {code: i for i, code in enumerate(MBART_CODES, 1 + max(vocabulary.values()))}
    codes |= codes_in(more := added_ids(values), [*more])
    mask = {special_tokens(values)["mask"]: 1 + max(codes.values())}
    settings = class_settings(path, vocabulary, config, codes=codes, rule=described.languages)
    fairseq = {token: i for i, token in enumerate(FAIRSEQ)}
    known = {**fairseq, **codes, **mask}
    added = added_settings(values, vocabulary, known, folder, by_flag=True)
    return read_sentencepiece(contents, settings | {"rule": "mbart"} | added, str(folder))


def _read_m2m100(
    folder: Path, config: TransformerConfig, files: Format, described: TokenizerClass
) -> Tokenizer:
    """Return the tokenizer of a folder in which the codes follow vocab.json."""
    values = read_tokenizer_config(folder)
    contents, path = read_files(folder, files.names), folder / VOCABULARY
    vocabulary = read_vocabulary(contents[VOCABULARY], str(path))
    which = values.get("language_codes", "m2m100")
    if which not in M2M100_CODES:
        raise InputError(
            f"{folder}: language_codes={which!r:.40} must be one of {', '.join(M2M100_CODES)}"
        )
    codes = {code: i for i, code in enumerate(M2M100_CODES[which], len(vocabulary))}
    for token, token_id in added_ids(values).items():
        if code := M2M100_CODE.fullmatch(token):  # also of languages that were added
            codes.setdefault(code[1], token_id)
    settings = class_settings(path, vocabulary, config, codes=codes, rule=described.languages)
    special = {token for token in special_tokens(values).values() if token in vocabulary}
    known = {token: vocabulary[token] for token in sorted(special)}
    known |= {f"__{code}__": token_id for code, token_id in codes.items()}
    added = added_settings(values, vocabulary, known, folder)
    return read_sentencepiece(contents, settings | {"rule": "m2m_100"} | added, str(folder))


_JSON = Format(TOKENIZER_JSON, (TOKENIZER_FILE,))
_BYTE_LEVEL = Format(BYTE_LEVEL, (VOCABULARY, MERGES))
_T5_MODEL, _MBART_MODEL = Format(UNIGRAM, (T5_MODEL,)), Format(UNIGRAM, (MBART_MODEL,))
_T5_USUAL = {key: USUAL[key] for key in ("pad", "eos", "unk")}
_MASK = {"content": "<mask>", "lstrip": True}  # with the space before it
PLAIN_NAME = "TokenizersBackend"
CLASSES = {
    "MarianTokenizer": TokenizerClass(
        formats=(Format(SENTENCEPIECE, SENTENCEPIECE_FILES["marian"]),),
        reader=lambda folder, config, *_: read_marian(folder, config),
    ),
    # No class of transformers: the vocabularies of Marian's own folders.
    "MarianVocabulary": TokenizerClass(
        formats=(Format(SENTENCEPIECE, ()),),
        reader=lambda path, config, *_: read_marian_tokenizer(vocabularies_of(path), config.pad_id),
        settings=None,
    ),
    # T5, ByT5 and Pegasus: EOS after the text.
    "T5Tokenizer": TokenizerClass(
        formats=(_JSON, _T5_MODEL),
        settings=_t5_settings,
        sentinels=100,
        split="t5",
        usual=_T5_USUAL,
    ),
    "ByT5Tokenizer": TokenizerClass(
        formats=(Format(BYTES, ()),),
        settings=_t5_settings,
        sentinels=125,
        usual={
            key: {"content": token, "lstrip": True, "rstrip": True}
            for key, token in _T5_USUAL.items()
        },
    ),
    "PegasusTokenizer": TokenizerClass(
        formats=(_JSON, _T5_MODEL),
        # Where mask_token is named, the class reads a sentencepiece model with one id less.
        settings=lambda tokenizer: {
            key: value for key, value in written_settings(tokenizer).items() if key != "mask_token"
        },
        split="pegasus",
        usual={**_T5_USUAL, "mask": "<mask_2>"},
        unnamed=PEGASUS_SPECIAL[2:],
    ),
    # BART, MVP, CodeT5 (RobertaTokenizer) and Blenderbot: byte-level byte-pair encoding.
    # BlenderbotTokenizer has the template of tokenizer.json, and without the file none.
    "RobertaTokenizer": TokenizerClass(
        formats=(_JSON, _BYTE_LEVEL),
        split="byte_level",
        options={"add_prefix_space": False},
        prefix=["cls"],
        suffix=["sep"],
    ),
    "BlenderbotTokenizer": TokenizerClass(
        formats=(_JSON, _BYTE_LEVEL),
        split="byte_level",
        options={"add_prefix_space": True},
        by_template=True,
        usual={**USUAL, "mask": _MASK},
    ),
    # Whisper: EOS after the text. The tokens of language and task before it are left to who trains.
    "WhisperTokenizer": TokenizerClass(
        formats=(_JSON, _BYTE_LEVEL),
        takes_others=False,
        split="whisper",
        options={"add_prefix_space": False},
        usual=dict.fromkeys(("bos", "eos", "unk"), "<|endoftext|>"),
    ),
    # Word pieces: bart-base-chinese.
    "BertTokenizer": TokenizerClass(
        formats=(_JSON, Format(WORD_PIECE, (WORD_PIECES,))),
        split="bert",
        options={"do_lower_case": True, "strip_accents": None, "tokenize_chinese_chars": True},
        usual={"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"},
        prefix=["cls"],
        suffix=["sep"],
    ),
    # mBART: X </s> en_XX, and the target's code starts the decoder; the model normalises text, as
    # mBART was trained, and MBartTokenizer does not. mBART-50: en_XX X </s>. M2M100: __en__ X </s>.
    # NLLB: eng_Latn X </s>, or X </s> eng_Latn with its legacy behaviour. Except in mBART, the
    # target's code is forced as the first token.
    "MBartTokenizer": TokenizerClass(
        formats=(Format(SENTENCEPIECE, SENTENCEPIECE_FILES["mbart"]), _JSON),
        reader=_read_mbart,
        languages=LanguageRule("after", "en_XX", starts=True),
    ),
    "MBart50Tokenizer": TokenizerClass(
        formats=(_JSON, _MBART_MODEL),
        split="mbart_50",
        more_tokens=[*MBART_50_CODES, "<mask>"],
        languages=LanguageRule("before", "en_XX"),
        usual={key: token for key, token in USUAL.items() if key != "bos"} | {"mask": _MASK},
        unnamed=MBART_50_CODES,
    ),
    "NllbTokenizer": TokenizerClass(
        formats=(_JSON,),
        reader=_read_nllb,
        settings=lambda tokenizer: {
            **written_settings(tokenizer),
            "legacy_behaviour": tokenizer.languages.placement == "after",
        },
        split="mbart_50",
        usual={**USUAL, "mask": {**_MASK, "normalized": True}},
    ),
    "M2M100Tokenizer": TokenizerClass(
        formats=(Format(SENTENCEPIECE, SENTENCEPIECE_FILES["m2m_100"]),),
        reader=_read_m2m100,
        settings=lambda tokenizer: {
            **written_settings(tokenizer),
            "language_codes": next(
                name
                for name, codes in M2M100_CODES.items()
                if codes == (*tokenizer.languages.ids,)[: len(codes)]
            ),
        },
        takes_others=False,
        languages=LanguageRule("before", "en"),
    ),
    # T5Gemma: <bos> X, by the template of the file. The decoder starts from <bos>, so targets lack
    # it.
    "GemmaTokenizer": TokenizerClass(
        formats=(_JSON,),
        reader=_read_alone,
        by_template=True,
        bare_targets=True,
        usual={key: f"<{key}>" for key in ("bos", "eos", "unk", "pad", "mask")},
    ),
    PLAIN_NAME: TokenizerClass(formats=(_JSON,), reader=_read_alone, by_template=True, usual={}),
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
    return CLASSES[class_name(folder, usual)].format_of(folder).names


def read_class(folder: Path, config: TransformerConfig, usual: str) -> Tokenizer:
    """Return the tokenizer of a folder; its languages are those of the folder."""
    name = class_name(folder, usual)
    found = CLASSES[name]
    tokenizer = found.reader(folder, config, found.format_of(folder), found)
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
