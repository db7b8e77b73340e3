"""The rule language: operations, rows and their expansion."""

import re

import hypothesis
import jax
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from jax_transformer import InputError, convert, porting
from jax_transformer.convert import Buffer, ConversionError, Layout, Operation, Row, transpose
from jax_transformer.convert.layouts.reference import LAYOUT
from jax_transformer.convert.table import BoundRow, check_possible, expand
from jax_transformer.model.tree import parameter_shapes
from tests.convert.tools import same_bits
from tests.models import random_params, small_config


@hypothesis.settings(deadline=None, max_examples=50)
@hypothesis.given(
    st.lists(st.integers(1, 7), min_size=1, max_size=2), st.booleans(), st.integers(0, 3)
)
def test_an_operation_and_its_inverse_give_the_same_bits(shape, transposed, form):
    config = small_config("pre_norm")
    forms = ((), (-1,), (1, -1), (1, -1, 1))
    operation = Operation(transposed, forms[form])
    parameter = np.random.default_rng(0).normal(size=shape)
    foreign_shape = operation.foreign_shape(parameter.shape, config)
    foreign = operation.to_foreign(parameter, foreign_shape)
    assert foreign.shape == foreign_shape
    assert same_bits(operation.to_parameter(foreign, parameter.shape), parameter)


def test_an_operation_may_name_fields_of_the_config():
    config = small_config("pre_norm")
    split = Operation(transposed=True, shape=("num_heads", "head_dim", "d_model"))
    kernel = np.arange(42 * 42.0).reshape(42, 42)
    foreign = split.to_foreign(kernel, split.foreign_shape(kernel.shape, config))
    assert foreign.shape == (3, 14, 42)
    assert foreign[1, 2, 5] == kernel[5, 14 + 2]


def with_rows(config, *rows):
    """Return a layout of these rows, and of one row for each other parameter."""
    paths = (re.escape(path).replace(r"\{i\}", r"\d+") for row in rows for path in row.paths)
    pattern = "|".join(paths)
    others = (path for path in parameter_shapes(config) if not re.fullmatch(pattern, path))
    return Layout("x", (*rows, *(Row(path, path) for path in others)))


PROJECTIONS = tuple(f"encoder/layers_0/self_attention/{name}" for name in ("query", "key", "value"))


def stacked(leaf, stack, operation=convert.identity, config=None):
    """Return the pair of the three projections of a model's first layer."""
    config = config or small_config("pre_norm", d_kv=5)
    paths = tuple(f"{path}/{leaf}" for path in PROJECTIONS)
    row = Row("fused", paths, operation, stack=stack)
    pairs = expand(with_rows(config, row), config)
    return config, next(pair for pair in pairs if pair.foreign == "fused")


def numbered(pair):
    random = np.random.default_rng(1)
    return [random.normal(size=shape) for shape in pair.shapes]


def test_rows_columns_and_heads_of_a_fused_kernel_and_bias_by_hand():
    config, pair = stacked("kernel", "rows", transpose)
    q, k, v = parameters = numbered(pair)
    assert same_bits(pair.write(parameters), np.concatenate([q.T, k.T, v.T]))
    _, pair = stacked("kernel", "columns")
    assert same_bits(pair.write(parameters), np.concatenate([q, k, v], 1))
    assert pair.shape == (42, 3 * 3 * 5)
    _, pair = stacked("kernel", "heads", transpose)
    fused = pair.write(parameters)
    assert fused.shape == pair.shape == (3 * 3 * 5, 42)
    for head in range(config.num_heads):
        for index, kernel in enumerate(parameters):
            begin = (3 * head + index) * 5
            assert same_bits(fused[begin : begin + 5], kernel.T[5 * head : 5 * head + 5])

    for stack in ("rows", "columns"):
        _, pair = stacked("bias", stack)
        parameters = numbered(pair)
        assert same_bits(pair.write(parameters), np.concatenate(parameters))
    _, pair = stacked("bias", "heads")
    heads = [part[5 * head : 5 * head + 5] for head in range(3) for part in parameters]
    assert same_bits(pair.write(parameters), np.concatenate(heads))


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(
    st.sampled_from(["rows", "columns", "heads"]),
    st.booleans(),
    st.lists(st.integers(1, 4), min_size=2, max_size=4),
    st.lists(st.integers(1, 3), max_size=2),
    st.integers(1, 3),
    st.booleans(),
)
def test_a_stack_and_its_parts_give_the_same_bits(stack, transposed, sizes, axes, heads, order):
    """Parts of different lengths, of any rank, in tensors of either memory order."""
    if stack == "columns":
        parts = [(*axes, size) for size in sizes]
    else:
        parts = [(heads * size, *axes) for size in sizes]
    shapes = tuple(part[::-1] if transposed else part for part in parts)
    paths = tuple(map(str, range(len(sizes))))
    pair = BoundRow("x", paths, Operation(transposed), shapes, tuple(parts), False, stack, heads)
    random = np.random.default_rng(0)
    foreign = np.array(random.normal(size=pair.shape), order="F" if order else "C")
    parameters = pair.read(foreign)
    assert [parameter.shape for parameter in parameters] == list(shapes)
    assert same_bits(pair.write(parameters), foreign)


