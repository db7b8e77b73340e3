"""docs/examples/ray_translate.py: the bytes of `translate`, also where a worker is killed."""

import io
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from jax_transformer.text.text_files import decode_lines
from jax_transformer.translation.translate import translate
from tests.examples.processes import (
    EXAMPLES,
    ROOT,
    WORKER,
    descendants,
    finished,
    ray_command,
    translate_command,
)
from tests.models import unchecked
from tests.tiers import tiered

pytest.importorskip("ray.data")
sys.path.insert(0, str(EXAMPLES))
import ray_translate

QUICK = ("ray_translate",)
LINES = ["abba", "a", "cab cab cab", "b", "bacab", "fed dab", "", " \t", "cafe"]
# A mark at the start and one that is text, ends of lines of both kinds, others that end none.
TEXT = "\ufeffabba\r\n\ufeffcab\n\n fed\u2028dab\x0bbead\rface\n\r\nb\n"


def translated(folder, path, lines):
    """Return what workers make of the parts of a file, without Ray."""
    worker = ray_translate.TranslatePart(str(folder), {})
    results = [worker(part) for part in ray_translate.parts(path, lines)]
    assert not any(result["error"] for result in results)
    return "".join(result["text"] for result in results)


@pytest.mark.exhaustive
@pytest.mark.parametrize("lines", [1, 3])
def test_the_parts_of_a_file_are_translated_as_the_whole(model, folder, tmp_path, lines):
    path = tmp_path / "input"
    for text in (TEXT, TEXT.removesuffix("\n"), "a", "\n"):
        path.write_bytes(text.encode())
        source = list(decode_lines(io.BufferedReader(io.BytesIO(text.encode())), "input"))
        expected = "".join(f"{best.text}\n" for best, *_ in translate(model, source))
        assert translated(folder, path, lines) == expected


def test_parts_have_as_many_lines_as_they_should(tmp_path):
    path = tmp_path / "input"
    path.write_text("a\n" * 7)
    rows = list(ray_translate.parts(path, 3))
    assert [(row["number"], row["start"], row["size"]) for row in rows] == [
        (0, 0, 6),
        (3, 6, 6),
        (6, 12, 2),
    ]
    path.write_text("")
    assert list(ray_translate.parts(path, 3)) == []


def test_what_a_worker_cannot_translate_is_told_by_its_line(folder, tmp_path):
    path = tmp_path / "input"
    for text, message in (
        (b"a\n" * 5 + b"\xff\n", f"{path}:6:1: byte 0xff is not UTF-8"),
        (b"a\n" * 5 + b"abc " * 40, "after line 4: line 2 is "),
    ):
        path.write_bytes(text)
        worker = ray_translate.TranslatePart(str(folder), {})
        first, _, last = (worker(part) for part in ray_translate.parts(path, 2))
        assert (first["error"], last["text"]) == ("", "")
        assert message in last["error"]
    for arguments, message in (
        (("nowhere", {}), "nowhere: is not the folder of a trained model"),
        ((str(folder), {"source_lang": "en"}), "source_lang='en': the model has no language codes"),
    ):
        worker = ray_translate.TranslatePart(*arguments)
        assert message in worker(next(ray_translate.parts(path, 2)))["error"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output": "there"}, "there: exists already; name another output"),
        ({"output": "no/out"}, "lies in no writable folder"),
        ({"input": "nowhere"}, "nowhere is no readable text"),
        ({"input": "text.gz"}, "text.gz: is compressed, and parts of it cannot be read"),
        ({"workers": 0}, "workers=0 must be at least 1"),
        ({"lines": 0}, "lines=0 must be at least 1"),
    ],
)
def test_bad_input_is_refused_before_ray_starts(monkeypatch, tmp_path, change, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ray_translate.ray, "data", None)
    (tmp_path / "there").write_text("old")
    (tmp_path / "input").write_text("a\n")
    (tmp_path / "text.gz").write_bytes(b"\x1f\x8b\x08")
    command = {"input": "input", "output": "out", "workers": 1, "lines": 2} | change
    flags = [f"--{name}={value}" for name, value in command.items()]
    monkeypatch.setattr(sys, "argv", ["ray_translate.py", "model", *flags])
    with unchecked(), pytest.raises(SystemExit) as refused:
        ray_translate.main()
    assert refused.value.code.startswith("error: ")
    assert message in refused.value.code
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "there").read_text() == "old"


@pytest.mark.parametrize("name", tiered(["ray_translate", "ray_serve", "ray_prepare"], QUICK))
def test_a_missing_extra_is_one_line(name):
    program = f"import sys; sys.modules['ray'] = None; import {name}"
    done = finished([sys.executable, "-c", program], path=f"{ROOT}:{EXAMPLES}")
    said = f'error: {name}.py needs ray: pip install "jax-transformer[ray]"\n'
    assert (done.returncode, done.stderr) == (1, said)


@pytest.mark.exhaustive
def test_a_worker_that_is_killed_loses_no_line_and_doubles_none(folder, tmp_path):
    chosen = random.Random(0)
    source, expected, output = (tmp_path / name for name in ("source", "expected", "output"))
    source.write_text(
        "".join(f"{chosen.choice(LINES)} {chosen.choice(LINES)}\n" for _ in range(9000))
    )
    subprocess.run(translate_command(folder, source, expected), check=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(ray_command(folder, source, output, 2, 100), env=environment)
    scratch = tmp_path / ".writing.output"
    while not (scratch.exists() and scratch.stat().st_size):
        assert process.poll() is None
        time.sleep(0.02)
    workers = descendants(process.pid, WORKER)
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGKILL)
    assert process.poll() is None
    assert not output.exists()
    assert process.wait(300) == 0
    assert output.read_bytes() == expected.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["expected", "output", "source"]


@pytest.mark.exhaustive
def test_bad_lines_end_the_program_in_one_line_and_leave_no_file(folder, tmp_path):
    source, output = tmp_path / "source", tmp_path / "output"
    source.write_bytes(b"a\n" * 30 + b"\xff\n")
    done = finished(ray_command(folder, source, output, 1, 10))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"error: {source}, after line 30: {source}:31:1")
    assert os.listdir(tmp_path) == ["source"]
