"""The tree of parameters, declared once: paths, shapes, mesh axes, weight decay and config fields.

A path joins the keys of the nested dict by slashes; "{i}" in it stands for the number of a layer.
The blocks in `layers` and `transformer` make these parameters; everything else reads them here.
"""

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import InputError
from jax_transformer.runtime.sharding import has_our_axes

Shape = tuple[int, ...]
LAYER = re.compile(r"\blayers_(\d+)\b")
STACKS = ("encoder", "decoder")

# Lengths that are not a field or a property of the config. A shared projection serves all heads.
LENGTHS: dict[str, Callable[[TransformerConfig], int]] = {
    "heads": lambda config: config.num_heads * config.head_dim,
    "projected": lambda config: config.head_dim if _is_shared(config) else config.d_model,
    "projected_heads": lambda config: config.head_dim * UNITS["projected_heads"](config),
    "positions": lambda config: config.max_length + config.position_offset,
}
# Lengths of which a mesh axis splits larger units than single elements: their number.
UNITS: dict[str, Callable[[TransformerConfig], int]] = {
    "heads": lambda config: config.num_heads,
    "projected_heads": lambda config: 1 if _is_shared(config) else config.num_heads,
}


class Parameter(NamedTuple):
    """A parameter of some config, or that parameter of every layer of a stack.

    Attributes:
        lengths: A field or property of the config, or a key of `LENGTHS`, for each axis.
        needs: The fields, and their values, of the configs that have it.
        axes: The mesh axis that splits each axis; () is replicated, as all small parameters are.
        decayed: Whether weight decay shrinks it.
    """

    path: str
    lengths: tuple[str, ...]
    needs: dict[str, Any]
    axes: tuple[str, ...] = ()
    decayed: bool = False

    def shape(self, config: TransformerConfig) -> Shape:
        """Return its shape."""
        return tuple(
            LENGTHS[name](config) if name in LENGTHS else getattr(config, name)
            for name in self.lengths
        )

    def units(self, config: TransformerConfig) -> list[tuple[str, int]]:
        """Return the mesh axis of each axis that one splits, and the number of units to split."""
        return [
            (axis, UNITS[name](config) if name in UNITS else length)
            for axis, name, length in zip(self.axes, self.lengths, self.shape(config), strict=False)
        ]

    def count(self, config: TransformerConfig) -> int:
        """Return the number of layers that have it; 1 outside of the stacks."""
        stack = self.path.partition("/")[0]
        return getattr(config, f"num_{stack}_layers") if "{i}" in self.path else 1


def _is_shared(config: TransformerConfig) -> bool:
    return config.head_projection == "shared"


def _linear(
    path: str, lengths: tuple[str, str], axes: tuple[str, str], bias: str, **needs: Any
) -> Iterator[Parameter]:
    """Yield a kernel and its bias, which the field `bias` of the config gives."""
    yield Parameter(f"{path}/kernel", lengths, needs, axes, decayed=True)
    split = axes[1:] if axes[1] == "tensor" else ()
    yield Parameter(f"{path}/bias", lengths[1:], needs | {bias: True}, split)


def _norm(path: str, **needs: Any) -> Iterator[Parameter]:
    yield Parameter(f"{path}/scale", ("d_model",), needs)
    yield Parameter(f"{path}/bias", ("d_model",), needs | {"norm_bias": True})


def _table(path: str, lengths: tuple[str, str], *axes: str, **needs: Any) -> Parameter:
    return Parameter(f"{path}/embedding", lengths, needs, axes, decayed=True)


COLUMNS, ROWS = ("fsdp", "tensor"), ("tensor", "fsdp")
# The first product of a sublayer is split by columns, the second by rows: no communication between.


def _attention(path: str) -> Iterator[Parameter]:
    for name in ("query", "key", "value"):
        yield from _linear(f"{path}/{name}", ("projected", "projected_heads"), COLUMNS, "qkv_bias")
    yield from _linear(f"{path}/output", ("heads", "d_model"), ROWS, "attention_output_bias")
    yield from _norm(f"{path}_residual/norm")


def _feed_forward(path: str) -> Iterator[Parameter]:
    inner, bias = (("d_model", "d_ff"), COLUMNS), "feed_forward_bias"
    yield from _linear(f"{path}/inner", *inner, bias)
    yield from _linear(f"{path}/gate", *inner, bias, gated_feed_forward=True)
    yield from _linear(f"{path}/outer", ("d_ff", "d_model"), ROWS, bias)
    yield from _norm(f"{path}_residual/norm")


def _relative_bias(path: str, kind: str) -> Parameter:
    lengths = ("relative_attention_num_buckets", "num_heads")
    needs = {"positions": "relative", "relative_attention_bias": kind}
    return _table(f"{path}/relative_attention_bias", lengths, **needs)


def _stack(stack: str) -> Iterator[Parameter]:
    layer = f"{stack}/layers_{{i}}"
    yield from _attention(f"{layer}/self_attention")
    yield _relative_bias(layer, "per_layer")
    if stack == "decoder":
        yield from _attention(f"{layer}/cross_attention")
        yield from _norm(f"{layer}/memory_norm", memory_norm=True)
    yield from _feed_forward(f"{layer}/feed_forward")
    yield _relative_bias(stack, "shared")
    final = "final_norm" if stack == "encoder" else "decoder_final_norm"
    yield from _norm(f"{stack}/norm", **{final: True})


