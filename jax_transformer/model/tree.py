"""The tree of parameters, declared once: one row for each parameter, which everything else reads.

A path joins the keys of the nested dict by slashes; "{i}" in it stands for the number of a layer.
The blocks in `layers` and `transformer` declare no shape: they compute with the parameters that
they are given.
"""

import difflib
import functools
import math
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import jax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from jax_transformer.config import TransformerConfig
from jax_transformer.config.lengths import axis_length, axis_units
from jax_transformer.errors import InputError
from jax_transformer.model import initialization
from jax_transformer.model.initialization import ONES, ZEROS, Distribution, Role
from jax_transformer.runtime.sharding import has_our_axes

Params = dict[str, Any]  # nested dicts whose leaves are arrays
Shape = tuple[int, ...]
LAYER = re.compile(r"\blayers_(\d+)\b")
STACKS = ("encoder", "decoder")
SOURCE_SIDE = ("source_", "encoder/")  # begins of paths
TARGET_SIDE = ("target_", "decoder/", "output_projection/")
# The decoder layers that have one.
SELF_ATTENTION = ("self_then_cross", "self_over_memory", "merged")
CROSS_ATTENTION = ("self_then_cross", "self_over_memory", "ssru_then_cross")
LORA_LEAVES = ("lora_a", "lora_b", "lora_scale")  # of an adapter, beside a kernel; see `adapters`
BASE = "/base_"  # before the name of a leaf that an adapter replaced whole, beside the new one
Needs = dict[str, tuple[Any, ...]]  # fields, and the values of a config that has a parameter
ALWAYS: Needs = {}


class AnyNumber(tuple):
    """All values of a field but None; its element is an example for messages."""

    def __contains__(self, value: object) -> bool:
        return value is not None


OF_SOUND: Needs = {"source_features": AnyNumber((80,))}


class Parameter(NamedTuple):
    """A parameter of some config, or that parameter of every layer of a stack.

    Attributes:
        lengths: The name of each axis' length, see `config.lengths`.
        distribution: What the elements of a new parameter are drawn from.
        needs: The fields of the configs that have it, and the values that have it.
        axes: The mesh axis that splits each axis; () is replicated, as all small parameters are.
    """

    path: str
    lengths: tuple[str, ...]
    distribution: Callable[[TransformerConfig], Distribution]
    needs: Needs
    axes: tuple[str, ...] = ()

    @property
    def decayed(self) -> bool:
        """Whether weight decay shrinks it: biases and norms, which have one axis, do not decay."""
        return len(self.lengths) == 2

    def shape(self, config: TransformerConfig) -> Shape:
        """Return its shape."""
        return _shape(self._sizes(config), self.lengths)

    def draw(self, key: PRNGKeyArray, config: TransformerConfig) -> Float[Array, "..."]:
        """Return a new float32 parameter."""
        kind, scale = self.distribution(self._sizes(config))
        return initialization.draw(key, kind, scale, self.shape(config))

    def units(self, config: TransformerConfig) -> list[tuple[str, int]]:
        """Return the mesh axis of each axis that one splits, and the number of units to split."""
        sizes = self._sizes(config)
        named = zip(self.axes, self.lengths, strict=False)
        return [(axis, axis_units(sizes, name)) for axis, name in named]

    def count(self, config: TransformerConfig) -> int:
        """Return the number of layers that have it; 1 outside of the stacks, 0 of no decoder."""
        if not config.num_decoder_layers and self.path.startswith(TARGET_SIDE):
            return 0
        stack = self.path.partition("/")[0]
        return getattr(config, f"num_{stack}_layers") if "{i}" in self.path else 1

    def missing_fields(self, config: TransformerConfig) -> dict[str, Any]:
        """Return the fields, and a value of each, that the config would need to have it."""
        fields = config.explicit()
        needs = self.needs.items()
        return {name: values[0] for name, values in needs if fields[name] not in values}

    def _sizes(self, config: TransformerConfig) -> TransformerConfig:
        return config.stack("encoder" if self.path.startswith(SOURCE_SIDE) else "decoder")


