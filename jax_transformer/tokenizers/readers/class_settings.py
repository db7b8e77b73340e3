"""What the readers of the families' tokenizers share: special tokens, affixes, languages."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import InputError, shorten
from jax_transformer.storage.folder import CONFIG_FILE
from jax_transformer.storage.reading import read_json
from jax_transformer.tokenizers.tokenizer import Languages

TOKENIZER_CONFIG = "tokenizer_config.json"
# The names of special tokens if tokenizer_config.json lacks them.
USUAL = {
    "bos": "<s>",
    "eos": "</s>",
    "unk": "<unk>",
    "sep": "</s>",
    "pad": "<pad>",
    "cls": "<s>",
    "mask": "<mask>",
}
NEEDED = ("pad", "eos", "unk")  # by every tokenizer
FLAGS = ("lstrip", "normalized", "rstrip", "single_word", "special")  # of an added token
EXTRA = ("extra_special_tokens", "additional_special_tokens")  # keys, the first wins
# Codes whose ids follow from their place in the lists of MBartTokenizer, MBart50Tokenizer and
# M2M100Tokenizer in transformers 5.23.
MBART_CODES = tuple(
    "ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT "
    "lv_LV my_MM ne_NP nl_XX ro_RO ru_RU si_LK tr_TR vi_VN zh_CN".split()
)
MBART_50_CODES = (
    *MBART_CODES,
    *(
        "af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID ka_GE km_KH mk_MK ml_IN mn_MN mr_IN pl_PL ps_AF "
        "pt_XX sv_SE sw_KE ta_IN te_IN th_TH tl_XX uk_UA ur_PK xh_ZA gl_ES sl_SI"
    ).split(),
)
# By the value of "language_codes" in tokenizer_config.json.
M2M100_CODES = {
    "m2m100": tuple(
        "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga "
        "gd gl gu ha he hi hr ht hu hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv "
        "mg mk ml mn mr ms my ne nl no ns oc or pa pl ps pt ro ru sd si sk sl so sq sr ss su "
        "sv sw ta th tl tn tr uk ur uz vi wo xh yi yo zh zu".split()
    ),
    "wmt21": ("en", "ha", "is", "ja", "cs", "ru", "zh", "de"),
}
CODE = re.compile(r"[a-z]{2,3}_[A-Z][A-Za-z]{1,3}")  # for example de_DE, deu_Latn
M2M100_CODE = re.compile(r"__([a-z]{2,3})__")


class LanguageRule(NamedTuple):
    """How a family marks languages: attributes of `Languages`, and the source's usual code."""

    placement: Literal["before", "after"]
    usual: str
    starts: bool = False


class _Token(msgspec.Struct):
    content: str


class _TokenizerConfig(msgspec.Struct):
    """What a tokenizer_config.json must be where it says something."""

    added_tokens_decoder: dict[Annotated[str, msgspec.Meta(pattern="^[0-9]+$")], _Token] = {}
    extra_special_tokens: list[str | _Token] | dict[str, str | _Token] | None = None
    additional_special_tokens: list[str | _Token] | dict[str, str | _Token] | None = None
    extra_ids: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 0


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's tokenizer_config.json; {} if it is absent.

    Older versions have two other files in place of "added_tokens_decoder": their content is
    returned in today's form.
    """
    values = _read(folder / TOKENIZER_CONFIG, _TokenizerConfig)
    special = _read(folder / "special_tokens_map.json", _TokenizerConfig)
    added = _read(folder / "added_tokens.json", dict[str, Annotated[int, msgspec.Meta(ge=0)]])
    if "added_tokens_decoder" not in values:
        listed = EXTRA if extra_tokens(values) else ()  # with flags, which the other file lacks
        values |= {key: value for key, value in special.items() if key not in listed}
    if added and "added_tokens_decoder" not in values:
        named = {*special_tokens(values, {}).values(), *map(content, extra_tokens(values))}
        values["added_tokens_decoder"] = {
            str(i): {"content": token, "special": token in named, "normalized": token not in named}
            for token, i in added.items()
        }
    return values


def _read(path: Path, kind: Any) -> dict[str, Any]:
    """Return the content of a file; {} if it is absent. Refuse a value of another kind."""
    values = read_json(path) if path.exists() else {}
    for key, value in values.items():
        try:
            msgspec.convert({key: value}, kind)
        except msgspec.ValidationError as error:
            fault = f"{path}: {shorten(key)} is {shorten(value)}: {error}"
            raise InputError(f"{fault}; the file is damaged, copy it again") from error
    return values


def class_of(folder: Path) -> str:
    """Return the name of the tokenizer's class in transformers; "" if the folder names none."""
    name = read_tokenizer_config(folder).get("tokenizer_class")
    if name is None and (folder / CONFIG_FILE).exists():
        name = read_json(folder / CONFIG_FILE).get("tokenizer_class")
    return name.removesuffix("Fast") if isinstance(name, str) else ""


