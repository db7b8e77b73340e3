"""What a type checker knows of the public face, by a user's program."""

import re
from pathlib import Path

import pytest

import jax_transformer
import torch_reference
from tests.programs import run_python

PROGRAM = Path(__file__).parent / "user_program.py"


@pytest.mark.exhaustive
def test_a_users_program_is_checked_strictly(tmp_path):
    """optax has no types for others to read, so a user of mypy ignores that import too."""
    options = ["--strict", "--follow-imports=silent", "--ignore-missing-imports"]
    done = run_python(
        "-m", "mypy", *options, f"--cache-dir={tmp_path}", PROGRAM, cwd=PROGRAM.parents[2]
    )
    assert done.stdout == "Success: no issues found in 1 source file\n"


def test_the_program_uses_every_function_of_the_public_face():
    text = PROGRAM.read_text("utf-8")
    without_types = {"Transformer", "parameter_shardings"}  # of flax, and Any
    for name in {*jax_transformer.__all__} - without_types:
        assert len(re.findall(rf"\b{name}\b", text)) > 1, f"{name} is imported at most"


def test_both_packages_say_that_they_have_types():
    for package in (jax_transformer, torch_reference):
        assert (Path(package.__file__).parent / "py.typed").exists()