@functools.lru_cache
def _shape(config: TransformerConfig, lengths: tuple[str, ...]) -> Shape:
    return tuple(axis_length(config, name) for name in lengths)


def _linear(
    path: str,
    lengths: tuple[str, str],
    axes: tuple[str, str],
    bias: str | None,
    role: Role = "feed_forward",
    needs: Needs = ALWAYS,
) -> Iterator[Parameter]:
    """Yield a kernel and its bias, which the field `bias` of the config gives; None is always."""

    def of_kernel(config: TransformerConfig) -> Distribution:
        inputs, outputs = _shape(config, lengths)
        return initialization.kernel(config, inputs, outputs, role)

    def of_bias(config: TransformerConfig) -> Distribution:
        return initialization.bias(config, axis_length(config, lengths[0]), role)

    yield Parameter(f"{path}/kernel", lengths, of_kernel, needs, axes)
    split = axes[1:] if axes[1] == "tensor" else ()
    needs = needs if bias is None else needs | {bias: (True,)}
    yield Parameter(f"{path}/bias", lengths[1:], of_bias, needs, split)


def _norm(path: str, width: str = "d_model", needs: Needs = ALWAYS) -> Iterator[Parameter]:
    def of_scale(config: TransformerConfig) -> Distribution:
        return ZEROS if config.norm == "zero_centered_rms_norm" else ONES

    bias_needs = needs | {"norm_bias": (True,)}
    yield Parameter(f"{path}/scale", (width,), of_scale, needs)
    yield Parameter(f"{path}/bias", (width,), lambda config: ZEROS, bias_needs)


def _table(
    path: str,
    lengths: tuple[str, str],
    needs: Needs,
    axes: tuple[str, ...] = (),
    drawn: Callable[[TransformerConfig, int, int], Distribution] = initialization.embedding,
) -> Parameter:
    def distribution(config: TransformerConfig) -> Distribution:
        rows, columns = _shape(config, lengths)
        return drawn(config, rows, columns)

    return Parameter(f"{path}/embedding", lengths, distribution, needs, axes)


COLUMNS, ROWS = ("fsdp", "tensor"), ("tensor", "fsdp")
# The first product of a sublayer is split by columns, the second by rows: no communication between.


def _residual(path: str, needs: Needs = ALWAYS) -> Iterator[Parameter]:
    yield from _norm(f"{path}_residual/norm", needs=needs)
    placement = "norm_placement" if path.startswith("encoder") else "decoder_norm_placement"
    sandwich = needs | {placement: ("sandwich",)}
    yield from _norm(f"{path}_residual/output_norm", needs=sandwich)


def _attention(path: str, memory: str = "projected", needs: Needs = ALWAYS) -> Iterator[Parameter]:
    """Yield the parameters of an attention whose keys and values are made of `memory`."""
    for name, lengths in (
        ("query", ("projected", "projected_heads")),
        ("key", (memory, "projected_key_heads")),
        ("value", (memory, "projected_value_heads")),
    ):
        kernel, bias = _linear(f"{path}/{name}", lengths, COLUMNS, "qkv_bias", name, needs)
        more = {"key_bias": (True,)} if name == "key" else ALWAYS
        yield from (kernel, bias._replace(needs=bias.needs | more))
    bias, role = "attention_output_bias", "attention_output"
    yield from _linear(f"{path}/output", ("heads", "d_model"), ROWS, bias, role, needs)
    for name in ("query_norm", "key_norm"):
        yield from _norm(f"{path}/{name}", "head_dim", needs | {"query_key_norm": (True,)})
    yield from _residual(path, needs)


def _recurrence(path: str) -> Iterator[Parameter]:
    """Yield the parameters of an SSRU, whose forget gate alone has a bias, in every config."""
    lengths, needs = ("d_model", "d_model"), {"decoder_attention": ("ssru_then_cross",)}
    for name in ("input", "forget"):
        kernel, bias = _linear(f"{path}/{name}", lengths, COLUMNS, bias=None, needs=needs)
        yield kernel
    yield bias._replace(distribution=lambda config: ZEROS)
    yield from _residual(path, needs)


