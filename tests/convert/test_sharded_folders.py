"""Hugging Face folders of large models: in shards, and in bfloat16, both ways."""

import gc
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_transformer
from jax_transformer.commands import main as cli
from jax_transformer.convert.huggingface import from_huggingface, to_huggingface
from jax_transformer.convert.origin import read_origin
from jax_transformer.errors import InputError
from jax_transformer.storage import weights as weight_files
from jax_transformer.storage.weights import arrays
from jax_transformer.storage.weights.shards import read_weights, weight_names
from jax_transformer.tokenizers import train_byte_pair
from jax_transformer.translation import model_folder
from tests.convert.families.case import (
    foreign_class,
    foreign_model,
    strictly_loaded,
    write_tokenizer,
)
from tests.convert.tools import assert_same_params, assert_same_tensors
from tests.models import random_params, small_config
from tests.parity.ladder import error

TOKENIZER = train_byte_pair(["ab"], vocab_size=8)
LINES = ["tlx 6r5, tlx", "6r5"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder in bfloat16 and in shards, as transformers saves it, with stale weights beside."""
    folder = tmp_path_factory.mktemp("sharded") / "model"
    changes = write_tokenizer("pegasus", folder)
    model = foreign_model("pegasus", None, **changes).to(torch.bfloat16)
    model.generation_config.max_length = 9
    model.save_pretrained(folder, max_shard_size="3KB")
    (folder / "pytorch_model.bin").write_bytes(b"stale")
    assert len(weight_names(folder)) > 4
    return folder


@pytest.mark.exhaustive
def test_the_command_line_brings_shards_of_bfloat16_there_and_back(home, tmp_path, capsys):
    _, params = from_huggingface(home)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"bfloat16"}
    layout = ("--output-layout", "pegasus", "--max-shard-size", "3KB")

    def convert(*arguments):
        cli.command_call("convert", *map(str, arguments))()

    convert(home, tmp_path / "direct", *layout)
    assert "not carried over: pytorch_model.bin\n" in capsys.readouterr().out
    assert len(weight_names(tmp_path / "direct")) > 4
    convert(home, tmp_path / "weights.safetensors")
    assert {
        array.dtype.name for array in weight_files.read(tmp_path / "weights.safetensors").values()
    } == {"bfloat16"}
    convert(tmp_path / "weights.safetensors", tmp_path / "file", *layout)
    model = model_folder.load(home)
    model_folder.write(tmp_path / "own", model, read_origin(home)[0])
    assert_same_params(model_folder.load(tmp_path / "own").params, params)
    convert(tmp_path / "own", tmp_path / "own_back", *layout)
    expected = strictly_loaded(foreign_class("pegasus"), home).state_dict()
    for name in ("direct", "file", "own_back"):
        assert_same_params(from_huggingface(tmp_path / name)[1], params)
        assert_same_tensors(read_weights(tmp_path / name), read_weights(home))
        loaded = strictly_loaded(foreign_class("pegasus"), tmp_path / name)
        assert loaded.dtype == torch.bfloat16
        assert_same_tensors(loaded.state_dict(), expected)


@pytest.mark.exhaustive
def test_a_folder_in_bfloat16_translates(home):
    """The whole model is computed in bfloat16; the scores of a search in float32."""
    config, params, tokenizer, generation = jax_transformer.load(home)
    src = np.array(tokenizer.encode_source([LINES[0]]))
    found = jax_transformer.generate(params, config, src, **generation)
    assert found.scores.dtype == jnp.float32
    assert np.isfinite(found.scores).all()
    apply = jax.jit(jax_transformer.apply, static_argnames="config")
    logits = apply(params, config, src, found.tokens[:, 0])
    assert logits.dtype == jnp.bfloat16
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    expected = apply(wide, config, src, found.tokens[:, 0])
    assert error(logits.astype(jnp.float32), expected) < 2**-5


def test_weights_of_another_split_are_refused_by_name(home, tmp_path):
    config, params = from_huggingface(home)
    options = {"family": "pegasus", "overwrite": True}
    with pytest.raises(InputError, match="max_shard_size='3' must be a number of bytes"):
        to_huggingface(params, config, tmp_path / "x", **options, max_shard_size="3")
    assert not (tmp_path / "x").exists()
    to_huggingface(params, config, tmp_path / "one", **options)
    message = r"holds model\.safetensors of other weights, which could be read in the place of the"
    with pytest.raises(InputError, match=message):
        to_huggingface(params, config, tmp_path / "one", **options, max_shard_size=3000)
    assert weight_names(tmp_path / "one") == ["model.safetensors"]
    to_huggingface(params, config, tmp_path / "many", **options, max_shard_size=3000)
    to_huggingface(params, config, tmp_path / "many", **options, max_shard_size=3000)
    stale = (
        "holds model-00001-of-000.., model-00002-of-000.., model-00003-of-000.. and [0-9]+ more of"
    )
    for size in (4000, "50GB"):
        with pytest.raises(InputError, match=stale.replace("..", r"\d\d\.safetensors")):
            to_huggingface(params, config, tmp_path / "many", **options, max_shard_size=size)
    options["overwrite"] = False
    with pytest.raises(InputError, match=r"already holds model-00001-of"):
        to_huggingface(params, config, tmp_path / "many", **options, max_shard_size=3000)


@pytest.mark.exhaustive
def test_a_model_is_held_once(tmp_path, monkeypatch):
    """Beside it, there is room for its largest tensor; numpy counts what it allocates."""
    monkeypatch.setattr(arrays, "PIECE", 2**12)
    sizes = {"src_vocab_size": 9_000, "tgt_vocab_size": 9_000, "d_model": 256, "d_ff": 512}
    config = small_config("pegasus", **sizes, num_heads=4)
    params = random_params(config)
    bytes_held = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(params))
    spare = 0.1 * bytes_held
    to_huggingface(params, config, tmp_path / "first", family="pegasus")
    model_folder.write(
        tmp_path / "second",
        model_folder.TrainedModel(*from_huggingface(tmp_path / "first"), TOKENIZER),
    )  # what tracing the model needs is there now
    gc.collect()
    tracemalloc.start()
    try:
        to_huggingface(params, config, tmp_path / "model", family="pegasus")
        written = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        loaded = from_huggingface(tmp_path / "model")
        read = tracemalloc.get_traced_memory()[1]
        model_folder.write(tmp_path / "own", model_folder.TrainedModel(*loaded, TOKENIZER))
        saved = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert written < spare + largest / 2
    assert max(read, saved) < bytes_held + largest + spare
