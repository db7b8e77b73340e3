"""Weight files: every bit comes back, whatever the memory layout, the framework or the accident."""

import contextlib
import os
import re
import zipfile

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from jax_transformer.storage import weights as weight_files
from jax_transformer.storage.weights import safetensors_file
from jax_transformer.storage.weights.checks import DTYPES, WeightFileError
from tests.convert.tools import same_bits
from tests.programs import run_python

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
FLOATS = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)


def random_bits(shape, dtype, seed=0):
    """Return an array of random bits: NaN payloads, subnormals, infinities, negative zeros."""
    dtype = np.dtype(dtype)
    count = int(np.prod(shape))
    if dtype == np.bool_:
        return np.random.default_rng(seed).random(shape) < 0.5
    return np.frombuffer(np.random.default_rng(seed).bytes(count * dtype.itemsize), dtype).reshape(
        shape
    )


def specials(dtype):
    """Return quiet and signalling NaNs with payloads, subnormals, -0.0 and infinities."""
    dtype = np.dtype(dtype)
    finfo = ml_dtypes.finfo(dtype)
    top, mantissa = 8 * dtype.itemsize - 1, finfo.nmant
    infinity = ((1 << (top - mantissa)) - 1) << mantissa
    quiet = 1 << (mantissa - 1)
    bits = [0, 1 << top, 1, quiet, infinity]
    bits += [infinity | 1 << top, infinity | 1, infinity | quiet | 3]
    return np.array(bits, f"u{dtype.itemsize}").view(dtype)


def model():
    random = np.random.default_rng(1)
    return {
        "encoder.weight": random.normal(size=(13, 7)).astype(np.float32),
        "encoder.bias": random.normal(size=7).astype(ml_dtypes.bfloat16),
        "decoder.weight": random.normal(size=(5, 3)),
        "scale": random.normal(size=()).astype(np.float16),
    }


def flipped(path, bit, to):
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    to.write_bytes(data)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_bit_of_every_dtype_comes_back(tmp_path, suffix):
    arrays = {}
    for dtype in (*FLOATS, *DTYPES.values()):
        name = np.dtype(dtype).name
        for shape in ((), (1,), (7,), (5, 3), (2, 1, 11)):
            arrays[f"{name}.{len(shape)}.{shape[-1:]}"] = random_bits(shape, dtype)
    arrays |= {f"{np.dtype(dtype).name}.specials": specials(dtype) for dtype in FLOATS}
    weight_files.write(tmp_path / f"w{suffix}", arrays)
    read = weight_files.read(tmp_path / f"w{suffix}")
    assert read.keys() == arrays.keys()
    assert all(same_bits(read[name], arrays[name]) for name in arrays)
    assert all(array.flags.c_contiguous for array in read.values())


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_any_memory_layout_is_stored_as_its_values(tmp_path, suffix):
    base = np.arange(2 * 12 * 10, dtype=np.float32).reshape(2, 12, 10)
    views = {
        "transposed": base[0].T,
        "axes": base.transpose(2, 0, 1),
        "every_second": base[:, ::2, ::3],
        "reversed": base[:, ::-1],
        "fortran": np.asfortranarray(base),
        "broadcast": np.broadcast_to(base[0, :1], (4, 10)),
        "big_endian": base.astype(">f4"),
        "big_endian_fortran": np.asfortranarray(base.astype(">f4")),
        "unaligned": np.frombuffer(b"x" + base.tobytes(), np.uint8)[1:].view(np.float32),
        "bfloat16_transposed": base[1].astype(ml_dtypes.bfloat16).T,
        "jax_transposed": jnp.asarray(base[0]).T,
        "torch_transposed": torch.tensor(base[0]).T,
        "torch_bfloat16": torch.tensor(base[0]).bfloat16().T,
    }
    weight_files.write(tmp_path / f"w{suffix}", views)
    read = weight_files.read(tmp_path / f"w{suffix}")
    for name, view in views.items():
        expected = view.float().numpy() if isinstance(view, torch.Tensor) else np.asarray(view)
        assert (read[name].astype(np.float64) == expected.astype(np.float64)).all(), name


