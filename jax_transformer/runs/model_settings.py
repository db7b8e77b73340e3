"""The shape of a model as settings: the fields of `TransformerConfig` that flags and YAML name."""

from collections.abc import Collection, Mapping
from typing import Any

from jax_transformer.config import SPECIAL_IDS, TransformerConfig
from jax_transformer.errors import InputError
from jax_transformer.model.checks import check_generates
from jax_transformer.tokenizers import BYTE_PAIR_IDS, Tokenizer
from jax_transformer.tokenizers.readers.library import MOST_IDS

VOCABULARY_SIZES = ("src_vocab_size", "tgt_vocab_size")
DECIDED = VOCABULARY_SIZES + SPECIAL_IDS  # by the tokenizer
# Fields that change no parameter and no output: a run that starts from a model may change them.
DROPOUT_RATES = ("dropout", "attention_dropout", "activation_dropout")


def undecided_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a model that its tokenizer does not decide."""
    return {name: value for name, value in fields.items() if name not in DECIDED}


def preset_fields(preset: str, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a preset in some sizes; fields that the preset itself names win over the sizes."""
    fields = TransformerConfig.preset(preset).to_dict()
    return undecided_fields({**fields, **sizes, **TransformerConfig.preset_fields(preset)})


def named_fields(
    model: Mapping[str, Any], preset: str | None, always: Collection[str]
) -> dict[str, Any]:
    """Return the fields to name beside the preset: those in `always`, and those that differ."""
    expected = {} if preset is None else preset_fields(preset, {})
    return {
        name: value
        for name, value in model.items()
        if name in always or name not in expected or value != expected[name]
    }


def check_model(model: Mapping[str, Any], vocab_size: int) -> TransformerConfig:
    """Return the shape of the model before there is a tokenizer of at most `vocab_size` entries."""
    fewest = len(SPECIAL_IDS) + 2  # <unk> and one character
    if vocab_size < fewest:
        raise InputError(f"vocab_size={vocab_size} must be at least {fewest}")
    if vocab_size > MOST_IDS:
        raise InputError(f"vocab_size={vocab_size} must be at most {MOST_IDS}")
    return _resolved(model, BYTE_PAIR_IDS | dict.fromkeys(VOCABULARY_SIZES, vocab_size))


def model_config(
    model: Mapping[str, Any], tokenizer: Tokenizer | TransformerConfig
) -> TransformerConfig:
    """Return the shape of the model, with the vocabulary of a tokenizer or of another config."""
    return _resolved(model, {name: getattr(tokenizer, name) for name in DECIDED})


def check_same_model(
    model: Mapping[str, Any], preset: str | None, config: TransformerConfig, name: str
) -> None:
    """Refuse settings of another model than `config`, which messages call `name`."""
    kept = {field for field in config.to_dict() if field not in DROPOUT_RATES}
    by_preset = {} if preset is None else TransformerConfig.preset_fields(preset)
    for field in sorted(kept & by_preset.keys() - {*DECIDED}):
        if by_preset[field] != getattr(config, field):
            raise InputError(
                f"preset={preset!r} has {field}={by_preset[field]!r}, but the model in {name} has "
                f"{getattr(config, field)!r}; leave preset out"
            )
    for field in sorted(kept):
        value = getattr(config, field)
        if model.get(field, value) != value:
            raise InputError(
                f"{field}={model[field]!r} is not that of the model in {name}, which has "
                f"{value!r}; leave {field} out"
            )


def _resolved(model: Mapping[str, Any], by_tokenizer: Mapping[str, int]) -> TransformerConfig:
    decided = {name: by_tokenizer[name] for name in DECIDED}
    for name, value in decided.items():
        if model.get(name, value) != value:
            remedy = " or set vocab_size" if name in VOCABULARY_SIZES else ""
            raise InputError(
                f"{name}={model[name]} contradicts the tokenizer, which has {value}; leave {name} "
                f"out{remedy}"
            )
    config = TransformerConfig(**{**model, **decided})
    check_generates(config)
    return config