def test_one_tensor_may_be_two_parameters_that_are_equal():
    config = small_config("bart")
    paths = ("source_positions/embedding", "target_positions/embedding")
    layout = with_rows(config, Row("places", paths, Operation(shape=(1, -1, 42)), stack="copies"))
    params = random_params(config)
    message = f"{paths[1]}.*differs from {paths[0]}: places is one"
    with pytest.raises(ConversionError, match=message):
        convert.to_tensors(params, config, layout)
    params["target_positions"] = params["source_positions"]
    tensors, _ = convert.to_tensors(params, config, layout)
    assert tensors["places"].shape == (1, 31, 42)
    back, _ = convert.to_params(tensors, config, layout)
    assert all(map(same_bits, jax.tree.leaves(back), jax.tree.leaves(params)))
    paths = ("source_positions/embedding", "encoder/layers_0/feed_forward/inner/kernel")
    with pytest.raises(InputError, match=r"'places' cannot stack .* stack='copies'"):
        expand(with_rows(config, Row("places", paths, stack="copies")), config)


@pytest.mark.parametrize("leaf", ["kernel", "bias"])
@pytest.mark.parametrize("transposed", [True, False])
def test_one_parameter_may_be_a_tensor_for_each_head(leaf, transposed):
    config = small_config("bart", d_kv=5)
    paths = tuple(f"encoder/layers_{{i}}/self_attention/{name}/{leaf}" for name in ("query", "key"))
    operation = Operation(transposed and leaf == "kernel")
    layout = with_rows(config, Row("{i}.heads.{head}.qk", paths, operation))
    params = random_params(config)
    tensors, _ = convert.to_tensors(params, config, layout)
    for layer, head in ((0, 0), (1, 2)):
        attention = params["encoder"][f"layers_{layer}"]["self_attention"]
        columns = [attention[name][leaf][..., 5 * head : 5 * head + 5] for name in ("query", "key")]
        expected = [part.T for part in columns] if operation.transposed else columns
        found = tensors[f"{layer}.heads.{head}.qk"]
        assert same_bits(found, np.ascontiguousarray(np.concatenate(expected)))
    back, _ = convert.to_params(tensors, config, layout)
    assert all(map(same_bits, jax.tree.leaves(back), jax.tree.leaves(params)))
    del tensors["1.heads.2.qk"]
    with pytest.raises(ConversionError, match=r"1\.heads\.2\.qk"):
        convert.to_params(tensors, config, layout)


def test_heads_that_a_parameter_cannot_have_are_refused():
    layer = "encoder/layers_0"
    for config, path in (
        (small_config("bart"), f"{layer}/feed_forward/inner/kernel"),
        (small_config("bart", num_heads=2000, d_kv=1), f"{layer}/self_attention/query/kernel"),
    ):
        row = Row("heads.{head}", path)
        with pytest.raises(InputError, match=rf"1024 heads.*, not num_heads={config.num_heads}"):
            expand(with_rows(config, row), config)
    with pytest.raises(InputError, match=r"must hold the same {words}"):
        Row("x", "encoder/norm/scale_{head}")


def test_one_stack_in_two_orders_is_two_tensors():
    """Tied copies may be stacked in different ways; each is written in its own."""
    config = small_config("pre_norm")
    paths = tuple(f"{path}/kernel" for path in PROJECTIONS)
    copies = (Row(stack, paths, transpose, stack=stack) for stack in ("rows", "heads"))
    layout = with_rows(config, *copies)
    tensors, _ = convert.to_tensors(random_params(config), config, layout)
    assert not same_bits(tensors["rows"], tensors["heads"])
    _, report = convert.to_params(tensors, config, layout)
    assert report.names("tied") == ["heads"]
    with pytest.raises(ConversionError, match="not tied"):
        convert.to_params(tensors | {"heads": tensors["rows"]}, config, layout)


