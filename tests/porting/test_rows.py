"""The rows of a layout are found from the places of elements, whatever tensors are called."""

import re

import numpy as np
import pytest

from jax_transformer import convert
from jax_transformer.convert.table import Layout
from jax_transformer.errors import InputError
from jax_transformer.model.tree import parameter_shapes
from jax_transformer.porting.rows import Tensor, layout_rows
from tests.models import small_config

HEADS, WIDTH = 3, 42
PARTS = [f"self_attention/{name}/kernel" for name in ("query", "key", "value")]
NORMS = [f"{name}_residual/norm/scale" for name in ("self_attention", "feed_forward")]
UNUSUAL = [PARTS[1], PARTS[0], PARTS[2]]


def by_heads(*kernels):
    """Return the rows of all kernels for head 0, then those for head 1, and so on."""
    return np.concatenate([x.T.reshape(HEADS, -1, WIDTH) for x in kernels], 1).reshape(-1, WIDTH)


def of_each_head(kernel):
    return [head.T for head in np.split(kernel, HEADS, 1)]


# Name of the tensor, its parameters in an encoder's layer, and how they lie in it.
ARRANGED = {
    "rows": ("x.{i}.a", UNUSUAL, lambda *kernels: np.concatenate([x.T for x in kernels])),
    "columns": ("{i}.a_x", PARTS, lambda *kernels: np.concatenate(kernels, 1)),
    "heads": ("x{i}.7", PARTS, by_heads),
    "copies": ("x.1.{i}", NORMS, None),
    "one": ("x.{i}", PARTS[:1], lambda kernel: kernel.reshape(WIDTH, HEADS, -1)),
    "windows": ("x.{i}", PARTS[:1], lambda kernel: kernel.T[:, :, None]),
    "each head": ("x.{i}.0.{head}", PARTS[2:], of_each_head),
}


def placed(config, name, parts, arrange):
    """Return the elements of all parameters, and the tensors: one for each other parameter."""
    elements, tensors, first = {}, [], 0
    groups = {
        name.format(i=i, head="{head}"): [f"encoder/layers_{i}/{p}" for p in parts] for i in (0, 1)
    }
    shapes = parameter_shapes(config)
    groups |= {p: [p] for p in shapes if p not in [p for group in groups.values() for p in group]}
    for tensor, paths in groups.items():
        together = tensor == paths[0] or arrange is None
        sizes = [int(np.prod(shapes[path])) for path in paths[: 1 if together else None]]
        numbers = [
            begin + np.arange(size).reshape(shapes[path])
            for begin, size, path in zip(np.cumsum([0, *sizes]), sizes, paths, strict=False)
        ]
        joined = numbers[0] if together else arrange(*numbers)
        joined = joined if isinstance(joined, list) else [joined]
        order = np.argsort(np.concatenate([array.reshape(-1) for array in joined]))
        for path, own in zip(paths, numbers * (len(paths) if together else 1), strict=True):
            elements[path] = first + order[own]
        for head, array in enumerate(joined):
            tensors.append(
                Tensor((tensor.replace("{head}", str(head)),), array.shape, first, "addmm (x.py:7)")
            )
            first += array.size
    return elements, tensors


def config_of_two_layers():
    return small_config("vaswani2017", num_encoder_layers=2, num_decoder_layers=1)


@pytest.mark.parametrize("kind", ARRANGED)
def test_rows_read_what_lies_where(kind):
    name, parts, arrange = ARRANGED[kind]
    config = config_of_two_layers()
    elements, tensors = placed(config, name, parts, arrange)
    rows = layout_rows(elements, tensors, config)
    (row,) = [row for row in rows if f"encoder/layers_{{i}}/{parts[0]}" in row.paths]
    assert (row.foreign, row.stack) == (name, kind if len(parts) > 1 else "rows")
    assert row.paths == tuple(f"encoder/layers_{{i}}/{part}" for part in parts)
    numbers = np.random.default_rng(0).normal(size=sum(t.elements.size for t in tensors))
    state = {tensor.names[0]: numbers[tensor.elements] for tensor in tensors}
    params, _ = convert.to_params(state, config, Layout("found", rows))
    for path, places in elements.items():
        leaf = params
        for key in path.split("/"):
            leaf = leaf[key]
        np.testing.assert_array_equal(leaf, numbers[places])


def test_layers_whose_names_do_not_count_have_a_row_each():
    config = config_of_two_layers()
    name, parts, arrange = ARRANGED["rows"]
    elements, tensors = placed(config, name, parts, arrange)
    renamed = [t._replace(names=(re.sub(r"x\.1\.", "x.2.", t.names[0]),)) for t in tensors]
    rows = layout_rows(elements, renamed, config)
    assert {"x.0.a", "x.2.a"} <= {row.foreign for row in rows}


def shuffled(kernel):
    return np.random.default_rng(0).permutation(kernel.reshape(-1)).reshape(kernel.shape)


@pytest.mark.parametrize(
    ("name", "parts", "arrange", "message"),
    [
        ("x.{i}", PARTS[:1], shuffled, "in an order of axes that no row of a layout has"),
        ("x.{i}", PARTS, None, "layers that share weights have no place in the model"),
        ("x.{i}.{head}", PARTS[:1], lambda x: of_each_head(x)[::-1], "in an order that no row of"),
        ("x.{i}.{head}", PARTS[:1], lambda x: np.split(x, 2, 0), "in an order that no row of"),
    ],
)
def test_what_no_row_expresses_is_refused_by_its_tensors(name, parts, arrange, message):
    config = config_of_two_layers()
    with pytest.raises(InputError, match=rf"x\.0.*{message}.*: addmm \(x\.py:7\)"):
        layout_rows(*placed(config, name, parts, arrange), config)
