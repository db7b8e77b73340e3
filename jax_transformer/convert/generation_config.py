"""Generation defaults of a Hugging Face folder as keyword arguments of `generate`.

Each key of `GenerationConfig` in transformers 5.23 is honoured, or changes no output and is not
read, or is refused unless its value is neutral.
"""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from jax_transformer.config import TransformerConfig
from jax_transformer.config.declared import checked
from jax_transformer.errors import InputError, shorten
from jax_transformer.storage.folder import CONFIG_FILE
from jax_transformer.storage.marian_files import is_marian
from jax_transformer.storage.reading import read_json

GENERATION_FILE = "generation_config.json"
# Values at which an option of `generate` changes nothing; so do None and ().
USUAL = {"beam_size": 1, "num_hypotheses": 1, "early_stopping": "never"}
USUAL |= {"allow_padding": False, "renormalize": False}
REMEDY = "--ignore-generation-config ignores the file's generation defaults"
DEFAULT_NEW_TOKENS = 20  # of transformers, where a file has neither max_length nor max_new_tokens

CACHES = (
    "dynamic dynamic_full hybrid hybrid_chunked offloaded offloaded_hybrid "
    "offloaded_hybrid_chunked offloaded_static paged sliding_window static"
).split()
NEVER_NEUTRAL = (
    "assistant_early_exit constraints dola_layers exponential_decay_length_penalty force_words_ids "
    "max_time prompt_lookup_num_tokens sequence_bias stop_strings watermarking_config"
).split()
# Keys that are refused, with the values at which they change nothing; null never does.
NEUTRAL: Mapping[str, Sequence[Any]] = {
    **dict.fromkeys(NEVER_NEUTRAL, ()),
    "cache_implementation": CACHES,
    "diversity_penalty": (0,),
    "do_sample": (False,),
    "encoder_repetition_penalty": (1,),
    "guidance_scale": (1,),
    "num_beam_groups": (1,),
    "penalty_alpha": (0,),
    "token_healing": (False,),
    "use_mtp": (False,),
}


def read_generation_config(folder: Path) -> tuple[dict[str, Any], str]:
    """Return the generation defaults of a folder, and the name of the file that has them.

    As in transformers, generation_config.json replaces all keys of config.json.
    """
    path = folder / GENERATION_FILE
    if os.path.lexists(path):
        return read_json(path), GENERATION_FILE
    values = {k: v for k, v in read_json(folder / CONFIG_FILE).items() if v is not None}
    if values.get("force_bos_token_to_be_generated") and "bos_token_id" in values:
        values["forced_bos_token_id"] = values["bos_token_id"]
    return values, CONFIG_FILE


def names_length(folder: Path) -> bool:
    """Return whether a folder limits targets; else `DEFAULT_NEW_TOKENS` limits them."""
    if is_marian(folder):  # by the length of the source
        return True
    values, _ = read_generation_config(folder)
    return any(values.get(key) is not None for key in ("max_length", "max_new_tokens"))