def test_a_stack_that_cannot_be_and_words_on_one_side_are_refused():
    with pytest.raises(InputError, match="stack='row' must be one of rows, columns, heads"):
        Row("x", ("a", "b"), stack="row")
    with pytest.raises(InputError, match="'x': stack='heads' needs several parameters, not one"):
        Row("x", "a", stack="heads")
    for paths in ("encoder/norm/scale", ("encoder/layers_{i}/a", "encoder/layers_{j}/b")):
        with pytest.raises(InputError, match="must hold the same"):
            Row("fused.{i}", paths)
    shared = small_config("shared_heads", d_model=42, num_heads=6)
    with pytest.raises(InputError, match=r"num_heads=6 divides, not \[7, 7\], \[7, 7\], \[7, 7\]"):
        stacked("kernel", "heads", transpose, shared)
    config = small_config("pre_norm")
    paths = tuple(f"encoder/layers_0/feed_forward/{name}/kernel" for name in ("inner", "outer"))
    for stack in ("rows", "columns"):
        with pytest.raises(InputError, match=rf"'x' cannot stack .* stack='{stack}'"):
            expand(with_rows(config, Row("x", paths, stack=stack)), config)


def test_a_word_stands_for_one_name_and_not_for_a_path():
    config = small_config("torch_nn", num_encoder_layers=12)
    layout = Layout("x", (Row("{stack}.final", "{stack}/norm/scale"), *LAYOUT.rows))
    with pytest.raises(InputError, match="two rows give the name 'decoder"):
        expand(Layout("x", (*LAYOUT.rows, Row("{s}.norm.bias", "{s}/norm/scale"))), config)
    names = [pair.foreign for pair in expand(layout, config)]
    assert [name for name in names if "final" in name] == ["decoder.final", "encoder.final"]
    assert "encoder.layers.11.self_attention.query.weight" in names


def test_a_parameter_without_a_row_is_named():
    config = small_config("pre_norm")
    rows = tuple(row for row in LAYOUT.rows if "output_projection" not in row.foreign)
    with pytest.raises(InputError, match="no row for output_projection/bias, output_projection/k"):
        expand(Layout("x", rows), config)


def test_a_row_that_fits_no_parameter_of_any_config_is_named():
    misspelt = "encoder/layers_{i}/feed_forward/iner/kernel"
    inner = "encoder/layers_{i}/feed_forward/inner/kernel"
    stack = tuple(f"encoder/layers_0/self_attention/{name}/bias" for name in ("query", "kee"))
    no_parameter = "which is no parameter of any config"
    for row, message in (
        (Row("x.{i}", misspelt), f"'x.{{i}}' names '{misspelt}', {no_parameter}; nearest: {inner}"),
        (Row("y", "encoder/layer_0/norm/scale"), "the row 'y' names 'encoder/layer_0"),
        (Row("z", stack), f"the row 'z' names '{stack[1]}', {no_parameter}"),
    ):
        with pytest.raises(InputError, match=re.escape(message)):
            convert.from_torch({}, small_config("pre_norm"), Layout("x", (*LAYOUT.rows, row)))


def test_a_row_of_a_layer_or_option_that_the_config_lacks_is_skipped():
    config = small_config("vaswani2017")
    rows = (Row("x", "encoder/layers_7/self_attention/query/bias"), Row("y", "encoder/norm/bias"))
    assert expand(Layout("x", (*LAYOUT.rows, *rows)), config) == expand(LAYOUT, config)


@pytest.mark.parametrize("name", porting.layouts())
def test_every_row_of_every_layout_can_match(name):
    layout = porting.get_layout(name)
    for row in layout.rows:
        check_possible(layout, row)


def test_an_unknown_layout_is_refused_with_the_known_ones():
    with pytest.raises(InputError, match="layout='torchnn' is unknown; choose one of reference, t"):
        convert.get_layout("torchnn")


def test_a_computed_buffer_that_is_no_float_keeps_its_type():
    config = small_config("pre_norm")
    mask = Buffer("causal", lambda config: np.tril(np.ones((5, 5), bool)))
    layout = Layout("masked", LAYOUT.rows, (mask,))
    tensors = convert.to_torch(random_params(config), config, layout)
    assert tensors["causal"].dtype == torch.bool
    convert.from_torch(tensors, config, layout)
    tensors["causal"][4, 1] = False
    with pytest.raises(ConversionError, match=r"causal +is 0 at \[4, 1\], computed 1"):
        convert.from_torch(tensors, config, layout)
