"""Names and shapes of an unknown model: which tensors repeat as layers, which belong together.

A name is read as its dotted components. A number in a name may count layers, sublayers or
projections; what stands behind it decides.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jax_transformer.convert.table import HEAD, Shape
from jax_transformer.errors import InputError

NUMBER = re.compile(r"(?<=[^0-9])[0-9]{1,4}(?=[._]|$)")
WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+")
SCALE_NAMES = ("weight", "scale", "gamma", "alpha", "gain", "g", "a_2", "w")
BIAS_NAMES = ("bias", "beta", "shift", "offset", "b", "b_2")
MATRIX_NAMES = ("weight", "kernel", "embedding", "table", "matrix", "w")
LEAVES = {*SCALE_NAMES, *BIAS_NAMES, *MATRIX_NAMES}
LEADING_LEAVES = {leaf for leaf in LEAVES if len(leaf) > 3}
PLACE = re.compile(r"\{([23]?)i(?:\+([012]))?\}")  # of a layer's number in a name
RAW = re.compile(r"^(.*?)(?:^|(?<=\.))([wWbB])_?([A-Za-z0-9_]+)$")
MOST_TENSORS = 5000  # more than the largest known encoder-decoders have
MOST_NUMBERS = 8  # in a name: those of lists in lists
MOST_PARTS = 500  # of layers that are no modules
LAYER_MATRICES = 4  # a layer has a fused projection, an output and two of the feed-forward network


def natural_key(name: str) -> tuple[tuple[int, int | str], ...]:
    """Return a key that sorts names with their numbers as numbers."""
    parts = re.split(r"([0-9]+)", name)
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in parts if part)


def words(name: str) -> tuple[str, ...]:
    """Return the words and numbers in a name, in lower case: selfAttn.W_q has self, attn, w, q."""
    return tuple(word.lower() for word in WORDS.findall(name))


@dataclasses.dataclass(frozen=True)
class Stack:
    """Layers that repeat.

    Attributes:
        shapes: Shape by what follows the number, for the tensors of every layer. Where the layers
            are no modules, the number stands inside: "attentions.{i}.q.weight", and
            "{2i+1}.up.weight" where attentions and networks take turns.
        first_only: Shape by what follows the number, for further tensors of the first layer.
    """

    before: str
    indices: tuple[int, ...]
    shapes: dict[str, Shape]
    first_only: dict[str, Shape]

    def template(self, suffix: str) -> str:
        """Return the name of a layer's tensor with "{i}" for the number."""
        return f"{self.before}{suffix}" if PLACE.search(suffix) else f"{self.before}{{i}}{suffix}"

    def name(self, index: int, suffix: str) -> str:
        """Return the name of a tensor in the layer at this place, counted from 0."""
        number = self.indices[index]
        return PLACE.sub(
            lambda place: str(int(place[1] or 1) * number + int(place[2] or 0)),
            self.template(suffix),
        )


@dataclasses.dataclass(frozen=True)
class Unit:
    """The names of the tensors that one product or one norm uses; "" where there is none."""

    matrix: str = ""
    shape: Shape = ()
    bias: str = ""
    scale: str = ""
    bias_length: int = 0

    @property
    def name(self) -> str:
        """The name of its first tensor."""
        return self.matrix or self.scale or self.bias


class Units(NamedTuple):
    """The products and norms in a part of a model, and the tensors that are neither."""

    products: tuple[Unit, ...]
    norms: tuple[Unit, ...]
    other: tuple[str, ...]


def find_stacks(shapes: Mapping[str, Shape]) -> tuple[Stack, ...]:
    """Return the repeating layers: the outermost groups that are alike and have products."""
    if len(shapes) > MOST_TENSORS:
        raise InputError(
            f"{len(shapes)} tensors are more than {MOST_TENSORS}; pass the weights of one model, "
            "without the state of an optimizer"
        )
    groups: dict[str, dict[int, dict[str, Shape]]] = {}
    for name, shape in shapes.items():
        for match in itertools.islice(NUMBER.finditer(name), MOST_NUMBERS):
            layers = groups.setdefault(name[: match.start()], {})
            layers.setdefault(int(match[0]), {})[name[match.end() :]] = shape
    repeated = [item for item in groups.items() if len(item[1]) > 1]
    single = [item for item in groups.items() if len(item[1]) == 1]
    # Outermost first where a number repeats; innermost first where it does not: a list of one
    # model holds both stacks.
    candidates = sorted(repeated, key=lambda item: len(item[0]))
    candidates += sorted(single, key=lambda item: -len(item[0]))
    stacks: list[Stack] = []
    for before, layers in candidates:
        inside = any(before.startswith(stack.before) for stack in stacks)
        around = any(stack.before.startswith(before) for stack in stacks)
        if not inside and not around and (stack := _as_stack(before, layers)):
            stacks.append(stack)
    if len(stacks) != 2:
        stacks = _stacks_of_parts(groups) or stacks
    return tuple(sorted(stacks, key=lambda stack: natural_key(stack.before)))


