"""Position tables in half-precision files: transformers uses the rounded table that is there."""

import dataclasses

import jax
import numpy as np
import pytest
import torch

import torch_reference
from jax_transformer import TransformerConfig, convert, generate
from jax_transformer.convert.huggingface import from_huggingface, to_huggingface
from jax_transformer.convert.origin import read_origin
from tests.convert.families.case import (
    foreign_model,
    foreign_results,
    forward,
    ragged_tokens,
    weights_of,
)
from tests.convert.tools import assert_same_params, same_bits
from tests.parity.ladder import bound, error
from tests.tiers import tiered_rows

LAYOUTS = ("safetensors", "bin", "base")
ROWS = [
    (name, half, layout)
    for name in ("marian", "pegasus")
    for half in ("float16", "bfloat16")
    for layout in LAYOUTS
]
TABLES = [f"model.{stack}.embed_positions.weight" for stack in ("encoder", "decoder")]


@pytest.fixture(autouse=True)
def exact_products():
    with jax.default_matmul_precision("highest"):
        yield


def write(folder, name, half, layout):
    """Write a model in half precision as transformers, or an older version of it, saves it."""
    model = foreign_model(name, None, getattr(torch, half))
    (model.model if layout == "base" else model).save_pretrained(folder)
    if layout == "bin":
        (folder / "model.safetensors").unlink()
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return type(model)


def logits_of(model_class, folder, config, src, tgt):
    model = model_class.from_pretrained(folder, dtype=torch.float32)
    return foreign_results(model, config, src, tgt)[0]


@pytest.mark.parametrize(
    ("name", "half", "layout"),
    tiered_rows(ROWS, lambda *row: row == ("pegasus", "bfloat16", "safetensors")),
)
def test_float32_from_half_weights_has_the_rounded_table(name, half, layout, tmp_path):
    model_class = write(tmp_path / "model", name, half, layout)
    config, params = from_huggingface(tmp_path / "model", dtype="float32")
    stored = name == "pegasus" or layout != "safetensors"  # Marian saves none, and computes it
    assert config.position_rounding == (half if stored else "none")
    src, tgt = ragged_tokens(config)
    theirs = logits_of(model_class, tmp_path / "model", config, src, tgt).numpy()
    ours = np.asarray(forward(params, config, src, tgt))
    difference = error(ours, theirs)
    exact = dataclasses.replace(config, position_rounding="none")
    without = error(forward(params, exact, src, tgt), theirs)
    print(f"\n{name} {half} {layout}: {difference:.1e}, with the exact table {without:.1e}")
    assert difference <= 1e-6
    assert without > 1e-5 or not stored

    # Home in float32, with the same table: the numbers of transformers stay.
    origin, _ = read_origin(tmp_path / "model")
    to_huggingface(params, config, tmp_path / "home", origin=origin)
    home = logits_of(model_class, tmp_path / "home", config, src, tgt).numpy()
    np.testing.assert_array_equal(home, theirs)
    again = from_huggingface(tmp_path / "home")
    assert again[0] == config  # a float32 file shows that its table was rounded
    assert_same_params(again[1], params)


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_a_half_table_comes_back_bit_for_bit(half, tmp_path):
    write(tmp_path / "model", "pegasus", half, "safetensors")
    config, params = from_huggingface(tmp_path / "model")
    to_huggingface(params, config, tmp_path / "home", family="pegasus")
    home, came = weights_of(tmp_path / "home"), weights_of(tmp_path / "model")
    assert all(same_bits(home[name], came[name]) for name in TABLES)


@pytest.mark.exhaustive
def test_the_rounding_is_kept_in_a_folder_of_this_library_and_in_both_models(tmp_path):
    write(tmp_path / "model", "pegasus", "bfloat16", "safetensors")
    config, params = from_huggingface(tmp_path / "model", dtype="float32")
    src, tgt = ragged_tokens(config)
    ours = np.asarray(forward(params, config, src, tgt))
    module = torch_reference.Transformer(config).eval()
    module.load_state_dict(convert.to_torch(params, config))
    theirs = module(torch.tensor(src), torch.tensor(tgt)).detach().numpy()
    assert error(ours, theirs) <= bound("logits", "float32")
    assert TransformerConfig.from_dict(config.to_dict()) == config
    # A search, whose steps read single rows of the table.
    best = generate(params, config, src, max_new_tokens=4, min_new_tokens=3, beam_size=2)
    tokens = np.asarray(best.tokens)[:, 0]
    inputs = np.concatenate([np.full((len(src), 1), config.bos_id), tokens[:, :-1]], axis=1)
    steps = jax.nn.log_softmax(forward(params, config, src, inputs))
    scores = np.take_along_axis(np.asarray(steps), tokens[..., None], 2).sum((1, 2))
    np.testing.assert_allclose(best.scores[:, 0], scores, atol=2e-6 * np.abs(scores).max())


def test_tables_of_other_families_are_not_rounded():
    """M2M100 computes its table again, whatever the file holds."""
    model = foreign_model("m2m_100", None, torch.bfloat16)
    assert from_huggingface(model, dtype="float32")[0].position_rounding == "none"