def generation_options(
    values: Mapping[str, Any], config: TransformerConfig, name: str = GENERATION_FILE
) -> dict[str, Any]:
    """Return the keyword arguments of `generate` that have the effect of generation defaults.

    Options at the default of `generate` are left out; unknown keys are not read. The config has the
    ids of the first decoder input, of EOS and of padding that the file lacks.
    """
    read = _Reader(values, config, name)
    for key, neutral in NEUTRAL.items():
        value = values.get(key)
        if value is not None and value not in neutral:
            raise read.refusal(key, "cannot be honoured")
    started = values.get("decoder_start_token_id") is not None
    start_key = "decoder_start_token_id" if started else "bos_token_id"
    start = read.value(start_key, read.token_id, config.bos_id)
    eos_ids = read.tokens("eos_token_id", (config.eos_id,))
    forced_last = read.tokens("forced_eos_token_id")
    if len(forced_last) > 1:
        raise read.refusal("forced_eos_token_id", "cannot be honoured")
    max_new_tokens = _max_new_tokens(read, config)
    sequence = Annotated[tuple[read.token_id, ...], Meta(min_length=1)]
    sequences = read.value("bad_words_ids", tuple[sequence, ...], ())
    # transformers does not ban EOS by itself.
    banned = {words[0] for words in sequences if len(words) == 1} - {*eos_ids}
    banned |= set(read.tokens("suppress_tokens"))
    beams = read.count("num_beams", 1, least=1)
    hypotheses = read.count("num_return_sequences", 1, least=1)
    if hypotheses > beams:
        raise read.refusal("num_return_sequences", f"must be at most num_beams={beams}")
    penalty = read.value("repetition_penalty", Annotated[float, Meta(gt=0)], 1.0)
    options = {
        "beam_size": beams,
        "num_hypotheses": hypotheses,
        "length_penalty": read.value("length_penalty", float, 1.0),
        "length_normalization": "power",
        "early_stopping": read.value("early_stopping", bool | Literal["never"], False),
        "start_token": None if start == config.bos_id else start,
        "eos_ids": None if eos_ids == (config.eos_id,) else eos_ids,
        "allow_padding": config.pad_id not in banned,
        "max_new_tokens": max_new_tokens,
        "min_new_tokens": _min_new_tokens(read, max_new_tokens, bool(forced_last)) or None,
        "forced_first_token": read.value("forced_bos_token_id", read.token_id, None),
        "forced_last_token": forced_last[0] if forced_last else None,
        "banned_tokens": tuple(sorted(banned - {config.pad_id})),
        "banned_sequences": tuple(words for words in sequences if len(words) > 1),
        "begin_suppressed_tokens": read.tokens("begin_suppress_tokens"),
        "repetition_penalty": None if penalty == 1 else penalty,
        "no_repeat_ngram_size": read.count("no_repeat_ngram_size", 0) or None,
        "encoder_no_repeat_ngram_size": read.count("encoder_no_repeat_ngram_size", 0) or None,
        "renormalize": read.value("renormalize_logits", bool, False),
    }
    return {
        name: value
        for name, value in options.items()
        if value not in (None, ()) and value != USUAL.get(name)
    }


class _Reader:
    """The values of a file, checked one by one; null and an absent key are one."""

    def __init__(self, values: Mapping[str, Any], config: TransformerConfig, name: str) -> None:
        self.values, self.name = values, name
        self.token_id = Annotated[int, Meta(ge=0, lt=config.tgt_vocab_size)]

    def refusal(self, key: str, fault: str) -> InputError:
        return InputError(f"{self.name}: {key}={shorten(self.values[key])} {fault}; {REMEDY}")

    def value(self, key: str, declared: Any, default: Any) -> Any:
        if (value := self.values.get(key)) is None:
            return default
        try:
            return checked(key, value, declared)
        except InputError as error:
            raise InputError(f"{self.name}: {error}; {REMEDY}") from error

    def count(self, key: str, default: int | None, least: int = 0) -> int | None:
        return self.value(key, Annotated[int, Meta(ge=least)], default)

    def tokens(self, key: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Return ids of tokens, each once; the file has one id or a list."""
        several = isinstance(self.values.get(key), list)
        ids = self.value(key, tuple[self.token_id, ...] if several else self.token_id, ())
        return tuple(dict.fromkeys(ids if isinstance(ids, tuple) else (ids,))) or default


def _max_new_tokens(read: _Reader, config: TransformerConfig) -> int:
    """Return the most tokens after the start token, which `max_length` counts."""
    # Beyond the position table transformers fails.
    most = config.max_length if config.has_position_table else math.inf
    new_tokens = read.count("max_new_tokens", None, least=1)
    if new_tokens is None:
        max_length = read.count("max_length", None, least=2)
        if max_length is None:  # the position table bounds the start token and the default
            return int(min(DEFAULT_NEW_TOKENS, max(1, most - 1)))
        new_tokens = max_length - 1
    return int(min(new_tokens, most))


def _min_new_tokens(read: _Reader, max_new_tokens: int, forced_end: bool) -> int:
    """Return the fewest tokens between the start token (counted by `min_length`) and EOS."""
    new_tokens = read.count("min_new_tokens", None)
    key = "min_length" if new_tokens is None else "min_new_tokens"
    if new_tokens is None:
        new_tokens = max(0, read.count("min_length", 0) - 1)
    if new_tokens < max_new_tokens:
        return new_tokens
    if forced_end:  # which is stronger
        return max_new_tokens - 1
    raise read.refusal(key, f"must leave room for EOS among {max_new_tokens} new tokens")