def test_the_libraries_read_what_is_written(tmp_path):
    arrays = model()
    weight_files.write(tmp_path / "w.safetensors", arrays)
    weight_files.write(tmp_path / "w.pt", arrays)
    by_safetensors = safetensors.numpy.load_file(tmp_path / "w.safetensors")
    by_torch = torch.load(tmp_path / "w.pt", weights_only=True)
    for name, array in arrays.items():
        assert same_bits(by_safetensors[name], array)
        assert str(by_torch[name].dtype) == f"torch.{array.dtype.name}"
        assert np.array_equal(by_torch[name].double().numpy(), array.astype(np.float64))


def test_what_the_libraries_write_is_read(tmp_path):
    module = torch.nn.TransformerDecoderLayer(8, 2, 11).bfloat16()
    state_dict = module.state_dict()
    torch.save(state_dict, tmp_path / "w.pt")
    torch.save(dict(module.named_parameters()), tmp_path / "parameters.pth")
    safetensors.torch.save_file(state_dict, tmp_path / "w.safetensors")
    for name in ("w.pt", "parameters.pth", "w.safetensors"):
        read = weight_files.read(tmp_path / name)
        assert read.keys() == state_dict.keys()
        for key, tensor in state_dict.items():
            bits = read[key].view(np.int16)
            assert np.array_equal(bits, tensor.view(torch.int16).numpy())


@pytest.mark.parametrize("table", [np.arange(6.0).reshape(3, 2), np.arange(6.0).reshape(3, 2).T])
def test_torch_files_keep_ties(tmp_path, table):
    weight_files.write(tmp_path / "w.pt", {"in": table, "out": table, "copy": table.copy()})
    read = weight_files.read(tmp_path / "w.pt")
    assert read["in"] is read["out"]
    assert read["in"] is not read["copy"]
    loaded = torch.load(tmp_path / "w.pt", weights_only=True)
    assert loaded["in"].data_ptr() == loaded["out"].data_ptr() != loaded["copy"].data_ptr()


def test_a_negative_view_of_a_tensor_is_not_that_tensor(tmp_path):
    tensor = torch.arange(6.0).reshape(3, 2)
    torch.save({"in": tensor, "out": tensor._neg_view()}, tmp_path / "w.pt")
    read = weight_files.read(tmp_path / "w.pt")
    np.testing.assert_array_equal(read["out"], -read["in"])


def test_safetensors_needs_no_torch(tmp_path):
    program = """
import sys
import numpy as np
from jax_transformer.convert import weight_files
weight_files.write(sys.argv[1], {"weight": np.ones((2, 3), np.float32)}, metadata={"heads": "8"})
assert weight_files.read(sys.argv[1])["weight"].sum() == 6
assert weight_files.read_metadata(sys.argv[1]) == {"heads": "8"}
assert "torch" not in sys.modules, "torch was imported"
"""
    run_python("-c", program, tmp_path / "w.safetensors")


def test_nested_state_dict_is_picked_by_key(tmp_path):
    path = tmp_path / "checkpoint.pt"
    inner = {"weight": torch.arange(6.0).reshape(2, 3)}
    torch.save({"model": inner, "epoch": 3, "note": "x", "loss": 0.5, "args": None}, path)
    with pytest.raises(WeightFileError, match=r"checkpoint.pt.*'model' \(dict\), 'epoch' \(int\)"):
        weight_files.read(path)
    assert np.array_equal(weight_files.read(path, key="model")["weight"], inner["weight"].numpy())
    with pytest.raises(WeightFileError, match=r"no dict under key='ema'; it holds 'model' \(dict"):
        weight_files.read(path, key="ema")
    with pytest.raises(WeightFileError, match="no dict under key='epoch'"):
        weight_files.read(path, key="epoch")
    weight_files.write(tmp_path / "w.safetensors", model())
    with pytest.raises(WeightFileError, match=r"key='model' is for torch\.save files"):
        weight_files.read(tmp_path / "w.safetensors", key="model")


