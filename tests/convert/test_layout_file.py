"""A layout in a TOML file: there and back, what a person writes, and what is refused."""

import contextlib
import dataclasses
import os
import time

import hypothesis
import pytest
import tomli_w
from hypothesis import strategies as st

from jax_transformer import InputError, TransformerConfig, convert, porting
from jax_transformer.convert import (
    Buffer,
    Layout,
    LayoutFile,
    Operation,
    PositionTable,
    Row,
    read_layout,
    write_layout,
)
from jax_transformer.convert.table import Masks
from tests.convert.tools import assert_same_params, assert_same_tensors
from tests.models import random_params, small_config

COMPUTED = ("m2m_100", "IndicTrans", "fairseq")  # functions compute their buffers
WRITABLE = [name for name in porting.layouts() if name not in COMPUTED]
BY_HAND = """
name = "mine"
unused = ["step"]

[config]
preset = "pre_norm"
d_model = 42
num_heads = 3
decoder_final_norm = false

[[rows]]
foreign = "enc.{i}.qkv"
parameters = [
  "encoder/layers_{i}/self_attention/query/kernel",
  "encoder/layers_{i}/self_attention/key/kernel",
]
stack = "columns"

[[rows]]
foreign = "enc.{i}.v"
parameters = "encoder/layers_{i}/self_attention/value/kernel"
operation = "transpose"
shape = ["num_heads", "head_dim", -1]

[[rows]]
foreign = "head.bias"
parameters = "output_projection/bias"
zeros = true
when = ["output_bias", true]

[[buffers]]
foreign = "pos"
kind = "position_table"
shape = ["length", 1, "d_model"]
length = 5000
"""
ROW = '[[rows]]\nforeign = "x"\nparameters = "encoder/norm/scale"\n'


