"""A record: what the parts of a model were given, and what they computed, as named arrays."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_transformer.errors import InputError, shorten
from jax_transformer.parity.observe import observed
from jax_transformer.storage import weights as files
from jax_transformer.storage.weights.arrays import as_numpy, own_copy
from jax_transformer.storage.weights.checks import DTYPES

ORDER = "blocks"  # the entry of the metadata with names and kinds, in order


class Block(NamedTuple):
    """One call of a part of a model, or a named value.

    Attributes:
        kind: The class of the part, for example "LayerNorm"; "" of a named value.
        outputs: What it returned, of any shapes; the first one is compared.
        inputs: The arrays that it was given, each once.
        weights: Its own parameters by name, without those of its parts.
    """

    kind: str
    outputs: tuple[np.ndarray, ...]
    inputs: tuple[np.ndarray, ...] = ()
    weights: Mapping[str, np.ndarray] = {}


@dataclasses.dataclass(frozen=True)
class Record:
    """What a model computed.

    Attributes:
        blocks: By name, in the order in which they ended: parts come before the block that they
            are in. The second call of a part has the name "NAME#2". The model itself is "".
    """

    blocks: Mapping[str, Block]

    def __repr__(self) -> str:
        """Return one line: a record has every value of a model."""
        return f"{type(self).__name__}({len(self.blocks)} blocks: {shorten([*self.blocks])})"

    def save(self, path: str | os.PathLike, *, overwrite: bool = False) -> None:
        """Write one .safetensors file: arrays "NAME:output.0", "NAME:input.0", "NAME:weight.KEY".

        Raises:
            InputError: The file exists, or its folder does not.
        """
        arrays, order = dict[str, np.ndarray](), []
        for name, block in self.blocks.items():
            arrays |= {f"{name}:output.{i}": array for i, array in enumerate(block.outputs)}
            arrays |= {f"{name}:input.{i}": array for i, array in enumerate(block.inputs)}
            arrays |= {f"{name}:weight.{key}": array for key, array in block.weights.items()}
            sizes = len(block.outputs), len(block.inputs)
            order.append((name, block.kind, *sizes, list(block.weights)))
        files.write(path, arrays, overwrite=overwrite, metadata={ORDER: json.dumps(order)})


def record(model: Any, call: Callable[[Any], Any]) -> Record:
    """Run a model and return what each of its parts was given and computed, with its dtype.

    A torch module runs in evaluation mode and without gradients. Arrays inside `jax.vmap` have the
    axes of all rows. Inside `jax.jit`, parts of NNX and Equinox have the names of their classes.

    Args:
        model: A torch, Linen, NNX or Equinox module. Nothing inside anything else is observed.
        call: Returns of `model` what is compared in the end, kept as "output", or several arrays by
            their names. A plain function names there the values inside it.

    Raises:
        InputError: Nothing that `call` returned is an array.
    """
    blocks: dict[str, Block] = {}

    def keep(name: str, part: Any, own: Mapping[str, Any], inputs: Any, output: Any) -> Any:
        distinct = list({id(array): array for array in _arrays(inputs)}.values())
        weights = {key: array for key, array in own.items() if _arrays(array)}
        leaves, structure = jax.tree.flatten((_arrays(output), distinct, weights))
        traced = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, jax.core.Tracer)}
        wide = {
            i for i, leaf in traced.items() if leaf.dtype.name in ("float64", "int64", "uint64")
        }

        def store(computed: dict[int, Any]) -> dict[int, Any]:
            values = [as_numpy(computed.get(i, leaf)) for i, leaf in enumerate(leaves)]
            for i in wide:
                values[i] = values[i].view(leaves[i].dtype)[..., 0]
            outputs, inputs, weights = jax.tree.unflatten(structure, map(own_copy, values))
            outputs, inputs = (tuple(filter(_is_kept, group)) for group in (outputs, inputs))
            weights = {key: array for key, array in weights.items() if _is_kept(array)}
            if outputs:
                block = Block(type(part).__name__, outputs, inputs, weights)
                blocks[unused_name(name, blocks)] = block
            return computed

        if not traced:
            store({})
            return output
        # 64 bits are given as twice 32: the callback's thread may be without `jax_enable_x64`.
        bits = {i: x[..., None].view("uint32") if i in wide else x for i, x in traced.items()}
        shapes = jax.eval_shape(lambda: bits)
        bits = jax.pure_callback(store, shapes, bits, vmap_method="expand_dims")
        same = {i: bits[i].view(traced[i].dtype)[..., 0] if i in wide else bits[i] for i in bits}
        replaced = {id(leaf): same[i] for i, leaf in traced.items()}
        return jax.tree.map(lambda leaf: replaced.get(id(leaf), leaf), output)

    with observed(model, keep):
        output = call(model)
    return Record(blocks | _named(output, blocks))


def record_arrays(tree: Any) -> Record:
    """Return a record of named values: gradients, parameters after steps, losses.

    Args:
        tree: Arrays or numbers of any framework in nested mappings and sequences. The names of
            the record are the paths with dots: {"step 1": {"loss": x}} is "step 1.loss".

    Raises:
        InputError: There is no array in it.
    """
    return Record(_named(tree, {}))


def read_record(path: str | os.PathLike) -> Record:
    """Read the record at `path`, or any file of weights as named values in the order of names.

    Raises:
        InputError: The file is missing or damaged, or no record.
    """
    arrays, blocks = files.read(path), dict[str, Block]()
    order = files.read_metadata(path).get(ORDER)
    if order is None:
        parts = {name: re.split(r"(\d+)", name) for name in arrays}  # "step 9" before "step 10"
        keys = {n: [int(x) if x.isdecimal() else x for x in parts[n]] for n in arrays}
        blocks = {name: Block("", (arrays[name],)) for name in sorted(arrays, key=keys.get)}
    try:
        for name, kind, most_outputs, most_inputs, keys in json.loads(order or "[]"):
            outputs = tuple(arrays[f"{name}:output.{i}"] for i in range(max(most_outputs, 1)))
            inputs = tuple(arrays[f"{name}:input.{i}"] for i in range(most_inputs))
            weights = {key: arrays[f"{name}:weight.{key}"] for key in keys}
            blocks[name] = Block(kind, outputs, inputs, weights)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: its list of blocks does not fit its arrays") from error
    if not blocks:
        raise InputError(f"{path}: holds no arrays to compare")
    return Record(blocks)


def _named(tree: Any, others: Mapping[str, Block]) -> dict[str, Block]:
    """Return the arrays of a tree by their paths, with names that no other block has."""
    arrays = {name or "output": own_copy(as_numpy(leaf)) for name, leaf in _leaves("", tree)}
    numbers = {name: array for name, array in arrays.items() if _is_kept(array)}
    blocks = {unused_name(name, others): Block("", (array,)) for name, array in numbers.items()}
    if not blocks:
        raise InputError(f"a {type(tree).__name__} without arrays: return an array, or name some")
    return blocks


def _arrays(value: Any) -> list[Any]:
    return [leaf for _, leaf in _leaves("", value) if hasattr(leaf, "dtype")]


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield arrays and numbers in nested mappings and sequences with their paths; no random key."""
    if isinstance(value, Mapping | tuple | list):
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _leaves(f"{name}.{key}".lstrip("."), inner)
    is_array = hasattr(value, "detach") or isinstance(getattr(value, "dtype", None), np.dtype)
    if is_array or isinstance(value, float | int):
        yield name, value


def _is_kept(array: np.ndarray) -> bool:
    return array.size > 0 and array.dtype in DTYPES.values()


def unused_name(name: str, blocks: Iterable[str]) -> str:
    """Return the name of a block in a record that has `blocks`: "NAME#2" of a second NAME."""
    name = name.replace("/", ".")  # as files of weights have them
    count = 1 + sum(other.partition("#")[0] == name for other in blocks)
    return name if count == 1 else f"{name}#{count}"
