"""Tensors through a layout: every bit arrives, every fault is refused, nothing is half done.

No config claims more than the weights hold, and none costs more time than they do.
"""

import copy
import dataclasses
import itertools
import pathlib
import time
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import torch_reference
from jax_transformer import InputError, TransformerConfig, convert
from jax_transformer.config import LARGEST
from jax_transformer.convert import ConversionError
from jax_transformer.convert.layouts.reference import LAYOUT
from jax_transformer.convert.table import expand, flatten, nest
from jax_transformer.porting import verify
from jax_transformer.storage.weights.arrays import as_torch
from tests.convert.foreign import MODELS, randomized
from tests.convert.tools import (
    assert_same_params,
    assert_same_tensors,
    reference_case,
    refused,
    same_bits,
)
from tests.models import random_params, small_config, unchecked
from tests.tiers import tiered

PRESETS = {  # the preset that each layout is for
    "reference": "vaswani2017",
    "torch_nn": "torch_nn",
    "torch_nn_encoder": "torch_nn",
    "torch_nn_decoder": "torch_nn",
    "torch_nn_attention": "torch_nn",
    "shared_heads": "shared_heads",
    "pre_norm": "pre_norm",
    "pre_norm_memory_norm": "pre_norm_memory_norm",
    "pre_norm_log_softmax": "pre_norm_log_softmax",
}
TYPES = {
    "float16": (np.float16, np.uint16),
    "bfloat16": (ml_dtypes.bfloat16, np.uint16),
    "float32": (np.float32, np.uint32),
    "float64": (np.float64, np.uint64),
}


def random_bits(shape, name, random):
    """Return any bits at all: subnormals, -0.0, infinities and NaNs with payloads among them."""
    kind, unsigned = TYPES[name]
    width = np.dtype(unsigned).itemsize * 8
    bits = random.integers(0, 2**width, shape, unsigned, endpoint=False)
    infinity = int(np.array(np.inf, kind).view(unsigned))
    special = [1, 1 << (width - 1), infinity + 1, infinity | 5, (1 << (width - 1)) | infinity | 3]
    flat = bits.reshape(-1)
    flat[: len(special)] = special[: flat.size]
    return bits.view(kind)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("layout", PRESETS)
