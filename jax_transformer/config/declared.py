"""Dataclasses whose fields are declared with types and ranges, and the one check of their values.

A field is `Annotated[int, Meta(ge=1)]`, `Literal` choices, a tuple of these or a path, each perhaps
with `| None`. Values may come from Python, from JSON or YAML, or as text from flags.
"""

import contextlib
import dataclasses
import difflib
import functools
import inspect
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np
from msgspec import ValidationError, convert
from msgspec.inspect import (
    FloatType,
    IntType,
    LiteralType,
    NoneType,
    Type,
    UnionType,
    VarTupleType,
    type_info,
)

from jax_transformer.errors import InputError, shorten

# What other programs call a setting.
ALSO_CALLED = {
    "beam": "beam_size num_beams beams",
    "beam_size": "beam num_beams beams",
    "clip_norm": "clip max_grad_norm grad_clip gradient_clip_val",
    "columns": "tsv_columns source_column target_column",
    "compute_dtype": "bf16 fp16 precision amp",
    "d_ff": "ffn_dim intermediate_size dim_feedforward feedforward_size hidden_dim",
    "d_model": "hidden_size dim model_dim emb_dim embed_dim rnn_size",
    "dtype": "compute_dtype precision bf16 fp16",
    "evaluation_interval": "save_every save_steps save_interval eval_every eval_steps valid_freq",
    "init": "model_name_or_path pretrained finetune_from checkpoint",
    "input": "src source file",
    "label_smoothing": "label_smoothing_factor",
    "learning_rate": "lr",
    "max_length": "max_len seq_len sequence_length block_size",
    "max_tokens": "batch batch_size train_batch_size per_device_train_batch_size",
    "mesh": "device devices gpus num_gpus cuda tpu",
    "num_encoder_layers": "num_layers layers n_layers encoder_layers depth",
    "num_heads": "heads n_heads nhead num_attention_heads",
    "num_microbatches": "gradient_accumulation_steps accumulate update_freq accum_count",
    "output": "output_dir save_dir out model_dir",
    "patience": "early_stopping early_stopping_patience",
    "schedule": "scheduler lr_scheduler lr_scheduler_type",
    "source": "train_file train_source src train_src",
    "steps": "epochs num_epochs num_train_epochs max_steps max_update train_steps",
    "target": "train_target tgt train_tgt",
    "warmup_steps": "warmup warmup_updates num_warmup_steps",
}


def checked(name: str, value: Any, declared: Any, *, text: bool = False) -> Any:
    """Return a value as the declared type: NumPy's numbers as Python's, lists as tuples.

    Args:
        declared: The type, with its range.
        text: Whether a text may stand for a number or for None: flags are text.
    """
    plain = value.tolist() if isinstance(value, np.generic | np.ndarray) else value
    if text and plain == "None" and type(None) in get_args(declared):
        return None
    try:
        converted = convert(plain, declared, strict=not text, dec_hook=_path)
    except (ValidationError, RecursionError) as error:
        item = str(error).partition("at `$")[2].rstrip("`")  # of a list, such as [1]
        raise _refusal(name, value, declared, text, item) from error
    numbers = converted if isinstance(converted, tuple) else (converted,)
    if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
        raise _refusal(name, value, declared, text)
    return converted


def _refusal(name: str, value: Any, declared: Any, text: bool, item: str = "") -> InputError:
    wanted, remedy = _wanted(type_info(declared)), f"; {name}{item} is not" * bool(item)
    if text and isinstance(value, str):
        for kind in (float, int):  # a number is shown without quotes
            with contextlib.suppress(ValidationError):
                value = convert(value, kind, strict=False)
    elif isinstance(value, str) and "finite number" in wanted:
        remedy = "; write 1.0e-3, not 1e-3"  # in YAML 1.1 a number with an exponent has a point
    return InputError(f"{name}={shorten(value)} must be {wanted}{remedy}")


def check_fields(settings: Any) -> None:
    """Check every field of a frozen dataclass, on its construction, and store it as declared."""
    for name, declared in declarations(type(settings)).items():
        object.__setattr__(settings, name, checked(name, getattr(settings, name), declared))


