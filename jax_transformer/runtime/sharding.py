"""Where on a mesh of devices each array lies: rows of a batch, parameters, what belongs to them.

Axis "data" has copies of the model, each with rows of the batch of its own; "fsdp" spreads rows as
well, and one dimension of every matrix (ZeRO, Rajbhandari et al. 2020); "tensor" spreads heads,
inner features and vocabulary (Megatron-LM, Shoeybi et al. 2019).
"""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import InputError

AXES = ("data", "fsdp", "tensor")
ROW_AXES = ("data", "fsdp")
# XLA finds the sharding of what is computed; an explicit axis would want to be told it.
AXIS_TYPES = (AxisType.Auto,) * len(AXES)

# The end of a parameter's path, the axis of each of its dimensions, what whole pieces are.
# Columns first, then rows: between the two products of a sublayer nothing is exchanged.
RULES = (
    (r"attention/(query|key|value)/kernel", ("fsdp", "tensor"), "projected heads"),
    (r"attention/(query|key|value)/bias", ("tensor",), "projected heads"),
    (r"attention/output/kernel", ("tensor", "fsdp"), "heads"),
    (r"feed_forward/inner/kernel", ("fsdp", "tensor"), None),
    (r"feed_forward/inner/bias", ("tensor",), None),
    (r"feed_forward/outer/kernel", ("tensor", "fsdp"), None),
    (r"embedding/embedding", ("tensor", "fsdp"), None),
    (r"output_projection/kernel", ("fsdp", "tensor"), None),
    (r"output_projection/bias", ("tensor",), None),
)  # all else, biases and norms of d_model, is whole on each device