def test_random_bits_survive_both_directions(layout, name, x64):
    config = small_config(PRESETS[layout])
    random = np.random.default_rng(0)
    options = {"allow_nonfinite": True, "buffers": False}
    tensors, tied = {}, {}
    for pair in expand(convert.get_layout(layout), config):
        bits = tied.setdefault(pair.paths, random_bits(pair.shape, name, random))
        tensors[pair.foreign] = as_torch(bits)
    params = convert.from_torch(tensors, config, layout, **options)
    assert_same_tensors(convert.to_torch(params, config, layout, **options), tensors)
    assert_same_params(convert.from_torch(tensors, config, layout, **options), params)
    assert all(leaf.dtype == name for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("preset", TransformerConfig.presets())
def test_the_reference_is_loaded_strictly_and_comes_back_bit_equal(preset):
    config = small_config(preset)
    params = random_params(config)
    module = torch_reference.Transformer(config)
    assert module.load_state_dict(convert.to_torch(params, config), strict=True)
    assert_same_params(convert.from_torch(module.state_dict(), config), params)
    state_dict = randomized(module).state_dict()
    back = convert.to_torch(convert.from_torch(state_dict, config), config)
    assert_same_tensors(back, state_dict)


@pytest.mark.parametrize("turn", [convert.from_torch, convert.to_torch])
def test_each_name_dropped_added_or_reshaped_is_refused_and_nothing_changes(turn):
    config, params, state_dict = reference_case()
    leaves = state_dict if turn is convert.from_torch else flatten(params)
    as_given = dict if turn is convert.from_torch else nest
    before = copy.deepcopy(leaves)
    for name, leaf in leaves.items():
        changes = {
            ("missing", name): {n: other for n, other in leaves.items() if n != name},
            ("unexpected", f"{name}_ema"): leaves | {f"{name}_ema": leaf},
            ("wrong shape", name): leaves | {name: leaf[None]},
        }
        for fault, changed in changes.items():
            with pytest.raises(ConversionError) as caught:
                turn(as_given(changed), config)
            assert [entry[:2] for entry in caught.value.report.faults] == [fault]
    assert_same_tensors(leaves, before)


def test_one_error_lists_every_fault_with_both_shapes_and_the_nearest_name():
    config, _, state_dict = reference_case()
    state_dict["decoder.norm.wieght"] = state_dict.pop("decoder.norm.weight")
    state_dict["encoder.layers.0.feed_forward.inner.weight"] = torch.zeros(42, 53)
    state_dict["encoder.layers.0.feed_forward.outer.bias"] = torch.zeros(42, dtype=torch.int32)
    state_dict["encoder.norm.bias"][5] = float("nan")
    state_dict["extra"] = torch.zeros(2)
    with pytest.raises(ConversionError) as caught:
        convert.from_torch(state_dict, config)
    first, *lines = str(caught.value).splitlines()
    assert first == (
        "layout 'reference' does not fit, nothing was converted: "
        "1 missing, 2 unexpected, 1 wrong shape, 1 wrong dtype, 1 not finite"
    )
    assert [" ".join(line.split()) for line in lines] == [
        "missing decoder.norm.weight nearest: decoder.norm.wieght",
        "unexpected decoder.norm.wieght nearest: decoder.norm.weight",
        "unexpected extra",
        "wrong shape encoder.layers.0.feed_forward.inner.weight [42, 53], expected [53, 42]",
        "wrong dtype encoder.layers.0.feed_forward.outer.bias int32, expected a floating-point "
        "type; or give dtype=",
        "not finite encoder.norm.bias nan at [5]",
    ]


@pytest.mark.parametrize("name", tiered(TYPES, ["bfloat16"]))
def test_one_value_that_is_not_finite_is_named_or_allowed(name, x64):
    config, _, _ = reference_case()
    tensors = convert.to_torch(random_params(config, dtype=TYPES[name][0]), config)
    values = itertools.cycle((np.nan, np.inf, -np.inf))
    for tensor, value in zip(tensors.values(), values, strict=False):
        index = tuple(size // 2 for size in tensor.shape)
        before = tensor[index].clone()
        tensor[index] = value
        (entry,) = refused(tensors, config).faults
        assert entry.kind == "not finite"
        assert entry.detail == f"{value} at {list(index)}"
        tensor[index] = before
    params = convert.from_torch(tensors, config)
    for tensor in tensors.values():
        tensor[...] = np.nan
    convert.from_torch(tensors, config, allow_nonfinite=True)
    params["encoder"]["norm"]["bias"] = params["encoder"]["norm"]["bias"].at[3].set(np.inf)
    with pytest.raises(ConversionError, match=r"encoder/norm/bias +inf at \[3\]"):
        convert.to_torch(params, config)
    convert.to_torch(params, config, allow_nonfinite=True)


def test_no_type_is_changed_in_silence():
    config, _, state_dict = reference_case()
    name = "encoder.norm.bias"
    others = {
        "int64": torch.ones(42, dtype=torch.int64),
        "uint8": torch.ones(42, dtype=torch.uint8),
        "bool": torch.ones(42, dtype=torch.bool),
        "complex64": torch.ones(42, dtype=torch.complex64),
        "float8": torch.ones(42).to(torch.float8_e4m3fn),
        "sparse": torch.ones(42).to_sparse(),
        "meta": torch.ones(42, device="meta"),
        "object": np.array(["1"] * 42, object),
        "text": np.array(["1"] * 42),
        "none": None,
    }
    for kind, other in others.items():
        (entry,) = refused(state_dict | {name: other}, config).faults
        assert entry.name == name, kind
        assert entry.kind in ("wrong dtype", "wrong shape"), kind
    for kind in ("complex64", "float8", "sparse", "meta", "object", "text", "none"):
        refused(state_dict | {name: others[kind]}, config, dtype="float32")
    for kind in ("int64", "uint8", "bool"):
        tensors = state_dict | {name: others[kind]}
        params = convert.from_torch(tensors, config, dtype="float32")
        np.testing.assert_array_equal(params["encoder"]["norm"]["bias"], np.ones(42, np.float32))


def test_float64_needs_x64_or_a_type_to_convert_to():
    config, params, _ = reference_case()
    doubles = convert.to_torch(jax.tree.map(lambda leaf: leaf.astype(np.float64), params), config)
    assert all(tensor.dtype == torch.float64 for tensor in doubles.values())
    with pytest.raises(InputError, match="jax_enable_x64, or give dtype='float32'"):
        convert.from_torch(doubles, config)
    assert_same_params(convert.from_torch(doubles, config, dtype="float32"), params)
    for dtype in ("int8", "3", "", "float17", "f4,f4", "x" * 5000, "\0"):
        with pytest.raises(InputError, match=r"dtype='.* must be one of float16, bfl") as refusal:
            convert.from_torch(doubles, config, dtype=dtype)
        assert len(str(refusal.value)) < 200


@pytest.mark.parametrize("target", ["float16", "bfloat16"])
def test_a_conversion_reports_its_rounding_error(target):
    config, params, state_dict = reference_case()
    read, report = convert.to_params(
        state_dict, config, convert.get_layout("reference"), dtype=target
    )
    converted = {entry.name: entry.detail for entry in report.entries if entry.kind == "converted"}
    assert set(converted) == set(state_dict)
    name = "encoder.norm.weight"
    exact = params["encoder"]["norm"]["scale"]
    rounded = exact.astype(TYPES[target][0])
    worst = np.abs(rounded.astype(np.float32) - exact).max()
    assert worst > 0
    assert converted[name] == f"float32 to {target}, largest rounding error {worst:.3g}"
    assert same_bits(read["encoder"]["norm"]["scale"], rounded)
    written = convert.to_torch(params, config, dtype=target)
    assert same_bits(written[name], rounded)


def test_a_conversion_that_overflows_is_refused():
    config, params, state_dict = reference_case()
    state_dict["encoder.norm.bias"][7] = 1e30
    (entry,) = refused(state_dict, config, dtype="float16").faults
    assert entry.detail == "1.0000000150474662e+30 at [7] in float16"
    params["encoder"]["norm"]["bias"][7] = 1e30
    with pytest.raises(ConversionError, match=r"encoder/norm/bias .* at \[7\] in float16"):
        convert.to_torch(params, config, dtype="float16")


def test_a_stack_of_different_types_is_refused():
    config = small_config("torch_nn", num_encoder_layers=1, num_decoder_layers=1)
    params = random_params(config)
    query = params["encoder"]["layers_0"]["self_attention"]["query"]
    query["kernel"] = query["kernel"].astype(ml_dtypes.bfloat16)
    with pytest.raises(ConversionError, match=r"in_proj_weight +would stack bfloat16 and float32"):
        convert.to_torch(params, config, "torch_nn")


def test_ties_are_kept_reported_or_refused():
    config = small_config("vaswani2017", num_encoder_layers=1, num_decoder_layers=1)
    extra = (convert.Row("generator.weight", "token_embedding/embedding"),)
    layout = convert.Layout("tied", LAYOUT.rows + extra)
    params = random_params(config)
    tensors = convert.to_torch(params, config, layout)
    assert tensors["generator.weight"] is tensors["token_embedding.weight"]

    def details(tensors):
        _, report = convert.to_params(tensors, config, layout)
        return [entry.detail for entry in report.entries if entry.kind == "tied"]

    assert details(tensors) == ["to token_embedding.weight"]
    tensors["generator.weight"] = tensors["generator.weight"].clone()
    assert details(tensors) == ["to token_embedding.weight, an equal copy of its own"]
    tensors["generator.weight"][3, 5] = -tensors["generator.weight"][3, 5]
    assert refused(tensors, config, layout).names("not tied") == ["generator.weight"]
    for name in ("generator.weight", "token_embedding.weight"):  # one copy is enough
        one = {other: tensor for other, tensor in tensors.items() if other != name}
        convert.from_torch(one, config, layout)
    neither = {name: tensor for name, tensor in tensors.items() if "layers" in name}
    assert refused(neither, config, layout).names("missing") == ["token_embedding.weight"]


def test_a_tie_that_the_config_does_not_have_is_reported():
    config = small_config("pre_norm", src_vocab_size=41)
    tensors = convert.to_torch(random_params(config), config)
    tensors["target_embedding.weight"] = tensors["source_embedding.weight"]
    _, report = convert.to_params(tensors, config, LAYOUT)
    assert report.names("untied") == ["target_embedding.weight"]


def test_prefixes_are_stripped_where_asked_and_suggested_where_missing():
    config, params, state_dict = reference_case()
    for prefixes in (("module.",), ("body.transformer.",), ("module.", "_orig_mod.")):
        prefix = "".join(prefixes)
        wrapped = {prefix + name: tensor for name, tensor in state_dict.items()}
        with pytest.raises(ConversionError) as caught:
            convert.from_torch(wrapped, config)
        _, hint, *lines = str(caught.value).splitlines()
        assert hint.strip() == (
            f"every name begins with {prefix!r}: pass strip_prefixes=({prefix!r},), on the command "
            f"line --strip-prefixes {prefix}"
        )
        assert len(lines) <= 18
        assert len(caught.value.report.faults) == 2 * len(state_dict)
        assert_same_params(convert.from_torch(wrapped, config, strip_prefixes=(prefix,)), params)
        read, report = convert.to_params(wrapped, config, LAYOUT, strip_prefixes=prefixes)
        assert_same_params(read, params)
        assert report.names("stripped") == list(wrapped)
    twice = {f"module.{name}": tensor for name, tensor in state_dict.items()} | state_dict
    report = refused(twice, config, strip_prefixes=("module.",))
    assert len(report.names("unexpected")) == len(state_dict)
    extra = refused(twice | {"extra": state_dict["encoder.norm.bias"]}, config)
    assert extra.hint.endswith("left out by --drop NAME ... on the command line")
    with pytest.raises(InputError, match=r"strip_prefixes='module\.' must be a sequence"):
        convert.from_torch(wrapped, config, strip_prefixes="module.")


def test_a_prefix_of_some_names_is_suggested_with_their_number():
    config, _, state_dict = reference_case()
    wrapped = {
        name if "embedding" in name else f"body.{name}": tensor
        for name, tensor in state_dict.items()
    }
    count = sum("embedding" not in name for name in state_dict)
    report = refused(wrapped, config)
    assert report.hint.startswith(f"{count} of {len(wrapped)} names begin with 'body.': pass strip")
    few = {"body.encoder.norm.bias": state_dict["encoder.norm.bias"]}  # the prefix explains little
    assert refused(few, config).hint == ""


@pytest.mark.exhaustive
def test_every_line_shown_for_renamed_tensors_has_the_nearest_name():
    """A model with more names than were once compared: 12 layers a side."""
    config = small_config("pre_norm", num_encoder_layers=12, num_decoder_layers=12)
    state_dict = convert.to_torch(random_params(config), config)
    renamed = {name.replace("_attention", "_attn"): tensor for name, tensor in state_dict.items()}
    with pytest.raises(ConversionError) as caught:
        convert.from_torch(renamed, config)
    lines = str(caught.value).splitlines()
    assert len(lines) <= 20
    shown = [line for line in lines if line.startswith(("  missing", "  unexpected"))]
    assert len(shown) == 16
    assert all(line.count(".{0..11}.") == 2 for line in shown)
    assert all("  nearest: " in line for line in shown)
    count = sum("_attention" in name for name in state_dict)
    assert len(caught.value.report.faults) == 2 * count
    assert [line for line in lines if "more" in line] == [
        f"  ... and {count - 8 * 12} more {kind}" for kind in ("missing", "unexpected")
    ]


def test_what_is_no_state_dict_is_refused_with_the_remedy():
    config, _, _ = reference_case()
    for source, message in (
        ("weights.pt", r"'weights.pt' is a path, .*storage\.weights\.read\(path\)"),
        (pathlib.Path("weights.pt"), "is a path, not a state_dict: read the file with"),
        (torch.nn.Linear(2, 3), r"a Linear is a module, .*: pass module\.state_dict\(\)"),
        ([("a", 1)], "a list is no mapping of names to tensors"),
    ):
        for read in (convert.from_torch, lambda *a: convert.to_params(*a, LAYOUT), verify):
            with pytest.raises(InputError, match=message), unchecked():
                read(source, config)


FORMS = {  # the same values in memory of another form
    "of jax": jnp.asarray,
    "Fortran order": np.asfortranarray,
    "every second": lambda array: np.repeat(array, 2, axis=-1)[..., ::2],
    "backwards": lambda array: np.ascontiguousarray(array[::-1])[::-1],
    "big-endian": lambda array: array.astype(array.dtype.newbyteorder(">")),
    "read-only": lambda array: np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", ["reference", "torch_nn", "pre_norm"])
def test_memory_of_any_form_is_read_and_contiguous_memory_is_written(layout, form):
    config = small_config(PRESETS[layout], num_encoder_layers=1, num_decoder_layers=1)
    params = random_params(config)
    table = convert.get_layout(layout)
    tensors, _ = convert.to_tensors(params, config, table)
    odd = {name: FORMS[form](tensor) for name, tensor in tensors.items()}
    assert_same_params(convert.to_params(odd, config, table)[0], params)
    written, _ = convert.to_tensors(jax.tree.map(FORMS[form], params), config, table)
    assert_same_tensors(written, tensors)
    for array in (*written.values(), *jax.tree.leaves(convert.to_params(odd, config, table)[0])):
        assert array.flags.c_contiguous
        assert array.flags.writeable
        assert array.dtype.isnative


def test_a_view_that_claims_terabytes_is_refused_unread():
    config, _, state_dict = reference_case()
    state_dict["encoder.norm.bias"] = torch.zeros(1).expand(10**12)
    assert refused(state_dict, config).names("wrong shape") == ["encoder.norm.bias"]
    config = small_config("pre_norm")
    state_dict = MODELS["pre_norm"](config).state_dict()
    state_dict["source_pos.postitons"] = torch.zeros(1).expand(10**12)
    assert refused(state_dict, config, "pre_norm").names("wrong shape") == ["source_pos.postitons"]


@pytest.mark.parametrize("layout", ["reference", "torch_nn", "pre_norm"])
def test_no_memory_is_shared(layout):
    config = small_config(PRESETS[layout], num_encoder_layers=1, num_decoder_layers=1)
    params = jax.tree.map(jnp.array, random_params(config))
    before = jax.tree.map(np.array, params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of memory that it may not write to
        tensors = convert.to_torch(params, config, layout)
    for tensor in tensors.values():
        tensor.add_(1)
    assert_same_params(params, before)
    tensors = convert.to_torch(params, config, layout)
    read = convert.from_torch(tensors, config, layout)
    plain, _ = convert.to_params(tensors, config, convert.get_layout(layout))
    written, _ = convert.to_tensors(plain, config, convert.get_layout(layout))
    for tensor in tensors.values():
        tensor.zero_()
    for array in written.values():
        array.fill(0)
    assert_same_params(read, before)
    assert_same_params(plain, before)


def test_a_report_prints_every_tensor():
    config, params, _ = reference_case()
    tensors, report = convert.to_tensors(params, config, convert.get_layout("pre_norm"))
    lines = str(report).splitlines()
    assert lines[0].startswith("layout 'pre_norm': ")
    assert lines[0].endswith("2 computed")
    assert len(lines) == 1 + len(tensors)
    assert all(any(f" {name} " in line for line in lines) for name in tensors)


@pytest.mark.parametrize("layout", ["reference", "torch_nn", "pre_norm"])
def test_a_config_that_claims_more_than_there_is_is_refused_at_once(layout):
    config = small_config(PRESETS[layout], num_encoder_layers=1, num_decoder_layers=2)
    params, rows = random_params(config), convert.get_layout(layout)
    tensors, _ = convert.to_tensors(params, config, rows)
    table = r"postitons  \[1, 29, 42\], expected \[1, 2147483647, 42\]"
    directions = (
        (convert.to_params, tensors, "tensors", table),
        (convert.to_tensors, params, "parameters", r"postitons' of max_length=2147483647 would"),
    )
    for turn, arrays, what, of_table in directions:
        layers = rf"ayers=10000 .*the {what} hold at most [234] layers of"
        claims = {
            "num_encoder_layers": (10_000, layers),
            "num_decoder_layers": (3, r"missing .*decoder.layers.2|at most 2 layers"),
            "d_model": (3 * 10**8, r"wrong shape .* expected \[300000000, 300000000\]"),
            "d_ff": (LARGEST, r"wrong shape .*2147483647\]"),
        }
        if layout == "pre_norm":
            claims["max_length"] = (LARGEST, of_table)
        for field, (claim, message) in claims.items():
            claimed = dataclasses.replace(config, **{field: claim})
            start = time.process_time()
            with pytest.raises(InputError, match=message):
                turn(arrays, claimed, rows)
            assert time.process_time() - start < 2
    # A prefix does not hide the layers.
    wrapped = {f"module.{name}": tensor for name, tensor in tensors.items()}
    with pytest.raises(convert.ConversionError) as raised:
        convert.from_torch(wrapped, config, layout)
    report = raised.value.report
    assert not any("layers=" in name for name in report.names("missing"))
    assert report.hint.startswith("every name begins with 'module.'")


@pytest.mark.parametrize(
    ("layout", "stack"), [("torch_nn_encoder", "encoder"), ("torch_nn_decoder", "decoder")]
)
def test_layers_outside_of_the_scope_are_not_counted(layout, stack):
    config = small_config("torch_nn", num_encoder_layers=1, num_decoder_layers=1)
    params = random_params(config)[stack]
    many = {"num_encoder_layers": 9999, "num_decoder_layers": 9999, f"num_{stack}_layers": 1}
    tensors, _ = convert.to_tensors(params, config, convert.get_layout(layout))
    convert.from_torch(tensors, dataclasses.replace(config, **many), layout)


def test_more_zeros_than_there_are_numbers_are_refused():
    """A layout's file may say that whatever is absent means zeros."""
    config = small_config("vaswani2017", num_encoder_layers=1, num_decoder_layers=1)
    tensors, _ = convert.to_tensors(random_params(config), config, LAYOUT)
    rows = [dataclasses.replace(row, zeros=True) for row in LAYOUT.rows]
    layout = dataclasses.replace(LAYOUT, rows=tuple(rows))
    name = "encoder.layers.0.feed_forward.inner.weight"
    others = {other: tensor for other, tensor in tensors.items() if other != name}
    params, report = convert.to_params(others, config, layout)
    assert report.names("zeros") == [name]
    assert not params["encoder"]["layers_0"]["feed_forward"]["inner"]["kernel"].any()
    bias = "encoder.layers.0.feed_forward.outer.bias"
    for few in ({}, {bias: tensors[bias]}):
        with pytest.raises(InputError, match="would be zeros, but the tensors hold only"):
            convert.to_params(few, dataclasses.replace(config, d_ff=LARGEST), layout)
