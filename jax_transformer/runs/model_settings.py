"""The shape of a model as settings: every field of `TransformerConfig`, as flag or YAML."""

import dataclasses
import inspect
from collections.abc import Collection, Mapping
from typing import Any

from jax_transformer.config import TransformerConfig
from jax_transformer.decoding import check_generates
from jax_transformer.errors import InputError
from jax_transformer.presets import PRESETS
from jax_transformer.tokenizers import BYTE_PAIR_IDS, Tokenizer
from jax_transformer.tokenizers.readers.tokenizer_json import MOST_IDS

VOCABULARY_SIZES = ("src_vocab_size", "tgt_vocab_size")
SPECIAL_IDS = ("pad_id", "bos_id", "eos_id")
# Fields that change no parameter and no output: a run that starts from a model may change them.
DROPOUT_RATES = ("dropout", "attention_dropout", "activation_dropout")


def _model_settings() -> type:
    """Return a dataclass with the fields of `TransformerConfig`, which checks nothing itself.

    The command line's parser would hide the message of a config that refuses its values. What the
    tokenizer decides may be None here.
    """
    fields = []
    for field in dataclasses.fields(TransformerConfig):
        hint = inspect.get_annotations(TransformerConfig, eval_str=True)[field.name]
        if field.name in VOCABULARY_SIZES + SPECIAL_IDS:
            fields.append((field.name, hint | None, dataclasses.field(default=None)))
        else:
            fields.append((field.name, hint, dataclasses.field(default=field.default)))
    documented = {"__doc__": TransformerConfig.__doc__, "__module__": __name__}
    return dataclasses.make_dataclass("ModelSettings", fields, frozen=True, namespace=documented)


ModelSettings = _model_settings()


def preset_settings(preset: str, sizes: dict[str, Any]) -> ModelSettings:
    """Return a preset in some sizes; fields that the preset itself names win over the sizes.

    Raises:
        InputError: The preset is unknown.
    """
    TransformerConfig.preset(preset)  # refuses an unknown name
    fields = sizes | PRESETS[preset]
    decided_by_tokenizer = dict.fromkeys(VOCABULARY_SIZES + SPECIAL_IDS)
    return ModelSettings(**fields | decided_by_tokenizer)


def settings_of(config: TransformerConfig) -> ModelSettings:
    """Return the settings that give a config again with the same tokenizer."""
    return ModelSettings(**config.to_dict() | dict.fromkeys(VOCABULARY_SIZES + SPECIAL_IDS))


def named_fields(
    model: ModelSettings, preset: str | None, always: Collection[str]
) -> dict[str, Any]:
    """Return the fields that a settings file must name beside the preset.

    Args:
        model: The settings.
        preset: The preset that the file names; None if it names none, and so every field that the
            tokenizer does not decide.
        always: Fields to name even where they are those of the preset.
    """
    fields = dataclasses.asdict(model)
    if preset is None:
        decided = {*VOCABULARY_SIZES, *SPECIAL_IDS}
        expected = {name: None if name in decided else ... for name in fields}
    else:
        expected = dataclasses.asdict(preset_settings(preset, {}))
    return {
        name: value for name, value in fields.items() if name in always or value != expected[name]
    }


def check_model(model: ModelSettings, vocab_size: int) -> TransformerConfig:
    """Return the shape of the model as far as it is known before there is a tokenizer.

    Args:
        model: The settings.
        vocab_size: Entries that the tokenizer is to have, at most.

    Raises:
        InputError: A value is out of range, contradicts another one or the tokenizer, or the model
            is not one of token ids.
    """
    fewest = len(SPECIAL_IDS) + 2  # <unk> and one character
    if vocab_size < fewest:
        raise InputError(f"vocab_size={vocab_size} must be at least {fewest}")
    if vocab_size > MOST_IDS:
        raise InputError(f"vocab_size={vocab_size} must be at most {MOST_IDS}")
    return _resolved(model, BYTE_PAIR_IDS, (vocab_size, vocab_size))


def model_config(
    model: ModelSettings, tokenizer: Tokenizer | TransformerConfig
) -> TransformerConfig:
    """Return the shape of the model; vocabulary sizes and special ids are the tokenizer's.

    Args:
        model: The settings.
        tokenizer: The tokenizer, or the config of a model that has its tokenizer already.

    Raises:
        InputError: As `check_model`.
    """
    sizes = tokenizer.src_vocab_size, tokenizer.tgt_vocab_size
    ids = {name: getattr(tokenizer, name) for name in SPECIAL_IDS}
    return _resolved(model, ids, sizes)


def check_same_model(
    model: ModelSettings, preset: str | None, config: TransformerConfig, name: str
) -> None:
    """Refuse settings of another model than the one that a run starts from.

    Args:
        model: The settings.
        preset: The preset that was named; None if none was.
        config: The shape of the model that the run starts from.
        name: What this model is called in messages.

    Raises:
        InputError: A field other than `DROPOUT_RATES` differs; the message names both values.
    """
    kept = {field for field in config.to_dict() if field not in DROPOUT_RATES}
    by_preset = {} if preset is None else PRESETS[preset]
    for field in sorted(kept & by_preset.keys() - {*VOCABULARY_SIZES, *SPECIAL_IDS}):
        if by_preset[field] != getattr(config, field):
            raise InputError(
                f"preset={preset!r} has {field}={by_preset[field]!r}, but the model in {name} has "
                f"{getattr(config, field)!r}; leave preset out"
            )
    for field in sorted(kept):
        given, own = getattr(model, field), getattr(config, field)
        undecided = given is None and field in VOCABULARY_SIZES + SPECIAL_IDS
        if given != own and not undecided:
            raise InputError(
                f"{field}={given!r} is not that of the model in {name}, which has {own!r}; leave "
                f"{field} out"
            )


def _resolved(
    model: ModelSettings, special_ids: Mapping[str, int], sizes: tuple[int, int]
) -> TransformerConfig:
    decided = dict(zip(VOCABULARY_SIZES, sizes, strict=True))
    decided |= {name: special_ids[name] for name in SPECIAL_IDS}
    for name, value in decided.items():
        given = getattr(model, name)
        if given not in (None, value):
            remedy = " or set vocab_size" if name in VOCABULARY_SIZES else ""
            raise InputError(
                f"{name}={given} contradicts the tokenizer, which has {value}; leave {name} out"
                f"{remedy}"
            )
    config = TransformerConfig(**dataclasses.asdict(model) | decided)
    check_generates(config)
    return config