def make_mesh(sizes: str | None = None, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return the devices as a mesh with the axes data, fsdp and tensor.

    Args:
        sizes: Sizes of the axes, as in "data=4,fsdp=2"; one that is not named has size 1, and one
            of size -1 takes the devices that are left. None is a single device.
        devices: What to take; None is all there are.

    Raises:
        InputError: An axis is unknown or named twice, a size is no number from 1 (or -1), or the
            sizes do not take all of the devices.
    """
    devices = jax.devices() if devices is None else devices
    if not sizes:
        sizes, devices = "data=1", devices[:1]
    shape = parse_sizes(sizes, len(devices))
    return jax.make_mesh(shape, AXES, axis_types=AXIS_TYPES, devices=devices)


def parse_sizes(sizes: str, num_devices: int) -> tuple[int, ...]:
    """Return the size of each axis in `AXES`; arguments and errors as `make_mesh`."""
    shape: dict[str, int] = {}
    for part in sizes.split(","):
        name, _, size = (word.strip() for word in part.partition("="))
        if name not in AXES:
            raise InputError(f"mesh={sizes!r}: {name!r} must be one of {', '.join(AXES)}")
        if name in shape:
            raise InputError(f"mesh={sizes!r}: {name} is named twice; name it once")
        if not re.fullmatch(r"-1|[1-9][0-9]*", size, re.ASCII):
            raise InputError(
                f"mesh={sizes!r}: {name}={size} must be a number of devices, or -1 for what is left"
            )
        shape[name] = int(size)
    if list(shape.values()).count(-1) > 1:
        raise InputError(f"mesh={sizes!r}: only one axis may take what is left")
    named = math.prod(size for size in shape.values() if size > 0)
    left = num_devices // named if -1 in shape.values() else 1
    if named * left != num_devices:
        raise InputError(
            f"mesh={sizes!r} is {named} devices, but there are {num_devices}; give an axis the "
            "size -1 for what is left, or show fewer devices"
        )
    shape = {name: left if size == -1 else size for name, size in shape.items()}
    return tuple(shape.get(name, 1) for name in AXES)


def describe(mesh: Mesh) -> str:
    """Return a line for the reader: the sizes of the axes, and the devices."""
    sizes = ", ".join(f"{name}={mesh.shape[name]}" for name in AXES)
    return f"mesh: {sizes} of {mesh.size} x {mesh.devices.flat[0].device_kind}"


def row_shards(mesh: Mesh | AbstractMesh) -> int:
    """Return how many parts the rows of a batch are in."""
    return _size(mesh, ROW_AXES)


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a batch: its rows, the first axis, over data and fsdp."""
    return NamedSharding(mesh, PartitionSpec(ROW_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of what each device has a copy of."""
    return NamedSharding(mesh, PartitionSpec())


def shardings(tree: Any, mesh: Mesh | AbstractMesh, config: TransformerConfig) -> Any:
    """Return the sharding of every array of a tree, a tree of the same structure.

    An array's path says what it is, by its end: that of a moment or an average of a parameter is
    the parameter's. A dimension that its axis does not divide stays whole.

    Args:
        tree: Arrays, or their shapes: parameters, the optimizer's state, all of a training state.
        mesh: Of `make_mesh`.
        config: The shape of the model.
    """

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        axes = [
            axis if pieces % mesh.shape[axis] == 0 else None
            for axis, pieces in _wanted(path, leaf, config)
        ]
        return NamedSharding(mesh, PartitionSpec(*axes))

    return jax.tree_util.tree_map_with_path(place, tree)


def undivided(params: Any, mesh: Mesh | AbstractMesh, config: TransformerConfig) -> Iterator[str]:
    """Yield a line for each axis of the mesh that does not divide what it is meant to spread.

    Args:
        params: Parameters, or their shapes.
        mesh: Of `make_mesh`.
        config: The shape of the model.
    """
    wanted = [
        dimension
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        for dimension in _wanted(path, leaf, config)
    ]
    for axis, size in mesh.shape.items():
        odd = [pieces for named, pieces in wanted if named == axis and pieces % size]
        if odd:
            numbers = ", ".join(map(str, sorted(set(odd))))
            yield f"{axis}={size} does not divide {numbers}: {len(odd)} parameters stay whole on it"


def _wanted(path: tuple[Any, ...], leaf: Any, config: TransformerConfig) -> list[tuple[str, int]]:
    """Return the axis that each dimension is to be spread over, and in how many pieces it comes."""
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    # Shared projections are the same for all heads: there is one of them.
    projected = 1 if config.head_projection == "shared" else config.num_heads
    heads = {"heads": config.num_heads, "projected heads": projected}
    for pattern, axes, whole in RULES:
        if re.search(rf"{pattern}$", name):
            sizes = zip(axes, leaf.shape, strict=True)
            return [(axis, heads.get(whole, n) if axis == "tensor" else n) for axis, n in sizes]
    return []


def shard_rows(x: Shaped[Array, "rows *shape"]) -> Shaped[Array, "rows *shape"]:
    """Return `x` with its rows spread over data and fsdp, all else of it whole on each device."""
    return constrain(x, ROW_AXES)


def constrain(x: Shaped[Array, "*shape"], axes: str | tuple[str, ...]) -> Shaped[Array, "*shape"]:
    """Return `x` with its first dimension spread over axes of the mesh, and the others over none.

    The mesh is the one that the surrounding computation has been told of, by `jax.set_mesh`. Where
    that is none of `make_mesh`, this is the identity; where it does not divide the first dimension,
    XLA chooses how to spread that.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if (mesh.axis_names, mesh.axis_types) != (AXES, AXIS_TYPES):
        return x
    first = axes if x.shape[0] % _size(mesh, axes) == 0 else PartitionSpec.UNCONSTRAINED
    return jax.lax.with_sharding_constraint(x, PartitionSpec(first, *[None] * (x.ndim - 1)))


def _size(mesh: Mesh | AbstractMesh, axes: str | tuple[str, ...]) -> int:
    return math.prod(mesh.shape[name] for name in ((axes,) if isinstance(axes, str) else axes))
