"""Frozen parameters: those of torch's requires_grad, bit-equal after steps, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_transformer import InputError, convert
from jax_transformer.convert.table import flatten, nest
from jax_transformer.model.tree import parameter_shapes
from jax_transformer.training.config import TrainingConfig
from jax_transformer.training.freeze import (
    merged,
    trainable,
    trained_names,
    trained_parts,
    trained_sizes,
)
from jax_transformer.training.step import init_state
from tests.convert.tools import same_bits
from tests.models import random_params
from tests.parity import measure
from tests.parity.ladder import bound
from tests.tiers import tiered
from tests.training.steps import run_step

FREEZE = ("encoder/*", "*/cross_attention/*", "token_embedding/embedding")
CONFIG = measure.trainable("vaswani2017", num_decoder_layers=1)
# Clipping and weight decay act, and the EMA follows: each could move a frozen parameter.
SETTINGS = dataclasses.replace(measure.SETTINGS, freeze=FREEZE, ema_decay=0.9)
NAMES = [*parameter_shapes(CONFIG)]
TRAINED = trained_names(NAMES, FREEZE)
# They have a row, or a column, for each token.
TABLES = ("token_embedding", "source_embedding", "target_embedding", "output_projection")
FROZEN = [name for name in NAMES if name not in TRAINED]


def in_torch(names):
    """Return what torch_reference calls these parameters."""
    shapes = parameter_shapes(CONFIG)
    marks = nest({name: np.full(shapes[name], name in names, np.float32) for name in NAMES})
    return {name for name, mark in convert.to_torch(marks, CONFIG).items() if mark.all()}


def test_patterns_name_whole_paths():
    assert len(FROZEN) > len(TRAINED) > 4
    assert {name.split("/")[0] for name in TRAINED} == {"decoder"}
    assert not any("cross_attention/" in name for name in TRAINED)
    assert any("cross_attention_residual/" in name for name in TRAINED)
    trained, whole = trained_sizes(CONFIG, TrainingConfig(freeze=FREEZE))
    sizes = {name: np.prod(shape) for name, shape in parameter_shapes(CONFIG).items()}
    assert (trained, whole) == (sum(map(sizes.get, TRAINED)), sum(sizes.values()))


def test_a_table_that_the_frozen_encoder_shares_is_named_where_it_is_trained():
    parts = trained_parts(CONFIG, TrainingConfig(freeze=("encoder/*",)))
    sharing = "the encoder, the decoder and the output projection"
    assert parts == f"decoder, token_embedding (which {sharing} share)"
    assert trained_parts(CONFIG, TrainingConfig(freeze=FREEZE)) == "decoder"
    separate = dataclasses.replace(CONFIG, token_embeddings="separate")
    sharing = "the decoder and the output projection"
    parts = trained_parts(separate, TrainingConfig(freeze=("encoder/*", "decoder/*")))
    assert parts == f"source_embedding, target_embedding (which {sharing} share)"
    separate = dataclasses.replace(separate, output_projection="linear")
    assert "share" not in trained_parts(separate, TrainingConfig(freeze=("encoder/*",)))


@pytest.mark.parametrize("dtype", tiered(["float32", "float64"], quick=["float64"]))
def test_twenty_steps_are_those_of_torch_without_the_gradients(dtype, request):
    if dtype == "float64":
        request.getfixturevalue("x64")
    pair, frozen = measure.make_pair(CONFIG, dtype), in_torch(FROZEN)
    assert len(frozen) >= len(FROZEN)
    for name, parameter in pair.module.named_parameters():
        parameter.requires_grad_(name not in frozen)
    batches = measure.random_batches(CONFIG, measure.STEPS)
    trained = measure.train(pair, batches, SETTINGS)
    leaf, worst = measure.worst(measure.training_errors(trained))
    print(f"{dtype} after {measure.STEPS} steps: {worst:.1e} in {leaf}")
    assert worst <= bound("adam", dtype), leaf
    before, after = flatten(pair.params), flatten(trained.ours)
    for name in NAMES:
        assert same_bits(before[name], after[name]) == (name in FROZEN), name


@pytest.mark.exhaustive
def test_frozen_parameters_have_no_moments_and_no_average_and_cost_no_gradient():
    state = init_state(CONFIG, SETTINGS, random_params(CONFIG))
    parts = [optax.tree.get(state.optimizer_state, name) for name in ("mu", "nu", "ema")]
    assert [[*flatten(part)] for part in parts] == [TRAINED] * 3
    assert [*flatten(state.eval_params)] == NAMES
    assert all(
        same_bits(flatten(state.params)[name], flatten(state.eval_params)[name]) for name in NAMES
    )

    (batch,) = measure.random_batches(CONFIG, 1)
    without = dataclasses.replace(SETTINGS, freeze=())
    flops = [
        run_step(CONFIG, some).lower(init_state(CONFIG, some), batch).cost_analysis()["flops"]
        for some in (SETTINGS, without)
    ]
    print(f"a step with frozen parameters has {flops[0] / flops[1]:.0%} of the operations")
    assert flops[0] < 0.7 * flops[1]


def test_without_patterns_nothing_is_split():
    params = nest(dict.fromkeys(NAMES, 0.0))
    assert trainable(params, ()) is params
    assert merged(params, params) == params
    some = trainable(params, FREEZE)
    assert merged(params, jax.tree.map(lambda leaf: leaf + 1, some)) == nest(
        {name: float(name in TRAINED) for name in NAMES}
    )


@pytest.mark.parametrize("optimizer", tiered(["adam", "adafactor", "muon"], ["adam"]))
@pytest.mark.parametrize("tables", ["separate", "shared"])
def test_rows_below_the_new_tokens_keep_every_bit(tables, optimizer):
    config = dataclasses.replace(
        CONFIG, token_embeddings=tables, output_projection="linear", output_bias=True
    )
    rows = config.tgt_vocab_size - 5
    decay = 0 if optimizer == "adafactor" else SETTINGS.weight_decay  # which has none
    changes = {"freeze": (), "freeze_rows": rows, "optimizer": optimizer, "weight_decay": decay}
    settings = dataclasses.replace(SETTINGS, **changes)
    params = jax.tree.map(jnp.asarray, random_params(config))
    state = init_state(config, settings, params)
    step, before = run_step(config, settings), flatten(state.params)
    before = {name: np.array(leaf) for name, leaf in before.items()}
    for batch in measure.random_batches(config, 3):
        state, _ = step(state, batch)
    averages = flatten(state.eval_params)
    for name, leaf in flatten(state.params).items():
        axis = -1 if name.startswith("output_projection") else 0
        old, new, average = (
            np.moveaxis(np.asarray(leaves[name]), axis, 0)
            for leaves in (before, {name: leaf}, averages)
        )
        if name.split("/")[0] in TABLES:
            assert same_bits(new[:rows], old[:rows]), name
            np.testing.assert_allclose(average[:rows], old[:rows], rtol=1e-6)  # rounds
            assert (new[rows:] != old[rows:]).any(), name
        else:
            assert (new != old).any(), name


def test_rows_of_all_ids_leave_nothing_to_train():
    settings = dataclasses.replace(SETTINGS, freeze_rows=CONFIG.tgt_vocab_size)
    with pytest.raises(InputError, match=r"freeze_rows=\d+ must be below \d+, all ids"):
        init_state(CONFIG, settings, random_params(CONFIG))
