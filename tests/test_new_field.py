"""docs/how_to/new_field.md keeps its word: six files give the model a field with a parameter."""

import re
import shutil
from pathlib import Path

import pytest

from tests.programs import run_python

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "how_to" / "new_field.md").read_text("utf-8")
MOST_FILES = 6


def changes():
    """Yield the file and the two texts of each change of the page."""
    file = None
    for name, diff in re.findall(r"^\d\. .*?`([\w./]+)`|^```diff\n(.*?)^```", PAGE, re.M | re.S):
        if name:
            file = name
            continue
        lines = diff.splitlines(keepends=True)
        before, after = (
            "".join(line[1:] for line in lines if line[0] != other) for other in ("+", "-")
        )
        yield file, before, after


@pytest.mark.exhaustive
def test_a_field_with_a_parameter_needs_six_files(tmp_path):
    for folder in ("jax_transformer", "torch_reference", "tests", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    changed = [*changes()]
    for name, before, after in changed:
        text = (tmp_path / name).read_text("utf-8")
        assert text.count(before) == 1, (name, before)
        (tmp_path / name).write_text(text.replace(before, after), "utf-8")
    assert len({name for name, *_ in changed}) == MOST_FILES
    asked = ["test_layouts_page.py", "test_twins.py", "test_docstrings.py", "test_declared.py"]
    tests = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    tests += [f"tests/{name}" for name in asked]
    for command in (["-m", "tests.new_field"], tests):
        run_python(*command, cwd=tmp_path, environment={"PYTHONPATH": str(tmp_path)})
