"""docs/porting.md is followed from its first line to its last, as a reader would."""

import re
from pathlib import Path

import pytest

from jax_transformer.commands import main as cli
from jax_transformer.porting import program as recorder
from tests.programs import run_python

PAGE = (Path(__file__).parents[1] / "docs" / "porting.md").read_text("utf-8")


def blocks(kind):
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.exhaustive
def test_the_page_is_executed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    program, *others = blocks("python")
    described, read, verified = (command.split()[1:] for command in blocks("bash"))
    (tmp_path / "program.py").write_text(program, "utf-8")
    run_python("program.py", cwd=tmp_path)

    cli.main(described)
    printed = capsys.readouterr().out
    assert all(line in printed for line in ("writers.{i}.mix.{i}.weight", "66 tensors with 46,720"))
    pasted = printed[printed.index("# Paste this") :]
    (tmp_path / "pasted.py").write_text(f"{program}\n{pasted}", "utf-8")
    run_python("pasted.py", cwd=tmp_path)

    cli.main(read)
    told = capsys.readouterr().out.splitlines()
    shown = {line for text in blocks("text") for line in text.splitlines()}
    assert len(shown.intersection(told)) >= 5  # config, note and the layout
    assert sum(line.startswith("logits in JAX: ") for line in told) >= 4

    cli.main(verified)
    assert "\na agrees with b\n" in capsys.readouterr().out
    assert (tmp_path / "report.html").stat().st_size > 10_000

    (tmp_path / "train.py").write_text("\n".join(others), "utf-8")
    run_python("train.py", cwd=tmp_path)


@pytest.mark.exhaustive
def test_what_it_shows_of_a_refusal_is_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    program = blocks("python")[0].replace("functional.gelu", "functional.elu")
    (tmp_path / "program.py").write_text(f"{program}\n{recorder()}", "utf-8")
    run_python("program.py", cwd=tmp_path)
    with pytest.raises(SystemExit):
        cli.main(["suggest", "mine.pt", "--against", "recorded.pt"])
    assert capsys.readouterr().out in blocks("text")


@pytest.mark.parametrize("name", ["layouts", "porting"])
def test_the_pages_name_each_other(name):
    other = {"layouts": "porting", "porting": "layouts"}[name]
    page = (Path(__file__).parents[1] / "docs" / f"{name}.md").read_text("utf-8")
    assert f"{other}.md" in page