def differing_fields(settings: Any) -> dict[str, Any]:
    """Return the fields of a dataclass whose values are not their defaults, by name."""
    named = ((each, getattr(settings, each.name)) for each in dataclasses.fields(settings))
    return {  # an array, perhaps a traced one, is not compared
        each.name: value
        for each, value in named
        if type(value) is not type(each.default) or value != each.default
    }


def short_repr(settings: Any) -> str:
    """Return the call that makes a dataclass, with what differs from the defaults: a `__repr__`."""
    named = (f"{name}={value!r}" for name, value in differing_fields(settings).items())
    return f"{type(settings).__name__}({', '.join(named)})"


def checked_fields(
    settings: type, values: Any, prefix: str = "", *, text: bool = False
) -> dict[str, Any]:
    """Return a mapping's values as the fields of a dataclass are declared.

    Whether they fit together is checked on construction.

    Args:
        prefix: What stands before each name in a message.
    """
    declared = declarations(settings)
    check_names(check_mapping(values, prefix), declared, prefix)
    return {
        name: checked(f"{prefix}{name}", value, declared[name], text=text)
        for name, value in values.items()
    }


def check_mapping(values: Any, prefix: str = "") -> dict[str, Any]:
    """Return a mapping from names; refuse what is not one."""
    if not isinstance(values, Mapping):
        raise InputError(f"{prefix}must map names of settings to values, but is {shorten(values)}")
    for name in values:
        if not isinstance(name, str):
            raise InputError(f"{prefix}the name {shorten(name)} of a setting must be text")
    return dict(values)


def check_names(values: Mapping[str, Any], declared: Collection[str], prefix: str = "") -> None:
    """Refuse a name that is not declared; the message has the nearest one."""
    for name, value in values.items():
        if name not in declared:
            shown = shorten(name).strip("'")
            near = meant(shown, declared)
            hint = f"did you mean {near}?" if near else f"the settings are {', '.join(declared)}"
            raise InputError(f"{prefix}{shown}={shorten(value)} is not a setting; {hint}")


def meant(name: str, declared: Collection[str]) -> str | None:
    """Return the declared name that another program's or a misspelt name stands for."""
    names = [each for each, others in ALSO_CALLED.items() if name in others.split()]
    names += difflib.get_close_matches(name, declared, n=1, cutoff=0.75)
    return next((each for each in names if each in declared), None)


@functools.cache
def declarations(settings: type) -> dict[str, Any]:
    """Return the declared type of every field of a dataclass by name; its metadata has it first."""
    declared = {}
    for base in reversed(settings.__mro__):
        # `typing.get_type_hints` would give nothing under typing.no_type_check.
        declared |= inspect.get_annotations(base, eval_str=True)
    for each in dataclasses.fields(settings):
        declared[each.name] = each.metadata.get("declared", declared[each.name])
    return declared


def _path(declared: type, value: Any) -> Any:
    if declared is Path and isinstance(value, str | Path):
        return Path(value)
    raise ValidationError


def _wanted(kind: Type) -> str:
    """Return a declared type in words."""
    match kind:
        case UnionType(types=kinds):
            nones_last = sorted(kinds, key=lambda kind: isinstance(kind, NoneType))
            return " or ".join(map(_wanted, nones_last))
        case LiteralType(values=values):
            words = ", ".join(map(repr, values))
            return f"one of {words}" if len(values) > 1 else words
        case VarTupleType(item_type=item, min_length=least):
            return f"a list{' that is not empty' if least else ''}, each item {_wanted(item)}"
        case IntType():
            return f"a whole number{_range(kind)}"
        case FloatType():
            return f"a finite number{_range(kind)}"
    words = {"NoneType": "None", "BoolType": "True or False", "StrType": "a text"}
    return words.get(type(kind).__name__, "a path")


def _range(kind: IntType | FloatType) -> str:
    ends = {"at least": kind.ge, "above": kind.gt, "at most": kind.le, "below": kind.lt}
    words = [f"{word} {end}" for word, end in ends.items() if end is not None]
    return f", {' and '.join(words)}" if words else ""
