"""docs/porting.md is followed from its first line to its last, as a reader would."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from jax_transformer.commands import main as cli
from jax_transformer.porting import program as recorder

PAGE = (Path(__file__).parents[1] / "docs" / "porting.md").read_text("utf-8")


def run_python(folder, *names):
    run = subprocess.run(
        [sys.executable, *names], cwd=folder, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


def blocks(kind):
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)


def changed(program):
    """Return the program of the page with the activation of its example of a refusal."""
    return program.replace("functional.gelu", "functional.elu")


@pytest.mark.exhaustive
def test_the_page_is_executed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    program, *others = blocks("python")
    described, read, verified = (command.split()[1:] for command in blocks("bash"))
    (tmp_path / "program.py").write_text(program, "utf-8")
    run_python(tmp_path, "program.py")

    cli.main(described)
    printed = capsys.readouterr().out
    assert all(line in printed for line in ("writers.{i}.mix.{i}.weight", "66 tensors with 46,720"))
    pasted = printed[printed.index("# Paste this") :]
    (tmp_path / "pasted.py").write_text(f"{program}\n{pasted}", "utf-8")
    run_python(tmp_path, "pasted.py")

    cli.main(read)
    told = capsys.readouterr().out.splitlines()
    shown = {line for text in blocks("text") for line in text.splitlines()}
    assert len(shown.intersection(told)) >= 5  # config, note and the layout
    assert sum(line.startswith("logits in JAX: ") for line in told) >= 4

    cli.main(verified)
    assert "\na agrees with b\n" in capsys.readouterr().out
    assert (tmp_path / "report.html").stat().st_size > 10_000

    (tmp_path / "train.py").write_text("\n".join(others), "utf-8")
    run_python(tmp_path, "train.py")


@pytest.mark.exhaustive
def test_what_it_shows_of_a_refusal_is_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    program = changed(blocks("python")[0])
    (tmp_path / "program.py").write_text(f"{program}\n{recorder()}", "utf-8")
    run_python(tmp_path, "program.py")
    with pytest.raises(SystemExit):
        cli.main(["suggest", "mine.pt", "--against", "recorded.pt"])
    assert capsys.readouterr().out in blocks("text")


def test_links_exist():
    for link in re.findall(r"\]\((\w+\.\w+)\)", PAGE):
        assert (Path(__file__).parents[1] / "docs" / link).exists(), link


@pytest.mark.parametrize("name", ["layouts", "porting"])
def test_the_pages_name_each_other(name):
    other = {"layouts": "porting", "porting": "layouts"}[name]
    page = (Path(__file__).parents[1] / "docs" / f"{name}.md").read_text("utf-8")
    assert f"{other}.md" in page