def special_tokens(values: Mapping[str, Any], usual: Mapping[str, Any] = USUAL) -> dict[str, str]:
    """Return the texts of special tokens by their names; `usual` has those that the values lack."""
    named = {key: values.get(f"{key}_token") or usual.get(key) for key in USUAL}
    return {key: content(token) for key, token in named.items() if token is not None}


def extra_tokens(values: Mapping[str, Any]) -> list[Any]:
    """Return the special tokens without a name in tokenizer_config.json: texts or objects."""
    tokens = next((values[key] for key in EXTRA if values.get(key)), [])
    return [*(tokens.values() if isinstance(tokens, Mapping) else tokens)]


def content(token: Any) -> str:
    """Return the text of a token of tokenizer_config.json, which may be an object."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else repr(token)


def added_ids(values: Mapping[str, Any]) -> dict[str, int]:
    """Return the ids of the tokens in "added_tokens_decoder"."""
    decoder = values.get("added_tokens_decoder") or {}
    return {content(token): int(i) for i, token in decoder.items()}


def tokens_to_add(
    values: Mapping[str, Any], usual: Mapping[str, Any] = USUAL, more: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Return the added tokens, each as its "content" and `FLAGS`, in the order of transformers.

    They are those of "added_tokens_decoder" by their ids, then the special ones with a name, and
    the others. `usual` and `more` are those that tokenizer_config.json need not name.
    """
    decoder = values.get("added_tokens_decoder") or {}
    named = special_tokens(values, usual)
    added: dict[str, dict[str, Any]] = {}

    def add(token: Any, flags: Any, is_special: bool) -> None:
        flags = flags if isinstance(flags, Mapping) else {}
        flags = {key: flags[key] for key in FLAGS if isinstance(flags.get(key), bool)}
        special = {"special": True} if is_special else {}
        added.setdefault(content(token), {"content": content(token), **flags, **special})

    for i in sorted(decoder, key=int):
        add(decoder[i], decoder[i], content(decoder[i]) in named.values())
    for key, token in named.items():
        described = values.get(f"{key}_token")
        add(token, described if isinstance(described, Mapping) else usual.get(key), True)
    for token in [*extra_tokens(values), *more]:
        add(token, token, not isinstance(token, Mapping))
    return [*added.values()]


def added_settings(
    values: Mapping[str, Any],
    vocabulary: Mapping[str, int],
    known: Mapping[str, int],
    folder: Path,
    by_flag: bool = False,
) -> dict[str, Any]:
    """Return the settings of the tokens that are added to a vocabulary.

    Args:
        values: The content of tokenizer_config.json.
        known: The ids of the special tokens that the class has; those of other special tokens that
            the vocabulary lacks follow its own.
        folder: That of the file, for error messages.
        by_flag: Whether a token with the flag "special" is special, and not only one that is listed
            among the special ones: as in the classes of the library tokenizers.
    """
    ids, added, special = {**vocabulary, **known}, dict(known), {*known}
    for token_id, token in (values.get("added_tokens_decoder") or {}).items():
        if (text := content(token)) in known:
            continue
        if any(token.get(flag) for flag in ("lstrip", "rstrip", "single_word")):
            raise InputError(
                f"{folder / TOKENIZER_CONFIG}: the token {text!r:.60} has lstrip, rstrip or "
                "single_word, which are not supported; remove them"
            )
        added[text] = ids[text] = int(token_id)
        special |= {text} if by_flag and token.get("special") else set()
    for text in map(content, extra_tokens(values)):
        added.setdefault(text, ids.setdefault(text, len(ids)))
        special.add(text)
    ordinary = [token for token in added if token not in special]
    return {"added_tokens": added, "ordinary_tokens": ordinary}


