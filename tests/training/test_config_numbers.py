"""Whole numbers that no int32 counts are refused, before any work."""

import dataclasses

import pytest

from jax_transformer.errors import InputError
from jax_transformer.runs.model_settings import check_model, preset_settings
from jax_transformer.tokenizers import BytePairTokenizer
from jax_transformer.training.config import TrainingConfig

WHOLE = [f.name for f in dataclasses.fields(TrainingConfig) if f.type in (int, int | None)]


@pytest.mark.parametrize("name", WHOLE)
def test_a_setting_that_no_device_counts_is_refused(name):
    for value in (10**23, -(10**23)):
        with pytest.raises(InputError, match=rf"{name}=-?1000") as caught:
            TrainingConfig(**{name: value}).check()
        assert "\n" not in str(caught.value)


def test_a_vocabulary_that_no_tokenizer_holds_is_refused():
    with pytest.raises(InputError, match="vocab_size=1000000000000 must be at most 16777216"):
        BytePairTokenizer.train(["a b"], 10**12)
    with pytest.raises(InputError, match="vocab_size=16777217 must be at most 16777216"):
        check_model(preset_settings("vaswani2017", {}), 2**24 + 1)