@pytest.fixture
def write(tmp_path):
    def write(text, name="mine.toml"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


@pytest.mark.parametrize("name", WRITABLE)
def test_every_layout_comes_back_equal(tmp_path, name):
    path, layout = tmp_path / "x.toml", porting.get_layout(name)
    write_layout(path, layout)
    assert read_layout(path) == LayoutFile(layout, None)
    assert convert.get_layout(path) == convert.get_layout(str(path)) == layout


@pytest.mark.parametrize("preset", TransformerConfig.presets())
def test_every_config_comes_back_equal(tmp_path, preset):
    for config in (TransformerConfig.preset(preset), small_config(preset, dropout=0.25)):
        write_layout(tmp_path / "x.toml", convert.get_layout("torch_nn"), config, overwrite=True)
        assert read_layout(tmp_path / "x.toml").config == config


def test_what_a_person_writes(write):
    layout, config = read_layout(write(BY_HAND))
    block = "encoder/layers_{i}/self_attention"
    assert layout == Layout(
        "mine",
        (
            Row("enc.{i}.qkv", (f"{block}/query/kernel", f"{block}/key/kernel"), stack="columns"),
            Row(
                "enc.{i}.v", f"{block}/value/kernel", Operation(True, ("num_heads", "head_dim", -1))
            ),
            Row("head.bias", "output_projection/bias", zeros=True, when=("output_bias", True)),
        ),
        (Buffer("pos", PositionTable(("length", 1, "d_model"), 5000)),),
        unused=("step",),
    )
    fields = {"d_model": 42, "num_heads": 3, "decoder_final_norm": False}
    assert config == TransformerConfig.preset("pre_norm", **fields)


def test_weights_go_through_a_file_both_ways(tmp_path):
    config = small_config("pre_norm")
    params, path = random_params(config), tmp_path / "pre_norm.toml"
    write_layout(path, convert.get_layout("pre_norm"), config)
    assert path.read_text().startswith("# No weights tell the rates of dropout, the initiali")
    state_dict = convert.to_torch(params, config, layout=path)
    assert_same_tensors(state_dict, convert.to_torch(params, config, "pre_norm"))
    assert_same_params(convert.from_torch(state_dict, config, layout=str(path)), params)


@pytest.mark.parametrize("shape", [(1, "length", "d_model"), ("length", 1, "d_model")])
@pytest.mark.parametrize("length", [None, 31])
def test_a_position_table_has_the_shape_and_the_length_that_it_names(shape, length):
    config = small_config("marian")
    table = PositionTable(("length", "d_model"), length)(config)
    assert table.shape == (length or config.max_length, config.d_model)
    own = PositionTable(shape, length)(config)
    assert own.shape == tuple({"length": len(table), "d_model": 42}.get(a, a) for a in shape)
    assert (own.reshape(table.shape) == table).all()
    sines = PositionTable(("length", "d_model"), length)(small_config("pre_norm"))
    assert not (sines == table).all()


def test_a_position_table_with_an_offset_has_rows_for_every_position():
    fields = {"positions": "sinusoidal_tensor2tensor", "position_offset": 2}
    config = dataclasses.replace(small_config("pre_norm"), **fields)
    assert PositionTable()(config).shape == (1, config.max_length + 2, 42)


def test_what_is_no_position_table_is_refused():
    for shape in ((), ("length",), ("d_model", "length"), (2, "length", "d_model"), (True,)):
        with pytest.raises(InputError, match="must hold 'length', then 'd_model'"):
            PositionTable(shape)
    with pytest.raises(InputError, match="length=0 must be a whole number"):
        PositionTable(length=0)
    with pytest.raises(InputError, match="positions='none' has no computed table"):
        PositionTable()(small_config("torch_nn"))


def test_nothing_is_overwritten_without_being_told(tmp_path):
    path, layout = tmp_path / "x.toml", convert.get_layout("reference")
    path.write_text("mine")
    with pytest.raises(InputError, match="already exists"):
        write_layout(path, layout)
    assert path.read_text() == "mine"
    write_layout(path, layout, overwrite=True)
    assert read_layout(path).layout == layout
    assert os.listdir(tmp_path) == ["x.toml"]


def test_what_a_file_cannot_hold_is_refused_and_nothing_written(tmp_path):
    path = tmp_path / "x.toml"
    with pytest.raises(InputError, match=r"'model.encoder.embed_positions.weights' is computed by"):
        write_layout(path, convert.get_layout("m2m_100"))
    row = Row("{a}{b}.bias", "{a}/{b}/bias")
    with pytest.raises(InputError, match=r"x.toml cannot hold this layout: .* at most one"):
        write_layout(path, Layout("x", (row,)))
    with pytest.raises(InputError, match=r"must end in .toml"):
        write_layout(tmp_path / "x.json", convert.get_layout("reference"))
    with pytest.raises(InputError, match=r"the folder .* does not exist"):
        write_layout(tmp_path / "y" / "x.toml", convert.get_layout("reference"))
    assert os.listdir(tmp_path) == []


USUAL_ROW = {"foreign": "x", "parameters": "encoder/norm/scale"}


def with_rows(*changes, **others):
    """Return the text of a file with a row for each of these changes of the usual one."""
    return tomli_w.dumps({"name": "x", "rows": [USUAL_ROW | change for change in changes]} | others)


def with_buffer(kind, shape, **others):
    return with_rows({}, buffers=[{"foreign": "p", "kind": kind, "shape": shape} | others])


REFUSED = {
    "no TOML": ("name = ", "is not TOML: 'Invalid value (at"),
    "no UTF-8": (b'name = "\xff"', "is no readable layout"),
    "deep": ("a = " + "[" * 5000, "is not TOML"),
    "long number": ("name = " + "9" * 5000, "is not TOML"),
    "empty rows": (with_rows(), "length >= 1 - at `$.rows`"),
    "unknown key": (with_rows({}, rowz=1), "unknown field `rowz`"),
    "unknown key of a row": (with_rows({"kind": 1}), "field `kind` - at `$.rows[0]`"),
    "second row": (with_rows({}, {"zeros": 1}), "got `int` - at `$.rows[1].zeros`"),
    "stack": (with_rows({"stack": "row"}), "'row' - at `$.rows[0].stack`"),
    "stack of one": (
        with_rows({"stack": "heads"}),
        "needs several parameters, not one - at `$.rows[0]`",
    ),
    "shape's word": (with_rows({"shape": ["to_dict"]}), "must hold lengths, one -1 at most"),
    "when": (with_rows({"when": ["heads", 1]}), "heads=1 is not a setting"),
    "path": (
        with_rows({"parameters": "encoder/norm/scales"}),
        "the row 'x' names 'encoder/norm/scales', which is no parameter of any config; nearest",
    ),
    "no path": (with_rows({"parameters": []}), "at least one parameter"),
    "braces that format": (with_rows({"foreign": "{i:>999999999}"}), "braces must hold a word"),
    "words side by side": (
        with_rows({"foreign": "{a}{b}", "parameters": "{a}/{b}/scale"}),
        "must hold at most one {word} between two '.'",
    ),
    "length": (
        with_buffer("position_table", ["length", "d_model"], length=10**12),
        "<= 131072 - at `$.buffers[0].length`",
    ),
    "buffer's shape": (with_buffer("position_table", [2]), "axes of length 1 - at `$.buffers[0]`"),
    "triangle's numbers": (
        with_buffer("triangle", [2, 2], dtype="bool", values=[1]),
        "values=(1,) must be 2 numbers - at `$.buffers[0]`",
    ),
    "list's numbers": (
        with_buffer("list", [2], dtype="int8", values=[1, 300]),
        "values=(1, 300) are no int8 - at `$.buffers[0]`",
    ),
    "range's type": (
        with_buffer("range", [2], dtype="object", values=[0, 1]),
        "kind='range', dtype='object': a buffer is a range or a triangle or a list of bool",
    ),
    "range's shape": (
        with_buffer("range", [100_000, 100_000], dtype="int8", values=[0, 1]),
        "must hold lengths of at most 16,777,216 numbers together",
    ),
    "preset": (with_rows({}, config={"preset": "y"}), "config: preset='y' is unknown"),
    "field": (with_rows({}, config={"heads": 3}), "config: heads=3 is not a setting"),
    "long value": (with_rows({}, config={"num_heads": "3" * 9999}), "num_heads='33"),
}


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_file_is_refused_in_one_line_that_names_the_place(write, text, message):
    path = write(text)
    with pytest.raises(InputError) as refused:
        read_layout(path)
    said = str(refused.value)
    assert said.startswith(str(path))
    assert message in said
    assert "\n" not in said
    assert len(said) < 800


def test_what_is_no_regular_file_of_a_bounded_size_is_refused(write, tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")  # reading it would wait for ever
    for path in (tmp_path, write(b"#" * (2**20 + 1)), tmp_path / "pipe.toml"):
        with pytest.raises(InputError, match="no regular file of at most"):
            read_layout(path)
    with pytest.raises(InputError, match=r"nowhere.toml is no readable layout \(FileNotFoundErr"):
        convert.get_layout("nowhere.toml")


PATHS = ", ".join(["'encoder/norm/bias'"] * 40_000)
HOSTILE = {
    "many rows": 'name = "x"\n' + ROW * 9000,
    "many paths": f'name = "x"\n[[rows]]\nforeign = "x"\nparameters = [{PATHS}]',
    "dotted key": "a." * 200_000 + "b = 1",
    "dotted keys": "".join(f"[{'a.' * 64}b{i}]\n" for i in range(7600)),
    "escapes": 'name = "' + r"\n" * 500_000 + '"',
    "a deep table": "a = " + "{a=" * 300_000,
    "long word": f'name = "x"\n[[rows]]\nforeign = "{{{"w" * 200}}}"\nparameters = "{"/" * 250}"',
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_takes_bounded_time(write, text):
    begin, path = time.process_time(), write(text)
    with pytest.raises(InputError):
        convert.from_torch({}, small_config("pre_norm"), path)
    assert time.process_time() - begin < 20


LEAVES = st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@hypothesis.settings(deadline=None, max_examples=200)
@hypothesis.given(st.data())
@pytest.mark.exhaustive
def test_random_values_of_known_keys_are_read_or_refused(tmp_path_factory, data):
    known = {
        "top": ["scope", "unused", "config", "rows", "buffers", "name"],
        "rows": ["foreign", "parameters", "operation", "shape", "stack", "zeros", "when"],
        "config": ["preset", "d_model", "norm_epsilon", "positions", "norm_bias", "d_kv"],
    }
    values = {"name": "x", "rows": [dict(USUAL_ROW)]}
    place = data.draw(st.sampled_from(list(known)))
    key, value = data.draw(st.sampled_from(known[place])), data.draw(VALUES)
    if place == "top":
        values[key] = value
    elif place == "rows":
        values["rows"][0][key] = value
    else:
        values["config"] = {key: value}
    path = tmp_path_factory.mktemp("random") / "x.toml"
    path.write_bytes(tomli_w.dumps(values).encode("utf-8", "replace"))
    with contextlib.suppress(InputError):
        layout = read_layout(path).layout
        write_layout(path, layout, overwrite=True)
        assert read_layout(path).layout == layout
        return
    with pytest.raises(InputError, match=r"^[^\n]*\Z"):
        read_layout(path)


def test_masks_that_are_not_the_usual_ones_stand_in_the_file(tmp_path):
    path, layout = tmp_path / "seen.toml", convert.get_layout("pre_norm")
    write_layout(path, layout)
    assert "[masks]" not in path.read_text()
    seen = dataclasses.replace(layout, masks=Masks(memory=False, causal=False))
    write_layout(path, seen, overwrite=True)
    assert "[masks]\nmemory = false\ncausal = false\n" in path.read_text()
    assert read_layout(path).layout == seen
    path.write_text(path.read_text().replace("memory", "memories"))
    with pytest.raises(InputError, match="unknown field `memories`"):
        read_layout(path)