def join_heads(tensors: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return the tensors, those of heads apart joined, and the name of what each is joined to.

    Kernels [head_dim, d_model] of a list, or turned, that are as wide as the model together are
    those of heads; so are their biases. "{head}" stands in the name for the innermost number.
    """
    matrices = [array.shape for array in tensors.values() if array.ndim == 2]
    width = most_common_width(matrices) if matrices else 0
    lists: dict[tuple[str, Shape], dict[int, str]] = {}
    for name, array in sorted(tensors.items(), key=lambda item: -item[1].ndim):
        numbers = [*NUMBER.finditer(name)]
        fits = array.ndim == 1 or (array.ndim == 2 and max(array.shape) == width)
        if numbers and fits and 0 < min(array.shape) < width:
            begin, end = numbers[-1].span()
            key = (f"{name[:begin]}{HEAD}{name[end:]}", array.shape)
            lists.setdefault(key, {})[int(numbers[-1][0])] = name
    wide = [name for name, x in tensors.items() if x.ndim == 2 and min(x.shape) >= width]
    joined, names = dict(tensors), {}
    for (template, shape), heads in lists.items():
        count, axis = len(heads), shape.index(min(shape))
        if count == 1 or {*heads} != {*range(count)} or count * shape[axis] != width:
            continue
        first = f"{template.partition(HEAD)[0]}0"
        if any(name.startswith(first) for name in wide):  # a layer's, of grouped queries
            continue
        if len(shape) == 2 or names:
            parts = [joined.pop(heads[head]) for head in range(count)]
            joined[template] = np.concatenate(parts, axis)
            names |= dict.fromkeys(heads.values(), template)
    return joined, names


class Part(NamedTuple):
    """What repeats in a stack: what precedes the number, its place, the numbers, the shapes."""

    before: str
    place: str
    numbers: range
    shapes: Mapping[str, Shape]


def _stacks_of_parts(groups: Mapping[str, Mapping[int, dict[str, Shape]]]) -> list[Stack]:
    """Return two stacks whose layers are no modules, [] where names make up no two.

    The parts of a stack begin with the same words; how many words it takes is tried.
    """
    parts = [part for before, numbered in groups.items() for part in _parts(before, numbered)]
    for count in range(MOST_NUMBERS if len(parts) <= MOST_PARTS else 0):
        together: dict[object, list[Part]] = {}
        for part in parts:
            alone = part.place if _is_layer(part.shapes) else ""  # two stacks in one list
            key = (words(part.before)[:count], part.numbers, alone)
            together.setdefault(key, []).append(part)
        stacks = [stack for members in together.values() if (stack := _stack_of(members))]
        if len(stacks) == 2:
            return stacks
    return []


def _parts(before: str, numbered: Mapping[int, dict[str, Shape]]) -> Iterable[Part]:
    """Yield what repeats in a list: all that it holds, or its parts that take turns."""
    numbers = sorted(numbered)
    first, count = numbers[0], len(numbers)
    if first > 1 or numbers != [*range(first, first + count)]:
        return
    for step in (1, 2, 3):
        turns = [[numbered[number] for number in numbers[turn::step]] for turn in range(step)]
        even = count % step == 0 and count > step and (step == 1 or not first)
        if even and all(layer == layers[0] for layers in turns for layer in layers):
            for turn, layers in enumerate(turns):
                place = "{i}" if step == 1 else f"{{{step}i+{turn}}}"
                yield Part(before, place, range(first, first + count // step), layers[0])
            return


def _stack_of(parts: Sequence[Part]) -> Stack | None:
    """Return the stack of some parts, without those inside others; None where it is no stack."""
    befores = {part.before for part in parts}
    names = {
        f"{part.before}{part.place}{suffix}": shape
        for part in parts
        if not any(part.before.startswith(before) for before in befores - {part.before})
        for suffix, shape in part.shapes.items()
    }
    repeats = len({re.sub(r"\b[0-9]+\.", "", before) for before in befores}) < len(befores)
    if repeats or not _is_layer(names):  # what repeats in a layer is no layer of its own
        return None
    same = itertools.takewhile(lambda letters: len({*letters}) == 1, zip(*befores, strict=False))
    start = sum(1 for _ in same)
    shapes = {name[start:]: names[name] for name in sorted(names, key=natural_key)}
    return Stack(next(iter(befores))[:start], tuple(parts[0].numbers), shapes, {})


def without_window(shape: Shape) -> Shape:
    """Return the shape of a kernel; of a convolution over one position, that of its matrix."""
    return shape[:2] if len(shape) == 3 and shape[2] == 1 < min(shape[:2]) else shape


def _as_stack(before: str, layers: Mapping[int, Mapping[str, Shape]]) -> Stack | None:
    indices = tuple(sorted(layers))
    if indices != tuple(range(indices[0], indices[0] + len(indices))) or indices[0] > 1:
        return None
    last = layers[indices[-1]]
    common = {
        suffix: shape
        for suffix, shape in last.items()
        if all(layer.get(suffix) == shape for layer in layers.values())
    }
    for index, layer in layers.items():
        further = len(layer) - len(common)
        if further and (index != indices[0] or further > 2):
            return None
    if not _is_layer(common):
        return None
    first = {s: shape for s, shape in layers[indices[0]].items() if s not in common}
    ordered = {suffix: common[suffix] for suffix in sorted(common, key=natural_key)}
    return Stack(before, indices, ordered, first)


def _is_layer(shapes: Mapping[str, Shape]) -> bool:
    """Return whether tensors are those of a layer, and not of an attention or a list of norms."""
    matrices = [shape for shape in shapes.values() if len(shape) > 1 and min(shape) > 1]
    if len(matrices) < LAYER_MATRICES:
        return False
    width = most_common_width(matrices)
    return sum(math.prod(shape) for shape in matrices) >= 4.5 * width * width or len(matrices) > 5


def most_common_width(shapes: Iterable[Shape]) -> int:
    """Return the axis length that most matrices have, the smaller one of two."""
    counts = Counter(length for shape in shapes for length in set(shape))
    return min(counts, key=lambda length: (-counts[length], length))


def find_units(shapes: Mapping[str, Shape], width: int) -> Units:
    """Group tensors, of one layer or of what stands outside the layers, by product and norm."""
    modules: dict[str, list[str]] = {}
    for name in sorted(shapes, key=natural_key):
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    groups: dict[str, list[str]] = {}
    for module, names in modules.items():
        is_leaf = not any(other.startswith(f"{module}.") for other in modules if module != other)
        alone = _is_unit([shapes[name] for name in names], width, is_leaf and bool(module))
        for name in names:
            groups.setdefault(f"{module}." if alone else _key(name, shapes), []).append(name)
    products: list[Unit] = []
    norms: list[Unit] = []
    other: list[str] = []
    for names in groups.values():
        matrices = [name for name in names if len(shapes[name]) > 1]
        vectors = [name for name in names if len(shapes[name]) == 1]
        other += [name for name in names if not shapes[name]]
        if len(matrices) == 1 and len(vectors) <= 1:
            bias = "".join(vectors)
            length = shapes[bias][0] if bias else 0
            products.append(Unit(matrices[0], shapes[matrices[0]], bias, bias_length=length))
            continue
        products += [Unit(name, shapes[name]) for name in matrices]
        biases = [name for name in vectors if _split_leaf(name)[1] not in SCALE_NAMES]
        scales = [name for name in vectors if name not in biases] or biases[:1]
        if len(scales) == 2 == len(vectors):
            scales = scales[:1]
        biases = [name for name in vectors if name not in scales]
        if len(scales) == 1 and len(biases) <= 1 and shapes[scales[0]] == (width,):
            norms.append(Unit(scale=scales[0], bias="".join(biases)))
        else:
            other += vectors
    return Units(tuple(products), tuple(norms), tuple(other))


def _is_unit(shapes: Sequence[Shape], width: int, is_leaf: bool) -> bool:
    """Return whether the tensors of one module are one product or one norm, however named."""
    matrices = [shape for shape in shapes if len(shape) > 1]
    vectors = [shape for shape in shapes if len(shape) == 1]
    if len(matrices) + len(vectors) != len(shapes):
        return False
    if len(matrices) == 1 and len(vectors) <= 1:
        # A vector as long as the model is wide may be a norm's, where a module holds others.
        return is_leaf or any(n in matrices[0] and n != width for (n,) in vectors)
    return is_leaf and not matrices and len(vectors) <= 2 and set(vectors) == {(width,)}


def _key(name: str, shapes: Mapping[str, Shape]) -> str:
    """Return what the tensors of one product or norm have in common in their names."""
    key, leaf = _split_leaf(name)
    if not leaf and (match := RAW.match(name)):
        partners = [
            f"{match[1]}{letter}{joint}{match[3]}" for letter in "wWbB" for joint in ("_", "")
        ]
        if len({len(shapes[partner]) > 1 for partner in partners if partner in shapes}) == 2:
            return f"{match[1]}({match[3]})"
    return key


def _split_leaf(name: str) -> tuple[str, str]:
    """Return ("attn.q", "weight") for attn.q.weight, ("self", "gain") for gain_self."""
    module, _, last = name.rpartition(".")
    if last.lower() in LEAVES:
        return module, last.lower()
    parts = last.split("_")
    if len(parts) > 1 and parts[-1].lower() in LEAVES:
        return f"{module}.{'_'.join(parts[:-1])}", parts[-1].lower()
    if len(parts) > 1 and parts[0].lower() in LEADING_LEAVES:
        return f"{module}.{'_'.join(parts[1:])}", parts[0].lower()
    return name, ""