@pytest.mark.parametrize(
    "saved",
    [torch.zeros(3), [torch.zeros(3)], "text", {"a": {"b": torch.zeros(3)}}, {"a": [1.0]}, {1: 2}],
)
def test_anything_but_a_dict_of_tensors_is_refused(tmp_path, saved):
    torch.save(saved, tmp_path / "w.pt")
    with pytest.raises(WeightFileError, match=r"w\.pt holds"):
        weight_files.read(tmp_path / "w.pt")


@pytest.mark.parametrize(
    ("tensor", "fault"),
    [
        (torch.zeros(2, dtype=torch.complex64), "complex64"),
        (torch.zeros(0, 3), r"shape \[0, 3\]"),
        (torch.zeros(2, 3).to_sparse(), "sparse"),
        (torch.zeros(2).to(torch.float8_e4m3fn), "float8"),
        (torch.zeros(2, device="meta"), "meta"),
    ],
)
def test_other_tensors_are_refused_by_name(tmp_path, tensor, fault):
    torch.save({"fine": torch.ones(1000), "odd.weight": tensor}, tmp_path / "w.pt")
    with pytest.raises(WeightFileError, match=r"w\.pt"):
        weight_files.read(tmp_path / "w.pt")
    with pytest.raises(ValueError, match=rf"odd\.weight.*{fault}|{fault}|no dense array"):
        weight_files.write(tmp_path / "out.safetensors", {"odd.weight": tensor})
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_existing_files_are_kept_unless_told(tmp_path, suffix):
    path = tmp_path / f"w{suffix}"
    weight_files.write(path, {"first": np.ones(3)})
    before = path.read_bytes()
    with pytest.raises(WeightFileError, match=f"w{suffix} already exists"):
        weight_files.write(path, {"second": np.ones(3)})
    assert path.read_bytes() == before
    weight_files.write(path, {"second": np.ones(3)}, overwrite=True)
    assert list(weight_files.read(path)) == ["second"]
    assert os.listdir(tmp_path) == [path.name]
    link = tmp_path / f"link{suffix}"
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(WeightFileError, match="already exists"):
        weight_files.write(link, model())


def test_unusable_places_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.pt").mkdir()
    for name, fault in {
        "missing/w.safetensors": "missing does not exist",
        "file/w.safetensors": "file does not exist",
        "folder.pt": "already exists",
        "w.onnx": "must end in .safetensors, .npz, .pt, .pth, .bin or .ckpt",
        "w": "must end in",
    }.items():
        with pytest.raises(WeightFileError, match=fault):
            weight_files.write(tmp_path / name, model(), overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder.pt"]
    (tmp_path / "w.onnx").write_text("x")
    os.mkfifo(tmp_path / "fifo.safetensors")
    for name in ("absent.pt", "folder.pt", "w.onnx", "fifo.safetensors"):
        with pytest.raises(WeightFileError, match=name):
            weight_files.read(tmp_path / name)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_what_cannot_be_stored_is_refused(tmp_path, suffix):
    for name, array, fault in (
        ("w", np.zeros(2, np.complex128), "w has dtype complex128"),
        ("w", np.array(["text"]), "w has dtype <U4"),
        ("w", np.array([None]), "w has dtype object"),
        ("w", np.zeros((3, 0)), r"w has shape \[3, 0\]"),
        ("../../w", np.zeros(2), r"'\.\./\.\./w'"),
        ("", np.zeros(2), "tensor name ''"),
        ("a\0b", np.zeros(2), r"'a\\x00b'"),
    ):
        with pytest.raises(WeightFileError, match=fault):
            weight_files.write(tmp_path / f"out{suffix}", {name: array})
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_one_clear_error(tmp_path, monkeypatch):
    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors_file, "_header", full)
    with pytest.raises(WeightFileError, match=r"w\.safetensors cannot be written.*No space left"):
        weight_files.write(tmp_path / "w.safetensors", model())
    assert os.listdir(tmp_path) == []


