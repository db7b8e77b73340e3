"""Weights from torch and back: state_dict <-> params by a layout.

A layout is named by one of `layouts()`, is a `Layout` of `Row`s that the caller writes, or is the
path of a TOML file that holds one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.adam import adam_from_torch, adam_to_torch
from jax_transformer.convert.adaptation import adapt
from jax_transformer.convert.buffers import PositionTable
from jax_transformer.convert.huggingface import from_huggingface, to_huggingface
from jax_transformer.convert.layout_file import LayoutFile, read_layout, write_layout
from jax_transformer.convert.layouts.torch_nn import torch_nn_config, torch_nn_module
from jax_transformer.convert.layouts.torch_nn_model import ModuleDescription, torch_nn_model
from jax_transformer.convert.named_layouts import get_layout, layouts
from jax_transformer.convert.report import ConversionError, Report
from jax_transformer.convert.table import Buffer, Layout, Operation, Row, identity, transpose
from jax_transformer.convert.transfer import (
    ConfigMismatch,
    check_config,
    jax_leaf,
    to_params,
    to_tensors,
)
from jax_transformer.errors import naming_the_extra
from jax_transformer.storage import weights as weight_files
from jax_transformer.storage.weights.arrays import as_torch
from jax_transformer.storage.weights.checks import WeightFileError

if TYPE_CHECKING:
    import torch

__all__ = [
    "Buffer",
    "ConfigMismatch",
    "ConversionError",
    "Layout",
    "LayoutFile",
    "ModuleDescription",
    "Operation",
    "PositionTable",
    "Report",
    "Row",
    "WeightFileError",
    "adam_from_torch",
    "adam_to_torch",
    "adapt",
    "from_huggingface",
    "from_torch",
    "get_layout",
    "identity",
    "layouts",
    "read_layout",
    "to_huggingface",
    "to_params",
    "to_tensors",
    "to_torch",
    "torch_nn_config",
    "torch_nn_model",
    "torch_nn_module",
    "transpose",
    "weight_files",
    "write_layout",
]


def from_torch(
    state_dict: Mapping[str, Any],
    config: TransformerConfig,
    layout: str | os.PathLike | Layout = "reference",
    *,
    dtype: str | None = None,
    strip_prefixes: Sequence[str] = (),
    allow_nonfinite: bool = False,
    buffers: bool = True,
    metadata: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the parameters in a state_dict, as a nested dict of jax arrays.

    Gradients are read in the same way, by the names of their parameters and with `buffers=False`;
    `adam_from_torch` reads the state of Adam. `to_params` also returns a report.

    Args:
        state_dict: Tensors by name, of torch, numpy or jax.
        config: The shape of the model.
        layout: The names and shapes in the state_dict, as in `get_layout`.
        dtype: Floating-point type to convert to; None keeps that of each tensor.
        strip_prefixes: Prefixes that are removed from the names that begin with them.
        allow_nonfinite: Whether NaN and infinity are read.
        buffers: Whether `state_dict` has the layout's computed buffers.
        metadata: Fields of the config that are saved with the weights; `config` must agree.

    Returns:
        The parameters of the layout's scope; they share no memory with the state_dict.

    Raises:
        ConfigMismatch: The metadata differ from the config.
        ConversionError: The tensors do not fit; its report lists every fault.
        InputError: The layout is unknown, `state_dict` is a path or a module, or tensors are
            float64 and jax runs without jax_enable_x64.
    """
    if metadata is not None:
        check_config(config, metadata)
    params, _ = to_params(
        state_dict,
        config,
        get_layout(layout),
        dtype=dtype,
        strip_prefixes=strip_prefixes,
        allow_nonfinite=allow_nonfinite,
        buffers=buffers,
        leaf=jax_leaf(),
    )
    return params


def to_torch(
    params: Mapping[str, Any],
    config: TransformerConfig,
    layout: str | os.PathLike | Layout = "reference",
    *,
    dtype: str | None = None,
    allow_nonfinite: bool = False,
    buffers: bool | Mapping[str, Any] = True,
) -> dict[str, torch.Tensor]:
    """Return the state_dict of parameters, ready for `load_state_dict(strict=True)`.

    Args:
        params: Parameters, a nested dict of arrays, as from `init_params`.
        config: The shape of the model.
        layout: The names and shapes to write, as in `get_layout`.
        dtype: Floating-point type to convert to; None keeps that of each tensor.
        allow_nonfinite: Whether NaN and infinity are written.
        buffers: Whether the layout's buffers are written, as this library computes them; or the
            state_dict whose buffers come home bit for bit.

    Returns:
        Contiguous tensors that share no memory with `params`; tied names share one tensor.

    Raises:
        ConversionError: The parameters are not those of the config, or the buffers not those of
            the layout; its report lists every fault.
        InputError: The layout is unknown, or `buffers` is no state_dict.
        ModuleNotFoundError: torch is not installed.
    """
    arrays, _ = to_tensors(
        params,
        config,
        get_layout(layout),
        dtype=dtype,
        allow_nonfinite=allow_nonfinite,
        buffers=buffers,
    )
    with naming_the_extra("convert.to_torch"):
        tensors = {id(array): as_torch(array) for array in arrays.values()}
    return {name: tensors[id(array)] for name, array in arrays.items()}
