"""The mesh of devices, and how rows are sharded over it; `model.tree` shards parameters.

Axis "data" holds copies of the model, each with its own rows of the batch. Axis "fsdp" splits the
rows as well, and one dimension of every matrix (ZeRO, Rajbhandari et al. 2020). Axis "tensor"
splits heads, inner features and vocabulary (Megatron-LM, Shoeybi et al. 2019).
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PRNGKeyArray, Shaped

from jax_transformer.errors import InputError

Sums, Rows, Whole = TypeVar("Sums"), TypeVar("Rows"), TypeVar("Whole")  # trees of arrays
AXES = ("data", "fsdp", "tensor")
ROW_AXES = ("data", "fsdp")
# XLA infers the sharding of intermediate results; explicit axes would need it written down.
AXIS_TYPES = (AxisType.Auto,) * len(AXES)


def make_mesh(sizes: str | None = None, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return the devices as a mesh with the axes data, fsdp and tensor.

    Args:
        sizes: Sizes of the axes, as in "data=4,fsdp=2"; an axis that is not named has size 1, an
            axis of size -1 takes all remaining devices. None is a single device.
        devices: The devices to use; None is all devices.

    Raises:
        InputError: The sizes name no axes, or do not take all of the devices.
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
    """Return a line that names the sizes of the axes and the devices."""
    sizes = ", ".join(f"{name}={mesh.shape[name]}" for name in AXES)
    return f"mesh: {sizes} of {mesh.size} x {mesh.devices.flat[0].device_kind}"


def row_shards(mesh: Mesh | AbstractMesh) -> int:
    """Return the number of parts that the rows of a batch are split into."""
    return _size(mesh, ROW_AXES)


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a batch: its rows, the first axis, over data and fsdp."""
    return NamedSharding(mesh, PartitionSpec(ROW_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array that every device holds a copy of."""
    return NamedSharding(mesh, PartitionSpec())


def shard_rows(x: Shaped[Array, "rows *shape"]) -> Shaped[Array, "rows *shape"]:
    """Return `x` with its rows split over data and fsdp, and its other dimensions not split."""
    return constrain(x, ROW_AXES)


def map_rows_and_heads(
    function: Callable[..., Shaped[Array, "rows heads *shape"]],
    by_rows_and_heads: Sequence[Shaped[Array, "rows _ *_"]],
    by_rows: Sequence[Shaped[Array, "rows *_"]],
) -> Shaped[Array, "rows heads *shape"]:
    """Return a function's result; each device computes its own rows and heads.

    XLA cannot split a kernel that is written by hand: without this, each device would gather all
    rows. Rows are split over data and fsdp, heads over tensor, where these divide them: the fewest
    heads, which divide the others, so that keys stay beside the queries that read them.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not has_our_axes(mesh):
        return function(*by_rows_and_heads, *by_rows)
    rows, heads = by_rows_and_heads[0].shape[0], min(x.shape[1] for x in by_rows_and_heads)
    row_axes = ROW_AXES if rows % _size(mesh, ROW_AXES) == 0 else None
    head_axis = "tensor" if heads % _size(mesh, "tensor") == 0 else None
    rows_and_heads = PartitionSpec(row_axes, head_axis)
    specs = [rows_and_heads] * len(by_rows_and_heads) + [PartitionSpec(row_axes)] * len(by_rows)
    split = jax.shard_map(function, in_specs=(*specs,), out_specs=rows_and_heads, check_vma=False)
    return split(*by_rows_and_heads, *by_rows)


def divides_rows_alone(rows: int) -> bool:
    """Return whether the current mesh, if there is one, divides `rows` evenly, and nothing else."""
    mesh = jax.sharding.get_abstract_mesh()
    return not has_our_axes(mesh) or (mesh.shape["data"] == mesh.size and rows % mesh.size == 0)


def map_own_rows(
    function: Callable[..., tuple[Sums, Rows]], whole: Whole, *by_rows: Shaped[Array, "rows *_"]
) -> tuple[Sums, Rows]:
    """Return (shares, rows) of a function that each device computes for its own rows.

    XLA would add up the devices' shares of each sum where the function computes it. Here they stay
    apart, along a new first axis. `divides_rows_alone` is true of the rows.
    """

    def on_device(*arrays: Whole | Shaped[Array, "own_rows *_"]) -> tuple[Sums, Rows]:
        sums, rows = function(*arrays)
        return jax.tree.map(lambda leaf: leaf[None], sums), rows

    if not has_our_axes(jax.sharding.get_abstract_mesh()):
        return on_device(whole, *by_rows)
    rows = PartitionSpec(ROW_AXES)
    specs = (PartitionSpec(), *(rows for _ in by_rows))
    return jax.shard_map(on_device, in_specs=specs, out_specs=rows, check_vma=False)(
        whole, *by_rows
    )


def draw_rows(
    draw: Callable[[PRNGKeyArray, tuple[int, ...]], Shaped[Array, "rows *shape"]],
    key: PRNGKeyArray,
    shape: tuple[int, ...],
) -> Shaped[Array, "rows *shape"]:
    """Return random numbers of a shape; each device draws those of its own rows.

    XLA does not split its RngBitGenerator: without this, each device would draw all rows. Each
    device folds its place among the rows into the key, where data and fsdp divide the rows.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not has_our_axes(mesh) or shape[0] % _size(mesh, ROW_AXES):
        return draw(key, shape)
    local_shape = (shape[0] // _size(mesh, ROW_AXES), *shape[1:])

    def on_device(key: PRNGKeyArray) -> Shaped[Array, "own_rows *shape"]:
        return draw(jax.random.fold_in(key, jax.lax.axis_index(ROW_AXES)), local_shape)

    rows = PartitionSpec(ROW_AXES)
    return jax.shard_map(on_device, in_specs=PartitionSpec(), out_specs=rows, check_vma=False)(key)


def constrain(x: Shaped[Array, "*shape"], axes: str | tuple[str, ...]) -> Shaped[Array, "*shape"]:
    """Return `x` with its first dimension split over mesh axes, and the others not split.

    Without a mesh of `make_mesh` it is the identity. Where the axes do not divide the first
    dimension, XLA chooses its sharding.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not has_our_axes(mesh):
        return x
    first = axes if x.shape[0] % _size(mesh, axes) == 0 else PartitionSpec.UNCONSTRAINED
    return jax.lax.with_sharding_constraint(x, PartitionSpec(first, *[None] * (x.ndim - 1)))


def has_our_axes(mesh: AbstractMesh) -> bool:
    """Return whether a mesh is one of `make_mesh`."""
    return (mesh.axis_names, mesh.axis_types) == (AXES, AXIS_TYPES)


def _size(mesh: Mesh | AbstractMesh, axes: str | tuple[str, ...]) -> int:
    return math.prod(mesh.shape[name] for name in ((axes,) if isinstance(axes, str) else axes))