def test_metadata_come_back_without_the_digests(tmp_path):
    path, metadata = tmp_path / "w.safetensors", {"format": "pt", "num_heads": "8", "π": "\n"}
    weight_files.write(path, model(), metadata=metadata)
    assert weight_files.read_metadata(path) == metadata
    weight_files.write(tmp_path / "w.pt", model())
    assert weight_files.read_metadata(tmp_path / "w.pt") == {}
    with pytest.raises(WeightFileError, match=r"only \.safetensors files hold metadata"):
        weight_files.write(tmp_path / "new.pt", model(), metadata=metadata)
    with pytest.raises(WeightFileError, match="must not begin with 'sha256'"):
        weight_files.write(tmp_path / "new.safetensors", model(), metadata={"sha256:x": ""})


@pytest.mark.exhaustive
def test_every_flipped_bit_of_an_own_safetensors_file_is_detected(tmp_path):
    path, damaged = tmp_path / "w.safetensors", tmp_path / "damaged.safetensors"
    weight_files.write(path, model(), metadata={"format": "pt", "config": '{"num_heads": 3}'})
    size = path.stat().st_size
    for bit in np.random.default_rng(2).choice(8 * size, 1000, replace=False):
        flipped(path, int(bit), damaged)
        with pytest.raises(WeightFileError, match=re.escape(str(damaged))):
            weight_files.read(damaged)


@pytest.mark.exhaustive
def test_a_flipped_bit_in_any_record_of_a_torch_file_is_detected(tmp_path):
    """Flips between the records, in padding and directory, may pass, but change no weight."""
    path, damaged = tmp_path / "w.pt", tmp_path / "damaged.pt"
    weight_files.write(path, model())
    whole = weight_files.read(path)
    data = path.read_bytes()
    inside = set()
    with zipfile.ZipFile(path) as archive:
        for record in archive.infolist():
            begin = data.index(archive.read(record), record.header_offset + 30)
            inside |= set(range(8 * begin, 8 * (begin + record.file_size)))
    random = np.random.default_rng(3)
    bits = set(random.choice(sorted(inside), 500, replace=False).tolist())
    bits |= set(random.choice(8 * len(data), 500, replace=False).tolist())
    for bit in bits:
        flipped(path, bit, damaged)
        with contextlib.suppress(WeightFileError):
            read = weight_files.read(damaged)
            assert bit not in inside
            assert read.keys() == whole.keys()
            assert all(same_bits(read[name], whole[name]) for name in whole)


def test_a_record_that_is_marked_as_a_folder_is_refused(tmp_path):
    """torch reads no byte of such a record: its tensors then hold whatever was in the memory."""
    path, damaged = tmp_path / "w.pt", tmp_path / "damaged.pt"
    weight_files.write(path, model())
    data = path.read_bytes()
    entries = [match.start() for match in re.finditer(rb"PK\x01\x02", data)]
    assert len(entries) > len(model())
    for begin in entries:
        flipped(path, 8 * (begin + 38) + 4, damaged)  # of its attributes, in the zip directory
        with pytest.raises(WeightFileError, match="is marked as a folder"):
            weight_files.read(damaged)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_every_truncation_is_detected(tmp_path, suffix):
    weight_files.write(tmp_path / f"w{suffix}", model())
    data = (tmp_path / f"w{suffix}").read_bytes()
    damaged = tmp_path / f"damaged{suffix}"
    for length in range(0, len(data), 31):
        damaged.write_bytes(data[:length])
        with pytest.raises(WeightFileError, match="damaged"):
            weight_files.read(damaged)
