"""docs/examples/ray_prepare.py: what training finds prepared, file by file."""

import os
import subprocess
import sys

import pytest

from jax_transformer.translation.model_folder import save
from tests.examples.processes import EXAMPLES, ROOT
from tests.models import tiny_model

pytest.importorskip("ray.data")
sys.path.insert(0, str(EXAMPLES))
import ray_prepare

SIDES = ("en", "de")


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    """Arguments of `prepare` but for the files, which are beside them: three parts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    lines = [f"{number} abc {number % 7}" for number in range(300)]
    for part in range(3):
        for side in SIDES:
            text = "\n".join(lines[part * 100 : part * 100 + 100]) + "\n"
            (tmp_path / f"part{part}.{side}").write_text(text)
            (tmp_path / f"valid.{side}").write_text("1 abc\n2 abc\n")
    save(tmp_path / "model", tiny_model(lines, 40))
    options = {"tokenizer": "model", "prepared": "store", "max-length": 40}
    options |= {"valid-source": "valid.en", "valid-target": "valid.de"}
    return [f"--{name}={value}" for name, value in options.items()]


def prepared(folder):
    return sorted(path.parent.name for path in folder.glob("store/corpora/*/manifest.json"))


@pytest.mark.exhaustive
def test_a_task_prepares_a_file_or_says_why_not(arguments, tmp_path):
    files = {"source": "part0.en", "target": "part0.de"}
    done = ray_prepare.prepare(files, arguments)
    assert done["report"].startswith("training: 100 pairs read")
    assert done["source"] == "part0.en"
    assert len(prepared(tmp_path)) == 1
    refused = ray_prepare.prepare(files | {"target": "part9.de"}, arguments)
    assert refused["report"] == ""
    assert refused["error"].startswith("error: part9.de is no readable text")


def test_each_source_has_a_target(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x", "--source", "a", "b", "--target", "c", "--seed", "1"])
    with pytest.raises(SystemExit, match="error: 2 files of --source and 1 of --target"):
        ray_prepare.main()


@pytest.mark.exhaustive
def test_training_on_all_files_encodes_none_again(arguments, tmp_path):
    files = [
        word
        for flag, side in (("--source", "en"), ("--target", "de"))
        for word in (flag, *(f"part{part}.{side}" for part in range(3)))
    ]
    program = [sys.executable, str(EXAMPLES / "ray_prepare.py"), *files, *arguments]
    done = subprocess.run(program, env=os.environ, capture_output=True, text=True, check=True)
    said = {line.split()[0] for line in done.stdout.splitlines() if line.startswith("part")}
    assert said == {"part0.en", "part1.en", "part2.en"}  # in the order in which they end
    before = prepared(tmp_path)
    assert len(before) == 3
    command = [sys.executable, "-m", "jax_transformer", "prepare", *files, *arguments]
    subprocess.run([*command, "--weights", "1", "1", "1"], capture_output=True, check=True)
    assert prepared(tmp_path) == before
