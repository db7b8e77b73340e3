"""A setting of a training changes what is computed or done, or is refused where it cannot."""

import dataclasses
import functools

import jax
import pytest

from jax_transformer import InputError
from jax_transformer.training.config import ACTS_WITH, TrainingConfig
from jax_transformer.training.step import init_state, make_run_step
from tests.models import small_config
from tests.parity.measure import random_batches
from tests.tiers import tiered
from tests.training.steps import OTHER_SETTINGS

MODEL = small_config("pre_norm", num_encoder_layers=1, num_decoder_layers=1)
# The file of the tests that see the effect of a setting of the text or of the loop.
ELSEWHERE = {
    "objective": "tests/commands/test_pretraining.py",
    "noise_density": "tests/text/test_denoising.py",
    "mean_span_length": "tests/text/test_denoising.py",
    "max_tokens": "tests/text/test_batches.py",
    "batching": "tests/text/test_plan.py",
    "bucket_count": "tests/text/test_plan.py",
    "pack_length": "tests/text/test_packing.py",
    "evaluation_interval": "tests/runs/test_loop.py",
    "select_by": "tests/runs/test_loop.py",
    "patience": "tests/runs/test_loop.py",
    "keep_checkpoints": "tests/runs/test_averaging.py",
    "bpe_dropout": "tests/tokenizers/test_bpe_dropout.py",
    "spec_augment": "tests/commands/test_train_sounds.py",
}


@functools.cache
def computed(settings):
    """Return the program of a step, and the numbers of the state that it begins with."""
    state = init_state(MODEL, settings)
    (batch,) = random_batches(MODEL, 1)
    program = jax.make_jaxpr(make_run_step(MODEL, settings))(state, batch)
    sums = [float(leaf.sum()) for leaf in jax.tree.leaves(state.params)]
    return str(program), sums


OF_A_STEP = [name for name in OTHER_SETTINGS if name not in ELSEWHERE]


@pytest.mark.parametrize("name", tiered(OF_A_STEP, ["learning_rate", "lora_alpha"]))
def test_a_setting_of_a_step_changes_the_step(name):
    value, beside = OTHER_SETTINGS[name]
    settings = TrainingConfig(**beside)
    assert computed(dataclasses.replace(settings, **{name: value})) != computed(settings)


def test_no_setting_is_left_out():
    assert {*OTHER_SETTINGS} == {*OF_A_STEP, *ELSEWHERE} == {*vars(TrainingConfig())}


@pytest.mark.parametrize("name", ACTS_WITH)
def test_a_setting_without_effect_is_refused_with_the_one_that_makes_it_act(name):
    other, values = ACTS_WITH[name]
    kinds = {"schedule": ("noam", "constant"), "optimizer": ("adafactor",)}
    kinds["batching"] = ("buckets", "packed")
    value = {"bucket_count": 3, "pack_length": 64}.get(name, 0.001)
    for chosen in kinds[other]:
        if chosen in values:
            TrainingConfig(**{name: value, other: chosen}).check_acting([name])
            continue
        with pytest.raises(InputError, match=f"^{name}={value} has no effect with {other}="):
            TrainingConfig(**{name: value, other: chosen}).check_acting([name])
