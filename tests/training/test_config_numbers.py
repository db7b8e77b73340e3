"""Whole numbers that no int32 counts are refused, before any work."""

import dataclasses

import numpy as np
import optax
import pytest

from jax_transformer import TransformerConfig, cross_entropy, make_train_step
from jax_transformer.errors import InputError
from jax_transformer.runs.model_settings import check_model, preset_fields
from jax_transformer.training.config import TrainingConfig
from tests.models import unchecked

WHOLE = [f.name for f in dataclasses.fields(TrainingConfig) if "int" in str(f.type)]
COUNTS = "steps warmup_steps max_tokens bucket_count evaluation_interval patience"
COUNTS += " keep_checkpoints num_microbatches pack_length"
OUT_OF_RANGE = dict.fromkeys(COUNTS.split(), (0, -1)) | {
    "label_smoothing": (1.0, -0.1, float("nan")),
    "adam_beta1": (1.0, float("nan")),
    "adam_beta2": (-0.5,),
    "adam_epsilon": (0.0,),
    "clip_norm": (0.0, float("nan"), float("inf")),
    "weight_decay": (-0.1,),
    "learning_rate_factor": (float("inf"),),
    "cooldown_steps": (-1,),
    "seed": (-1, 2**32),
}
WRONG = {
    "steps=2.5 must be a whole number, at least 1": {"steps": 2.5},
    "steps='a' must be a whole number": {"steps": "a"},
    "freeze='encoder/*' must be a list, each item a text": {"freeze": "encoder/*"},
    "scan_layers='no' must be True or False": {"scan_layers": "no"},
    "remat='layer' must be one of 'dots', 'layers', 'none'": {"remat": "layer"},
    "clip_norm=inf must be a finite number, above 0 or None": {"clip_norm": float("inf")},
    "pack_length=128 must be at most max_tokens=64": {"batching": "packed", "max_tokens": 64},
    "cooldown_steps=1 must be 0 for schedule=": {"cooldown_steps": 1, "schedule": "cosine"},
}


@pytest.mark.parametrize(("message", "settings"), WRONG.items(), ids=WRONG)
def test_a_setting_that_cannot_train_is_refused(message, settings):
    with pytest.raises(InputError) as refused:
        TrainingConfig(**settings)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("name", "values"), OUT_OF_RANGE.items(), ids=OUT_OF_RANGE)
def test_a_number_out_of_range_is_refused(name, values):
    for value in values:
        with pytest.raises(InputError, match=f"{name}={value}"):
            TrainingConfig(**{name: value})


@pytest.mark.parametrize("number", [np.float32(0.1), np.float64(0.1), np.float16(0.1), 0, 0.1])
def test_label_smoothing_takes_the_numbers_that_a_config_takes(number):
    logits, targets = np.zeros((1, 2, 5), np.float32), np.ones((1, 2), np.int32)
    with unchecked():
        make_train_step(TransformerConfig(), optax.sgd(0.1), label_smoothing=number)
        loss, _ = cross_entropy(logits, targets, 0, number)
    assert loss == pytest.approx(2 * np.log(5), rel=1e-6)


@pytest.mark.parametrize("value", [False, "0.1", np.float32(1), float("nan"), None])
def test_label_smoothing_that_is_no_share_is_refused_with_its_value(value):
    for call in (
        lambda: make_train_step(TransformerConfig(), optax.sgd(0.1), label_smoothing=value),
        lambda: cross_entropy(np.zeros((1, 2, 5)), np.ones((1, 2), np.int32), 0, value),
    ):
        with (
            pytest.raises(InputError, match=r"label_smoothing=.* must be a finite nu"),
            unchecked(),
        ):
            call()


def test_numbers_of_numpy_are_those_of_python():
    numbers = {"steps": np.int64(3), "clip_norm": np.float64(0.5), "freeze": ["x"]}
    settings = TrainingConfig(**numbers)
    assert settings == TrainingConfig(steps=3, clip_norm=0.5, freeze=("x",))
    assert hash(settings) == hash(TrainingConfig(steps=3, clip_norm=0.5, freeze=("x",)))


@pytest.mark.parametrize("name", WHOLE)
def test_a_setting_that_no_device_counts_is_refused(name):
    for value in (10**23, -(10**23)):
        with pytest.raises(InputError, match=rf"{name}=-?1000") as caught:
            TrainingConfig(**{name: value})
        assert "\n" not in str(caught.value)


def test_a_vocabulary_that_no_tokenizer_holds_is_refused():
    with pytest.raises(InputError, match="vocab_size=16777217 must be at most 16777216"):
        check_model(preset_fields("vaswani2017", {}), 2**24 + 1)
