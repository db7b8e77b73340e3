"""torch.nn.Transformer and its parts: their layouts, and the config that a module implies.

A state_dict does not record heads, epsilon, activation or norm placement. `torch_nn_config` reads
them from the module.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.table import Layout, Row, transpose
from jax_transformer.convert.transfer import FREE_FIELDS
from jax_transformer.errors import InputError

if TYPE_CHECKING:
    from torch import nn

PROJECTIONS = ("query", "key", "value", "output")


def transformer(prefix: str = "") -> Layout:
    """Return the layout of torch.nn.Transformer, bare or inside a module.

    Args:
        prefix: What precedes its names inside a module, for example "transformer.".
    """
    encoder = _stack("encoder", f"{prefix}encoder.", "encoder/")
    return Layout("torch_nn", (*encoder, *_stack("decoder", f"{prefix}decoder.", "decoder/")))


def part(stack: str) -> Layout:
    """Return the layout of torch.nn.TransformerEncoder or TransformerDecoder alone."""
    return Layout(f"torch_nn_{stack}", tuple(_stack(stack, "", "")), scope=stack)


def attention(scope: str = "encoder/layers_0/self_attention") -> Layout:
    """Return the layout of torch.nn.MultiheadAttention, for the attention at `scope`."""
    return Layout("torch_nn_attention", tuple(_attention("", "")), scope=scope)


def linear(foreign: str, path: str, when: tuple[str, Any] | None = None) -> list[Row]:
    """Return the rows of a torch.nn.Linear called `foreign` for the projection at `path`."""
    return [
        Row(f"{foreign}.weight", f"{path}/kernel", transpose, when=when),
        Row(f"{foreign}.bias", f"{path}/bias", when=when),
    ]


def norm(foreign: str, path: str, leaves: tuple[str, str] = ("weight", "bias")) -> list[Row]:
    """Return the rows of a norm whose foreign module has these names for its scale and its bias."""
    scale, bias = leaves
    return [Row(f"{foreign}.{scale}", f"{path}/scale"), Row(f"{foreign}.{bias}", f"{path}/bias")]


def table_rows(source: str, target: str, output: str) -> list[Row]:
    """Return the rows of two tables that may be one, and of an output that may be tied to them.

    Args:
        source: The foreign module of the source's table; so `target`, and `output` of the Linear.
    """
    tied = ("output_projection", "tied")
    return [
        Row(f"{source}.weight", "token_embedding/embedding"),
        Row(f"{target}.weight", "token_embedding/embedding"),
        Row(f"{output}.weight", "token_embedding/embedding", when=tied),
        Row(f"{source}.weight", "source_embedding/embedding"),
        Row(f"{target}.weight", "target_embedding/embedding"),
        Row(f"{output}.weight", "target_embedding/embedding", when=tied),
        *linear(output, "output_projection"),
    ]


def layer_rows(
    foreign: str,
    stack: str,
    attentions: Mapping[str, tuple[str, str]],
    projections: Sequence[str],
    feed_forward: tuple[str, str, str],
    norm_leaves: tuple[str, str] = ("weight", "bias"),
) -> list[Row]:
    """Return the rows of a stack's layers, which `foreign` lists, and whose products are Linears.

    Args:
        attentions: The foreign modules of each attention and of its norm, by our name.
        projections: Modules of query, key, value and output in those of the attentions.
        feed_forward: Modules of the inner and the outer product, and of their norm.
    """
    foreign, path = f"{foreign}.{{i}}", f"{stack}/layers_{{i}}"
    inner, outer, last_norm = feed_forward
    rows = [
        *linear(f"{foreign}.{inner}", f"{path}/feed_forward/inner"),
        *linear(f"{foreign}.{outer}", f"{path}/feed_forward/outer"),
        *norm(f"{foreign}.{last_norm}", f"{path}/feed_forward_residual/norm", norm_leaves),
    ]
    for attention, (module, its_norm) in attentions.items():
        rows += norm(f"{foreign}.{its_norm}", f"{path}/{attention}_residual/norm", norm_leaves)
        for projection, name in zip(PROJECTIONS, projections, strict=True):
            rows += linear(f"{foreign}.{module}.{name}", f"{path}/{attention}/{projection}")
    return rows


def torch_nn_config(module: nn.Module) -> TransformerConfig:
    """Return the config of `module`: a torch.nn.Transformer, or an encoder or decoder of torch.nn.

    The stack that a single encoder or decoder lacks has one layer in the config.

    Raises:
        InputError: The module is of another class (names the part of it to pass, where it holds
            a torch.nn.Transformer), or has a setting that the model cannot have.
    """
    from torch import nn

    if type(module) is nn.Transformer:
        stacks = {"encoder": module.encoder, "decoder": module.decoder}
    elif type(module) is nn.TransformerEncoder:
        stacks = {"encoder": module}
    elif type(module) is nn.TransformerDecoder:
        stacks = {"decoder": module}
    else:
        raise InputError(_wrong_class(module))
    agreed: dict[str, Any] = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    agreed |= {f"num_{side}_layers": len(stack.layers) for side, stack in stacks.items()}
    final_norms = [stack.norm is not None for stack in stacks.values()]
    agreed["final_norm"] = final_norms[0]
    if final_norms[-1] != final_norms[0]:
        agreed["decoder_final_norm"] = final_norms[-1]
    for side, stack in stacks.items():
        for part, fields in _stack_fields(side, stack):
            for name, value in fields.items():
                if agreed.setdefault(name, value) != value:
                    raise InputError(
                        f"{part}: {name}={value!r}, but {agreed[name]!r} elsewhere in the module; "
                        "the model has one for all"
                    )
    decoder = agreed.pop("decoder_norm_placement", None)
    if decoder not in (None, agreed.setdefault("norm_placement", decoder)):
        agreed["decoder_norm_placement"] = decoder
    return TransformerConfig.from_dict(TransformerConfig.preset_fields("torch_nn") | agreed)


def torch_nn_module(config: TransformerConfig) -> nn.Transformer:
    """Return a torch.nn.Transformer of `config`, for tensors [batch, length, d_model].

    Its weights are random; load those of `to_torch(params, config, "torch_nn")` into it.

    Raises:
        InputError: torch.nn.Transformer cannot be such a model.
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
        warnings.filterwarnings("ignore", message="enable_nested_tensor")  # no fault of the caller
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
    for layer in module.decoder.layers:
        layer.norm_first = config.norm_placement_of("decoder") == "pre"
    if not config.final_norm:
        module.encoder.norm = None
    if not config.decoder_has_final_norm:
        module.decoder.norm = None
    possible = torch_nn_config(module).explicit()
    for name, value in config.explicit().items():
        free = name in FREE_FIELDS or name.endswith("vocab_size")
        if not free and possible[name] != value:
            raise InputError(f"{name}={value!r}, but torch.nn.Transformer has {possible[name]!r}")
    return module