def _feed_forward(path: str) -> Iterator[Parameter]:
    lengths, bias, gated = ("d_model", "d_ff"), "feed_forward_bias", {"gated_feed_forward": (True,)}
    yield from _linear(f"{path}/inner", lengths, COLUMNS, bias)
    yield from _linear(f"{path}/gate", lengths, COLUMNS, bias, needs=gated)
    yield from _linear(f"{path}/outer", ("d_ff", "d_model"), ROWS, bias)
    yield from _residual(path)


def _relative_bias(path: str, kind: str) -> Parameter:
    lengths = ("relative_attention_num_buckets", "num_heads")
    needs = {"positions": ("relative",), "relative_attention_bias": (kind,)}
    path = f"{path}/relative_attention_bias"
    return _table(path, lengths, needs, drawn=initialization.relative_bias)


def _stack(stack: str) -> Iterator[Parameter]:
    layer = f"{stack}/layers_{{i}}"
    has_one = {"decoder_attention": SELF_ATTENTION} if stack == "decoder" else ALWAYS
    yield from _attention(f"{layer}/self_attention", needs=has_one)
    yield _relative_bias(layer, "per_layer")
    if stack == "decoder":
        yield from _recurrence(f"{layer}/recurrence")
        has_one = {"decoder_attention": CROSS_ATTENTION}
        yield from _attention(f"{layer}/cross_attention", "projected_memory", has_one)
        yield from _norm(f"{layer}/memory_norm", "memory", {"memory_norm": (True,)})
    yield from _feed_forward(f"{layer}/feed_forward")
    yield _relative_bias(stack, "shared")
    final = "final_norm" if stack == "encoder" else "decoder_final_norm"
    yield from _norm(f"{stack}/norm", needs={final: (True,)})


def _model() -> Iterator[Parameter]:
    size = ("tgt_vocab_size", "d_model")
    yield _table("token_embedding", size, {"token_embeddings": ("shared",)}, ROWS)
    # The convolutions of sound and the head of a classifier have biases in every config.
    for number, channels in ((1, "features_by_width"), (2, "d_model_by_width")):
        path, lengths = f"source_convolution_{number}", (channels, "d_model")
        yield from _linear(path, lengths, COLUMNS, bias=None, needs=OF_SOUND)
    for side, vocabulary, more in (
        ("source", "src_vocab_size", {"source_features": (None,)}),
        ("target", "tgt_vocab_size", ALWAYS),
    ):
        size, needs = (vocabulary, "d_model"), {"token_embeddings": ("separate",), **more}
        yield _table(f"{side}_embedding", size, needs, ROWS)
        yield _table(f"{side}_positions", ("positions", "d_model"), {"positions": ("learned",)})
        yield from _norm(f"{side}_embedding_norm", needs={"embedding_norm": (True,)})
    for stack in STACKS:
        yield from _stack(stack)
    size = ("d_model", "tgt_vocab_size")
    kernel, bias = _linear("output_projection", size, COLUMNS, "output_bias", "logits")
    yield kernel._replace(needs={"output_projection": ("linear",)})
    yield bias  # also beside a tied table
    needs = {"head": ("sequence",)}
    yield from _linear("head/dense", ("d_model", "d_model"), COLUMNS, bias=None, needs=needs)
    needs = {"head": ("sequence", "token")}
    yield from _linear("head/output", ("d_model", "num_labels"), ROWS, bias=None, needs=needs)


PARAMETERS = {parameter.path: parameter for parameter in _model()}


@functools.lru_cache
def parameters_of(config: TransformerConfig) -> tuple[Parameter, ...]:
    """Return the parameters that a config has."""
    rows = (row for row in PARAMETERS.values() if row.count(config))
    return tuple([row for row in rows if not row.missing_fields(config)])


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
        for path, shape in _shapes(config).items()
        if path.startswith(inside)
    }
    if not shapes:
        raise InputError(f"scope={scope!r} holds no parameter of this config")
    return shapes


