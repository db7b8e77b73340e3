"""What the readers of the families' tokenizers share: special tokens, affixes, languages."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import InputError
from jax_transformer.storage.folder import CONFIG_FILE
from jax_transformer.storage.reading import read_json
from jax_transformer.tokenizers.languages import Languages

TOKENIZER_CONFIG = "tokenizer_config.json"
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
NEEDED = ("pad", "eos", "unk")  # by every tokenizer
FITS = {"padded": max, "cut": min}
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
_CODE = re.compile(r"[a-z]{2,3}_[A-Z][A-Za-z]{1,3}")  # as de_DE and deu_Latn


class LanguageRule(NamedTuple):
    """How a family marks languages: attributes of `Languages`, and the source's usual code."""

    placement: Literal["before", "after"]
    usual: str
    starts: bool = False


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
    """Return the text of each special token in tokenizer_config.json, by its names in `USUAL`."""
    tokens = {}
    for key, usual in USUAL.items():
        token = values.get(f"{key}_token") or usual
        token = token.get("content") if isinstance(token, Mapping) else token
        tokens[key] = token if isinstance(token, str) else repr(token)
    return tokens


def codes_in(vocabulary: Mapping[str, int], tokens: Sequence[str]) -> dict[str, int]:
    """Return the ids of the language codes among tokens, in ascending order."""
    codes = filter(_CODE.fullmatch, tokens)
    return {code: vocabulary[code] for code in sorted(codes, key=vocabulary.__getitem__)}


def family_settings(
    path: Path,
    vocabulary: Mapping[str, int],
    config: TransformerConfig | None,
    *,
    prefix: Sequence[str] = (),
    suffix: Sequence[str] = ("eos",),
    target_suffix: Sequence[str] | None = None,
    codes: Mapping[str, int] | None = None,
    rule: LanguageRule | None = None,
    fit: Literal["padded", "cut"] | None = None,
) -> dict[str, Any]:
    """Return the settings that all kinds of tokenizers have, of a folder of transformers.

    Args:
        path: The file of the vocabulary, beside tokenizer_config.json.
        config: The shape of the model, whose start token is that of targets; None for padding.
        prefix: Names in `USUAL` of the tokens before a source and a target; `suffix`: after them.
        target_suffix: Those after a target; None for those after a source.
        rule: How lines are marked by their languages; None by `prefix` and `suffix`.
        fit: "padded" if the model's table may be longer, "cut" if it may lack the last tokens.
    """
    values = read_tokenizer_config(path.parent)
    tokens = special_tokens(values)

    def ids(keys: Sequence[str]) -> list[int]:
        for key in keys:
            if tokens[key] not in vocabulary:
                raise InputError(f"{path}: lacks the special token {tokens[key]!r:.60}; add it")
        return [vocabulary[tokens[key]] for key in keys]

    settings = {f"{key}_id": i for key, i in zip(NEEDED, ids(NEEDED), strict=True)}
    settings["bos_id"] = settings["pad_id"] if config is None else config.bos_id
    settings["clean_up_spaces"] = bool(values.get("clean_up_tokenization_spaces"))
    if rule is None:
        before, after = ids(prefix), ids(suffix)
        target_after = after if target_suffix is None else ids(target_suffix)
        settings |= {"source_prefix": before, "source_suffix": after}
        settings |= {"target_prefix": before, "target_suffix": target_after}
    else:
        settings["languages"] = dataclasses.asdict(_languages(codes or {}, values, path, rule))
    size = 1 + max(vocabulary.values())
    fitting = size if fit is None else FITS[fit](size, config.src_vocab_size)
    if fitting != size:
        settings["vocab_size"] = fitting
    return settings


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
