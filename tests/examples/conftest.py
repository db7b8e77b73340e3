"""A model that the examples serve, and its folder."""

import pytest

from jax_transformer import Translator
from jax_transformer.translation.model_folder import save
from tests.translation.streams import varied_model


@pytest.fixture(scope="module")
def model():
    return varied_model()


@pytest.fixture(scope="module")
def translator(model):
    return Translator(model)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "model"
    save(folder, model)
    return folder