@functools.lru_cache
def _paths(config: TransformerConfig) -> dict[str, Parameter]:
    rows = {
        row.path.replace("{i}", str(layer)): row
        for row in parameters_of(config)
        for layer in range(row.count(config))
    }
    return dict(sorted(rows.items(), key=lambda item: item[0].split("/")))


@functools.lru_cache
def _shapes(config: TransformerConfig) -> dict[str, Shape]:
    return {path: row.shape(config) for path, row in _paths(config).items()}


def match_paths(setting: str, paths: Collection[str], patterns: Iterable[str]) -> set[str]:
    """Return the paths that one of the patterns of `fnmatch` matches; "*" matches "/" too.

    Raises:
        InputError: A pattern matches none; `setting` is what named it.
    """
    found: set[str] = set()
    for pattern in patterns:
        matched = [path for path in paths if fnmatchcase(path, pattern)]
        if not matched:
            nearest = difflib.get_close_matches(pattern, paths, n=3, cutoff=0.0)
            raise InputError(
                f"{setting}={pattern!r} matches no parameter; the nearest are {', '.join(nearest)}"
            )
        found.update(matched)
    return found


def filled_params(key: PRNGKeyArray, params: Params, config: TransformerConfig) -> Params:
    """Return the parameters of a config: those of another one that it has, too, the others drawn.

    A new parameter is float32, and depends on the key, its path and its shape alone.

        config, params, tokenizer, _ = jax_transformer.load("bart-base")
        config = config.with_head("sequence", labels=["no", "yes"])
        params = filled_params(jax.random.key(0), params, config)

    Args:
        key: Random key, as of `init_params`.
        params: Parameters of another config, a nested dict of arrays.
        config: The shape of the new model.

    Raises:
        InputError: A parameter has another shape in the new config.
    """
    given, shapes = flatten_dict(params, sep="/"), _shapes(config)
    for path in given.keys() & shapes.keys():
        if given[path].shape != shapes[path]:
            raise InputError(f"{path} has the shape {given[path].shape}, not {shapes[path]}")
    filled = {}
    for path, row in _paths(config).items():
        if path in given:
            filled[path] = given[path]
        else:
            filled[path] = row.draw(jax.random.fold_in(key, zlib.crc32(path.encode())), config)
    return unflatten_dict(filled, sep="/")


@functools.lru_cache(maxsize=2**14)
def find_parameter(path: str) -> Parameter | None:
    """Return the parameter whose path is a suffix of this path, None where there is none.

    Adam moments and the EMA have the paths of their parameters, behind a prefix.
    """
    keys = LAYER.sub("layers_{i}", path).replace(BASE, "/").split("/")
    ends = ("/".join(keys[start:]) for start in range(len(keys)))
    return next((PARAMETERS[end] for end in ends if end in PARAMETERS), None)


def is_of_adapter(path: str) -> bool:
    """Return whether a leaf is a part of an adapter's product, or what an adapter has replaced."""
    return path.endswith(LORA_LEAVES) or BASE in path


def in_dtype(params: Params, dtype: DTypeLike) -> Params:
    """Return the parameters in a dtype, but for the scales of an adapter, which have no axis."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if leaf.ndim else leaf, params)


def decayed(params: Mapping[str, Any]) -> Any:
    """Return which parameters weight decay shrinks, a tree of the same structure."""
    # The factors of an adapter, which no row declares, decay as all matrices do.
    return jax.tree_util.tree_map_with_path(
        lambda path, _: (row := _found(path)) is None or row.decayed, params
    )


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
        # An optimizer may keep sums over an axis of a parameter in its place.
        factored = config is not None and parameter and leaf.shape != parameter.shape(config)
        if parameter is None or factored:
            units = []
        elif config is None:
            units = list(zip(parameter.axes, leaf.shape, strict=False))
        else:
            units = parameter.units(config)
        axes = [axis if count % mesh.shape[axis] == 0 else None for axis, count in units]
        return NamedSharding(mesh, PartitionSpec(*axes))

    return jax.tree_util.tree_map_with_path(place, params)


def unsplit_warnings(mesh: Mesh | AbstractMesh, config: TransformerConfig) -> Iterator[str]:
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