def codes_in(vocabulary: Mapping[str, int], tokens: Sequence[str]) -> dict[str, int]:
    """Return the ids of the language codes among tokens, in ascending order."""
    codes = filter(CODE.fullmatch, tokens)
    return {code: vocabulary[code] for code in sorted(codes, key=vocabulary.__getitem__)}


def class_settings(
    path: Path,
    vocabulary: Mapping[str, int],
    config: TransformerConfig | None,
    *,
    usual: Mapping[str, Any] = USUAL,
    prefix: Sequence[str] = (),
    suffix: Sequence[str] = ("eos",),
    template: tuple[list[int], list[int]] | None = None,
    codes: Mapping[str, int] | None = None,
    rule: LanguageRule | None = None,
) -> dict[str, Any]:
    """Return the settings that all kinds of tokenizers have, of a folder of transformers.

    A target always ends with EOS: without it a model would not learn where to end.

    Args:
        path: The file of the vocabulary, in the folder of tokenizer_config.json.
        config: The shape of the model: it has the start token of targets (None means padding), and
            padding and EOS if the tokenizer names none. Its tables may have more rows than there
            are tokens.
        usual: The special tokens that tokenizer_config.json need not name.
        prefix: Names in `USUAL` of the tokens before a source and a target; `suffix`: after them.
        template: Ids before and after a line, in the place of `prefix` and `suffix`.
        rule: How lines are marked by their languages, in the place of all these.
    """
    values = read_tokenizer_config(path.parent)
    tokens = special_tokens(values, usual)

    def id_of(key: str) -> int:
        if key not in tokens and config is not None and key != "unk":
            return getattr(config, f"{key}_id")
        if (token := tokens.get(key, USUAL[key])) not in vocabulary:
            raise InputError(f"{path}: lacks the special token {token!r:.60}; add it")
        return vocabulary[token]

    settings: dict[str, Any] = {key: id_of(key.removesuffix("_id")) for key in ("pad_id", "eos_id")}
    # A vocabulary without a token for what it lacks uses padding, as T5 does.
    settings["unk_id"] = id_of("unk") if "unk" in tokens else settings["pad_id"]
    settings["bos_id"] = settings["pad_id"] if config is None else config.bos_id
    settings["clean_up_spaces"] = bool(values.get("clean_up_tokenization_spaces"))
    if rule is None:
        before, after = template or ([*map(id_of, prefix)], [*map(id_of, suffix)])
        end = [] if after[-1:] == [settings["eos_id"]] else [settings["eos_id"]]
        settings |= {"source_prefix": before, "source_suffix": after}
        settings |= {"target_prefix": before, "target_suffix": after + end}
    else:
        settings["languages"] = dataclasses.asdict(_languages(codes or {}, values, path, rule))
    return settings if config is None else settings | {"vocab_size": config.src_vocab_size}


def _languages(
    codes: Mapping[str, int], values: Mapping[str, Any], path: Path, rule: LanguageRule
) -> Languages:
    """Return the languages, set to those in tokenizer_config.json."""
    if not codes:
        raise InputError(
            f"{path}: has no language code among its added tokens; use the {path.name} that the "
            "model was published with"
        )
    source = rule.usual if rule.usual in codes else None
    languages = Languages(codes, rule.placement, rule.starts, source)
    try:
        return languages.changed(values.get("src_lang"), values.get("tgt_lang"))
    except InputError as error:
        raise InputError(f"{path.parent / TOKENIZER_CONFIG}: {error}") from error
