"""Whole numbers that no int32 counts are refused, before any work."""

import dataclasses

import numpy as np
import pytest

from jax_transformer.errors import InputError
from jax_transformer.runs.model_settings import check_model, preset_fields
from jax_transformer.tokenizers import train_byte_pair
from jax_transformer.training.config import TrainingConfig

WHOLE = [f.name for f in dataclasses.fields(TrainingConfig) if "int" in str(f.type)]
WRONG = {
    "steps=2.5 must be a whole number, at least 1": {"steps": 2.5},
    "steps='a' must be a whole number": {"steps": "a"},
    "freeze='encoder/*' must be a list, each item a text": {"freeze": "encoder/*"},
    "scan_layers='no' must be True or False": {"scan_layers": "no"},
    "remat='layer' must be one of 'dots', 'layers', 'none'": {"remat": "layer"},
    "clip_norm=inf must be a finite number, above 0 or None": {"clip_norm": float("inf")},
    "adam_beta1=nan must be a finite number": {"adam_beta1": float("nan")},
    "seed=4294967296 must be a whole number, at least 0 and below": {"seed": 2**32},
    "pack_length=65 must be at most max_tokens=64": {
        "batching": "packed",
        "pack_length": 65,
        "max_tokens": 64,
    },
    "pack_length=0 must be a whole number, at least 1": {"pack_length": 0},
    "cooldown_steps=-1 must be a whole number, at least 0": {"cooldown_steps": -1},
    "cooldown_steps=1 must be 0 for schedule='cosine'": {
        "cooldown_steps": 1,
        "schedule": "cosine",
    },
}


@pytest.mark.parametrize(("message", "settings"), WRONG.items(), ids=WRONG)
def test_a_setting_that_cannot_train_is_refused(message, settings):
    with pytest.raises(InputError) as refused:
        TrainingConfig(**settings)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


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
    with pytest.raises(InputError, match="vocab_size=1000000000000 must be at most 16777216"):
        train_byte_pair(["a b"], 10**12)
    with pytest.raises(InputError, match="vocab_size=16777217 must be at most 16777216"):
        check_model(preset_fields("vaswani2017", {}), 2**24 + 1)