def _attention(foreign: str, path: str) -> list[Row]:
    projections = ("query", "key", "value")
    return [
        Row(f"{foreign}in_proj_weight", tuple(f"{path}{p}/kernel" for p in projections), transpose),
        Row(f"{foreign}in_proj_bias", tuple(f"{path}{p}/bias" for p in projections)),
        *linear(f"{foreign}out_proj", f"{path}output"),
    ]


def _stack(stack: str, foreign: str, path: str) -> list[Row]:
    foreign_layer, layer = f"{foreign}layers.{{i}}", f"{path}layers_{{i}}"
    attentions = {"self_attention": "self_attn"}
    if stack == "decoder":
        attentions["cross_attention"] = "multihead_attn"
    rows = [
        *linear(f"{foreign_layer}.linear1", f"{layer}/feed_forward/inner"),
        *linear(f"{foreign_layer}.linear2", f"{layer}/feed_forward/outer"),
        *norm(f"{foreign}norm", f"{path}norm"),
    ]
    for attention, module in attentions.items():
        rows += _attention(f"{foreign_layer}.{module}.", f"{layer}/{attention}/")
    for number, block in enumerate((*attentions, "feed_forward"), 1):
        rows += norm(f"{foreign_layer}.norm{number}", f"{layer}/{block}_residual/norm")
    return rows


def _wrong_class(module: nn.Module) -> str:
    from torch import nn

    message = f"{type(module).__name__} is no torch.nn.Transformer or stack of one"
    for name, part in module.named_modules() if isinstance(module, nn.Module) else ():
        if type(part) is nn.Transformer:
            return (
                f"{message}, but holds one: pass module.{name}, and for its weights the layout "
                f'torch_nn.transformer(prefix="{name}.") of jax_transformer.convert.layouts'
            )
        if type(part) in (nn.TransformerEncoder, nn.TransformerDecoder):
            return f"{message}, but holds a stack: pass module.{name}"
    return message


def _stack_fields(side: str, stack: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each part of a stack with the fields of the config that it determines."""
    from torch import nn

    layer_type = nn.TransformerEncoderLayer if side == "encoder" else nn.TransformerDecoderLayer
    if stack.norm is not None:
        yield f"{side}.norm", _module_fields(f"{side}.norm", stack.norm)
    for index, layer in enumerate(stack.layers):
        part = f"{side}.layers.{index}"
        if type(layer) is not layer_type:
            raise InputError(f"{part} is a {type(layer).__name__}, not a {layer_type.__name__}")
        fields = {"d_model": layer.linear1.in_features, "d_ff": layer.linear1.out_features}
        fields |= {"activation": _activation(layer.activation)}
        placement = "norm_placement" if side == "encoder" else "decoder_norm_placement"
        fields |= {placement: "pre" if layer.norm_first else "post"}
        yield part, fields | {"activation_dropout": layer.dropout.p}
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


def _activation(activation: object) -> str:
    from torch import nn

    function, approximate = activation, getattr(activation, "approximate", "none")
    if isinstance(activation, functools.partial):
        function, approximate = activation.func, activation.keywords.get("approximate", "none")
    for name, kind in {"relu": nn.ReLU, "silu": nn.SiLU, "gelu": nn.GELU}.items():
        if function is getattr(nn.functional, name) or isinstance(function, kind):
            return "gelu_tanh" if name == "gelu" and approximate == "tanh" else name
    raise InputError(f"activation={activation!r} must be relu, gelu or silu")
