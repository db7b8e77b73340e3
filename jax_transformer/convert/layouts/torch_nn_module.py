"""From a torch.nn.Transformer to its config and back.

The config holds what the names and shapes of the tensors do not tell.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.metadata import FREE_FIELDS
from jax_transformer.errors import InputError

if TYPE_CHECKING:
    from torch import nn


def torch_nn_config(module: nn.Module) -> TransformerConfig:
    """Return the config of a torch.nn.Transformer, TransformerEncoder or TransformerDecoder.

    Heads, epsilon, activation and norm placement leave no trace in a state_dict; they are read
    from the module. The stack that a lone encoder or decoder lacks has one layer in the config.

    Raises:
        InputError: The module is another one, or holds what the model cannot honour.
    """
    from torch import nn

    if type(module) is nn.Transformer:
        stacks = {"encoder": module.encoder, "decoder": module.decoder}
    elif type(module) is nn.TransformerEncoder:
        stacks = {"encoder": module}
    elif type(module) is nn.TransformerDecoder:
        stacks = {"decoder": module}
    else:
        raise InputError(f"{type(module).__name__} is no torch.nn.Transformer or stack of one")
    agreed: dict[str, Any] = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    agreed |= {f"num_{side}_layers": len(stack.layers) for side, stack in stacks.items()}
    for side, stack in stacks.items():
        for part, fields in _stack_fields(side, stack):
            for name, value in fields.items():
                if agreed.setdefault(name, value) != value:
                    raise InputError(
                        f"{part}: {name}={value!r}, but {agreed[name]!r} elsewhere in the module; "
                        "the model has one for all"
                    )
    return TransformerConfig.preset("torch_nn", **agreed)


def torch_nn_module(config: TransformerConfig) -> nn.Transformer:
    """Return a torch.nn.Transformer of this config, for tensors [batch, length, d_model].

    Its own random weights wait for those of `to_torch(params, config, "torch_nn")`.

    Raises:
        InputError: torch.nn.Transformer has no such model.
    """
    from torch import nn

    # Functions: where the activation is a module, torch's decoder layers fall back to ReLU.
    functions = {
        "relu": nn.functional.relu,
        "gelu": nn.functional.gelu,
        "gelu_tanh": functools.partial(nn.functional.gelu, approximate="tanh"),
        "silu": nn.functional.silu,
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="enable_nested_tensor")  # of no concern here
        module = nn.Transformer(
            d_model=config.d_model,
            nhead=config.num_heads,
            num_encoder_layers=config.num_encoder_layers,
            num_decoder_layers=config.num_decoder_layers,
            dim_feedforward=config.d_ff,
            dropout=config.dropout,
            activation=functions[config.activation],
            layer_norm_eps=config.norm_epsilon,
            batch_first=True,
            norm_first=config.norm_placement == "pre",
            bias=config.qkv_bias,
        )
    own, free = torch_nn_config(module).to_dict(), ("src_vocab_size", "tgt_vocab_size")
    for name, value in config.to_dict().items():
        if name not in (*FREE_FIELDS, *free) and own[name] != value:
            raise InputError(f"{name}={value!r}, but torch.nn.Transformer has {own[name]!r}")
    return module


def _stack_fields(side: str, stack: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each part of a stack with the fields of the config that it shows."""
    from torch import nn

    layer_type = nn.TransformerEncoderLayer if side == "encoder" else nn.TransformerDecoderLayer
    yield f"{side}.norm", {"final_norm": stack.norm is not None}
    if stack.norm is not None:
        yield f"{side}.norm", _module_fields(f"{side}.norm", stack.norm)
    for index, layer in enumerate(stack.layers):
        part = f"{side}.layers.{index}"
        if type(layer) is not layer_type:
            raise InputError(f"{part} is a {type(layer).__name__}, not a {layer_type.__name__}")
        yield (
            part,
            {
                "d_model": layer.linear1.in_features,
                "d_ff": layer.linear1.out_features,
                "activation": _activation(layer.activation),
                "norm_placement": "pre" if layer.norm_first else "post",
                "activation_dropout": layer.dropout.p,
            },
        )
        for name, module in layer.named_children():
            if name not in ("dropout", "activation"):
                yield f"{part}.{name}", _module_fields(f"{part}.{name}", module)


def _module_fields(part: str, module: nn.Module) -> dict[str, Any]:
    from torch import nn

    if type(module) is nn.LayerNorm and module.elementwise_affine:
        return {"norm_epsilon": module.eps, "norm_bias": module.bias is not None}
    if type(module) is nn.Linear:
        return {"feed_forward_bias": module.bias is not None}
    if type(module) is nn.Dropout:
        return {"dropout": module.p}
    if type(module) is nn.MultiheadAttention and not module.add_zero_attn:
        return {
            "num_heads": module.num_heads,
            "qkv_bias": module.in_proj_bias is not None,
            "attention_output_bias": module.out_proj.bias is not None,
            "attention_dropout": module.dropout,
        }
    raise InputError(f"{part}: this {type(module).__name__} has no counterpart in the model")


def _activation(function: object) -> str:
    """Return the config's name of a torch activation."""
    from torch import nn
    from torch.nn import functional

    if function is functional.relu or isinstance(function, nn.ReLU):
        return "relu"
    if function is functional.silu or isinstance(function, nn.SiLU):
        return "silu"
    if function is functional.gelu:
        return "gelu"
    if isinstance(function, nn.GELU):
        return "gelu" if function.approximate == "none" else "gelu_tanh"
    if isinstance(function, functools.partial) and function.func is functional.gelu:
        return "gelu_tanh" if function.keywords == {"approximate": "tanh"} else "gelu"
    raise InputError(f"activation={function!r} must be relu, gelu or silu")
