"""A model whose translations differ, and a command that is run on lines in this process."""

import io
import sys

import pytest

from jax_transformer import Translator
from jax_transformer.commands import main as cli
from tests.translation.streams import varied_model


@pytest.fixture(scope="session")
def model():
    return varied_model()


@pytest.fixture(scope="session")
def translator(model):
    return Translator(model)


@pytest.fixture
def run(monkeypatch, capsysbinary):
    """Run a command on lines; return its refusal (None if it succeeds), and what it printed."""

    def run(*arguments, lines=()):
        stdin = io.BufferedReader(io.BytesIO("".join(f"{line}\n" for line in lines).encode()))
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(stdin))
        refusal, _ = None, capsysbinary.readouterr()  # what came before
        try:
            cli.main([*map(str, arguments)])
        except SystemExit as left:
            refusal = left.code
        run.error = (printed := capsysbinary.readouterr()).err.decode()
        return refusal, printed.out.decode()

    return run