def _model() -> Iterator[Parameter]:
    size = ("tgt_vocab_size", "d_model")
    yield _table("token_embedding", size, *ROWS, token_embeddings="shared")
    for side, vocabulary in (("source", "src_vocab_size"), ("target", "tgt_vocab_size")):
        size = (vocabulary, "d_model")
        yield _table(f"{side}_embedding", size, *ROWS, token_embeddings="separate")
        yield _table(f"{side}_positions", ("positions", "d_model"), positions="learned")
        yield from _norm(f"{side}_embedding_norm", embedding_norm=True)
    for stack in STACKS:
        yield from _stack(stack)
    size = ("d_model", "tgt_vocab_size")
    kernel, bias = _linear("output_projection", size, COLUMNS, "output_bias")
    yield kernel._replace(needs={"output_projection": "linear"})
    yield bias  # also beside a tied table


PARAMETERS = {parameter.path: parameter for parameter in _model()}


def lacking(parameter: Parameter, config: TransformerConfig) -> dict[str, Any]:
    """Return the fields, and their values, that the config would need to have a parameter."""
    fields = config.explicit()
    return {name: value for name, value in parameter.needs.items() if fields[name] != value}


def parameters_of(config: TransformerConfig) -> list[Parameter]:
    """Return the parameters that a config has."""
    return [parameter for parameter in PARAMETERS.values() if not lacking(parameter, config)]


def parameter_count(config: TransformerConfig) -> int:
    """Return the number of elements of all parameters; a shared table counts once."""
    return sum(p.count(config) * math.prod(p.shape(config)) for p in parameters_of(config))


def parameter_shapes(config: TransformerConfig, scope: str = "") -> dict[str, Shape]:
    """Return the shape of every parameter by its path, in the order of the paths' keys.

    Args:
        scope: Path of a part of the parameters; the paths of the result begin there.
    """
    inside = f"{scope}/" if scope else ""
    shapes = {
        path.removeprefix(inside): shape
        for path, shape in _all_shapes(config)
        if path.startswith(inside)
    }
    if not shapes:
        raise InputError(f"scope={scope!r} holds no parameter of this config")
    return shapes


@functools.lru_cache
def _all_shapes(config: TransformerConfig) -> tuple[tuple[str, Shape], ...]:
    shapes = {
        parameter.path.replace("{i}", str(layer)): parameter.shape(config)
        for parameter in parameters_of(config)
        for layer in range(parameter.count(config))
    }
    return tuple(sorted(shapes.items(), key=lambda item: item[0].split("/")))


def find_parameter(path: str) -> Parameter | None:
    """Return the parameter that a path ends as, None where there is none.

    Adam moments and the EMA have the paths of their parameters, behind a prefix.
    """
    keys = LAYER.sub("layers_{i}", path).split("/")
    ends = ("/".join(keys[start:]) for start in range(len(keys)))
    return next((PARAMETERS[end] for end in ends if end in PARAMETERS), None)


def decayed(params: Mapping[str, Any]) -> Any:
    """Return which parameters weight decay shrinks, a tree of the same structure."""
    return jax.tree_util.tree_map_with_path(lambda path, _: _found(path).decayed, params)


def parameter_shardings(
    mesh: Mesh | AbstractMesh, params: Any, config: TransformerConfig | None = None
) -> Any:
    """Return where each array of a tree lies on a mesh, a tree of the same structure.

        mesh = jax_transformer.make_mesh("data=2,fsdp=2")
        params = jax.device_put(params, jax_transformer.parameter_shardings(mesh, params, config))
        with jax.set_mesh(mesh):
            logits = jax_transformer.apply(params, config, src, tgt)

    A dimension that its mesh axis does not divide is not split.

    Args:
        mesh: The devices, as `make_mesh` returns them.
        params: Arrays, or their shapes: parameters, the optimizer's state, all of a training state.
        config: The shape of the model: the axis "tensor" then splits whole heads only. None splits
            by the lengths of the arrays alone.

    Raises:
        InputError: The mesh has other axes than those of `make_mesh`.
    """
    if not has_our_axes(mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh):
        raise InputError(
            f"mesh with the axes {mesh.axis_names} and {mesh.axis_types} must be one of "
            'jax_transformer.make_mesh, as make_mesh("data=-1")'
        )

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        parameter = _found(path)
        if parameter is None:
            units = []
        elif config is None:
            units = list(zip(parameter.axes, leaf.shape, strict=False))
        else:
            units = parameter.units(config)
        axes = [axis if count % mesh.shape[axis] == 0 else None for axis, count in units]
        return NamedSharding(mesh, PartitionSpec(*axes))

    return jax.tree_util.tree_map_with_path(place, params)


def undivided(mesh: Mesh | AbstractMesh, config: TransformerConfig) -> Iterator[str]:
    """Yield a line for each mesh axis that does not divide the dimensions it should split."""
    units = [
        unit
        for parameter in parameters_of(config)
        for unit in parameter.units(config) * parameter.count(config)
    ]
    for axis, size in mesh.shape.items():
        odd = [count for split, count in units if split == axis and count % size]
        if odd:
            numbers = ", ".join(map(str, sorted(set(odd))))
            count = f"{len(odd)} parameters are not split over it"
            yield f"{axis}={size} does not divide {numbers}: {count}"


def shard_parameters(params: Any, config: TransformerConfig) -> Any:
    """Return parameters, cast ones for example, split as `parameter_shardings` places them.

    Without this, XLA may gather a parameter before its cast, at twice the bytes. Without a mesh of
    `make_mesh` this function is the identity.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not has_our_axes(mesh):
        return params
    places = parameter_shardings(mesh, params, config)
    return jax.tree.map(jax.lax.with_sharding_constraint, params, places)


def _found(path: tuple[Any, ...]) -> Parameter | None:
    return find_parameter(jax.tree_util.keystr(path, simple=True, separator="/"))
