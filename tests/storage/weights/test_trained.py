"""Weights as trainers leave them: entries of a checkpoint, names of wrappers, tensors left out."""

import numpy as np
import pytest
import torch
from torch import nn

from jax_transformer.errors import InputError
from jax_transformer.storage.weights import WeightFileError, read_trained, write
from jax_transformer.storage.weights.shards import split, write_weights
from jax_transformer.storage.weights.trained import plain_names


def stairs() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def check_stairs(path, module, told=(), **options):
    """The file has the module's own tensors, and these lines are told."""
    lines = []
    read = read_trained(path, tell=lines.append, **options)
    expected = module.state_dict()
    assert read.keys() == expected.keys()
    assert all(np.array_equal(read[name], expected[name].numpy()) for name in expected)
    assert len(lines) == len(told)
    assert all(text in line for text, line in zip(told, lines, strict=True)), lines


@pytest.mark.parametrize("key", ["model", "model_state_dict", "state_dict", "ema"])
def test_the_usual_entries_of_a_checkpoint_are_tried_and_told(tmp_path, key):
    module, path = stairs(), tmp_path / "last.ckpt"
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.save({"epoch": 3, key: module.state_dict(), "adam": optimizer.state_dict()}, path)
    check_stairs(path, module, [f"note: read the entry {key!r} of {path}; --key"])


def test_of_two_usual_entries_the_first_is_read_and_a_key_reads_another(tmp_path):
    module, other, path = stairs(), stairs(), tmp_path / "both.pt"
    saved = {"ema": other.state_dict(), "model": module.state_dict()}
    torch.save(saved | {"net": other.state_dict()}, path)
    check_stairs(path, module, ["note: read the entry 'model' of"])
    check_stairs(path, other, [], key="ema")
    check_stairs(path, other, [], key="net")
    with pytest.raises(WeightFileError, match="no dict under key='mode'"):
        read_trained(path, key="mode")


def test_a_checkpoint_without_a_usual_entry_is_refused_with_its_entries(tmp_path):
    torch.save({"net": stairs().state_dict(), "epoch": 3}, tmp_path / "net.pt")
    with pytest.raises(WeightFileError, match=r"'net' \(\w+\), 'epoch' \(int\).*--key"):
        read_trained(tmp_path / "net.pt")


def test_names_are_those_of_the_module_in_its_wrappers(tmp_path):
    module, path = stairs(), tmp_path / "wrapped.pt"
    averaged = torch.optim.swa_utils.AveragedModel(module)
    assert "n_averaged" in averaged.state_dict()
    torch.save(averaged.state_dict(), path)
    check_stairs(path, module, ["4 names are read without a wrapper's part: module.0.weight is 0"])
    compiled = nn.Sequential(torch.compile(module[0]), module[1])
    assert "0._orig_mod.weight" in compiled.state_dict()
    torch.save(compiled.state_dict(), path)
    check_stairs(
        path, module, ["2 names are read without a wrapper's part: 0._orig_mod.weight is 0"]
    )
    names = ["module.a._checkpoint_wrapped_module.b", "module.c", "module"]  # a record has it too
    assert list(plain_names(names).values()) == ["a.b", "c", "module"]
    # A part of the program, two of one name, a longer word.
    for own in (["module.a", "b"], ["a._orig_mod.b", "a.b"], ["my_orig_mod.b"]):
        assert list(plain_names(own).values()) == own


def test_tensors_are_left_out_by_name_and_pattern(tmp_path):
    module, path = stairs(), tmp_path / "more.safetensors"
    more = {"criterion.weight": torch.ones(5), "head.0.weight": torch.ones(2, 2)}
    write(path, module.state_dict() | more | {"head.0.bias": torch.ones(2)})
    told = ["left out: criterion.weight", "left out: head.0.bias, head.0.weight"]
    lines = []
    read = read_trained(path, drop=("criterion.weight", "head.*"), tell=lines.append)
    assert read.keys() == module.state_dict().keys()
    assert [line.removeprefix("note: ") for line in lines] == told
    with pytest.raises(InputError, match=r"drop='tail' is the name of no tensor in .*more"):
        read_trained(path, drop=("tail",))


def test_a_folder_of_shards_is_read_by_its_index(tmp_path):
    module = stairs()
    tensors = {name: tensor.numpy() for name, tensor in module.state_dict().items()}
    write_weights(tmp_path, tensors, split(tensors, 40))
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    check_stairs(tmp_path, module)
    with pytest.raises(WeightFileError, match=r"key='model' is for torch\.save files"):
        read_trained(tmp_path, key="model")


def test_an_empty_buffer_is_read_and_written(tmp_path):
    for path in (tmp_path / "empty.pt", tmp_path / "empty.safetensors"):
        write(path, {"empty": np.zeros(0, np.float32), "one": np.ones(1, np.float32)})
        assert read_trained(path)["empty"].shape == (0,)
