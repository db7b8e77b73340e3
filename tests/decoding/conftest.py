"""A small model that has learned something: its targets vary, and end at different steps."""

import pytest

from jax_transformer import convert
from tests.decoding.reversing import learners


@pytest.fixture(scope="session")
def reversal_model():
    """Return (config, params) of a model that reverses sequences, with errors."""
    model = learners("vaswani2017")[-2]
    return model.config, convert.from_torch(model.state_dict(), model.config)
