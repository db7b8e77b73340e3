"""docs/porting.md is followed from its first line to its last, as a reader would."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from jax_transformer.commands import main as cli

PAGE = (Path(__file__).parents[1] / "docs" / "porting.md").read_text("utf-8")


def run_python(code, folder):
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.exhaustive
def test_the_page_is_executed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```(python|bash)\n(.*?)```", PAGE, re.DOTALL)
    assert [kind for kind, _ in blocks] == ["python", *["bash"] * 3, *["python"] * 2]
    program, *commands = (code for _, code in blocks[:4])
    (tmp_path / "program.py").write_text(program, "utf-8")
    run_python(program, tmp_path)

    printed = []
    for command in commands:
        if "--against" in command and not (tmp_path / "recorded.safetensors").exists():
            code = printed[0][printed[0].index("# Paste this") :]
            run_python(f"{program}\n{code}", tmp_path)
        (words,) = (line.split() for line in command.splitlines())
        assert words[0] == "jax-transformer"
        cli.main(words[1:])
        printed.append(capsys.readouterr().out)
    assert "open    writers.{i}.mix.0.weight" in printed[0]
    assert "  open: norm_placement: pre\n      or post" in printed[0]
    assert "the model follows the record within" in printed[1]
    assert "self_attention/{key,query,value}/kernel" in printed[1]  # the order of the program
    assert "100% certain" in printed[1]
    assert printed[2].splitlines()[-2].startswith("agrees with your program")
    assert (tmp_path / "report.html").stat().st_size > 10_000

    run_python("\n".join(code for _, code in blocks[4:]), tmp_path)


def test_pictures_and_links_exist():
    for link in re.findall(r"\]\((\w+\.\w+)\)", PAGE):
        assert (Path(__file__).parents[1] / "docs" / link).exists(), link


@pytest.mark.parametrize("name", ["layouts", "porting"])
def test_the_pages_name_each_other(name):
    other = {"layouts": "porting", "porting": "layouts"}[name]
    page = (Path(__file__).parents[1] / "docs" / f"{name}.md").read_text("utf-8")
    assert f"{other}.md" in page
