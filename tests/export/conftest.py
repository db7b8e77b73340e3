import pytest

from tests.models import tiny_model


@pytest.fixture(scope="module")
def base():
    return tiny_model(["abc cab fed dab bead", "xyz uvw"], vocab_size=30, seed=1, max_length=40)
