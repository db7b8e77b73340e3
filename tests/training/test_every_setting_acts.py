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

MODEL = small_config("pre_norm", num_encoder_layers=1, num_decoder_layers=1)
CONSTANT = {"schedule": "constant"}
ADAPTER = {"lora_rank": 2}
# Another value of each setting of a step, and the settings beside which it acts.
OF_A_STEP = {
    "steps": (3000, {"schedule": "cosine"}),
    "schedule": ("constant", {}),
    "warmup_steps": (500, {}),
    "learning_rate_factor": (0.5, {}),
    "learning_rate": (0.5, CONSTANT),
    "cooldown_steps": (50, {}),
    "optimizer": ("muon", {}),
    "adam_beta1": (0.8, {}),
    "adam_beta2": (0.9, {}),
    "adam_epsilon": (1e-6, {}),
    "weight_decay": (0.1, {}),
    "clip_norm": (1.0, {}),
    "spike_factor": (3.0, {}),
    "freeze": (("encoder/*",), {}),
    "freeze_rows": (9, {}),
    "lora_rank": (3, ADAPTER),
    "lora_alpha": (5.0, ADAPTER),
    "lora_targets": (("*/output",), ADAPTER),
    "lora_whole": (("*_embedding/*",), ADAPTER),
    "lora_dropout": (0.2, ADAPTER),
    "num_microbatches": (2, {}),
    "ema_decay": (0.9, {}),
    "compute_dtype": ("bfloat16", {}),
    "gradient_dtype": ("float32", {"compute_dtype": "bfloat16"}),
    "remat": ("layers", {}),
    "scan_layers": (True, {}),
    "label_smoothing": (0.2, {}),
    "seed": (1, {}),
}
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
}


@functools.cache
def computed(settings):
    """Return the program of a step, and the numbers of the state that it begins with."""
    state = init_state(MODEL, settings)
    (batch,) = random_batches(MODEL, 1)
    program = jax.make_jaxpr(make_run_step(MODEL, settings))(state, batch)
    sums = [float(leaf.sum()) for leaf in jax.tree.leaves(state.params)]
    return str(program), sums


@pytest.mark.parametrize("name", tiered(OF_A_STEP, ["learning_rate", "lora_alpha"]))
def test_a_setting_of_a_step_changes_the_step(name):
    value, beside = OF_A_STEP[name]
    settings = TrainingConfig(**beside)
    assert computed(dataclasses.replace(settings, **{name: value})) != computed(settings)


def test_no_setting_is_left_out():
    assert OF_A_STEP.keys() | ELSEWHERE.keys() == set(vars(TrainingConfig()))


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
