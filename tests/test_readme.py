"""The README keeps its word: its commands exist, and its Python and that of docs/ runs."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from jax_transformer.storage import weights
from jax_transformer.translation.model_folder import save
from tests.models import tiny_model
from tests.programs import run_python

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
PYPROJECT = (ROOT / "pyproject.toml").read_text("utf-8")
INDEX, FUNCTIONS, LAYOUTS, ROBUSTNESS, EXPORT, MODULES, KILLED_RUNS, TUTORIAL, *TEXTS = (
    (ROOT / "docs" / f"{name}.md").read_text("utf-8")
    for name in (
        "index",
        "how_to/the_model_as_a_function",
        "layouts",
        "robustness",
        "export",
        "how_to/nnx_and_equinox",
        "how_to/killed_runs",
        "how_to/pytorch_tutorial",
        "how_to/encoders",
        "how_to/classification",
        "how_to/sentence_vectors",
        "how_to/transcribe",
    )
)
ENCODERS, CLASSIFICATION, SENTENCES, TRANSCRIPTION = TEXTS


def test_the_two_commands_install_extras_that_exist_and_run_what_ci_runs():
    commands = re.findall(r'^pip install -e "\.\[(\w+)\]"\n(.*)$', README, re.MULTILINE)
    assert [command for _, command in commands] == ["python train.py", "pytest"]
    project = tomllib.loads(PYPROJECT)
    extras = project["project"]["optional-dependencies"]
    assert {extra for extra, _ in commands} <= set(extras)
    assert (ROOT / "train.py").is_file()
    ci = (ROOT / ".ci" / "run").read_text("utf-8").splitlines()
    exhaustive = "pytest -m exhaustive --jaxtyping-packages="  # CI leaves out the checks of types
    assert {"pytest", exhaustive} <= set(ci)
    assert 'pip install --quiet -e ".[test,browser,tpu-compile]"' in ci
    assert "--numprocesses=auto" in project["tool"]["pytest"]["ini_options"]["addopts"]


def packages(extra, extras):
    """Return the names of what an extra installs, with those of the extras in it."""
    found = set()
    for requirement in extras[extra]:
        name, _, inner = re.match(r"([\w.-]+)(\[([\w,-]+)\])?", requirement).groups()
        if name == "jax-transformer":
            found = found.union(*(packages(part, extras) for part in inner.split(",")))
        else:
            found |= {name, f"{name}[{inner}]"}
    return found


@pytest.mark.parametrize("page", [README, INDEX], ids=["README", "index"])
def test_the_python_of_a_page_runs_after_the_commands_above_it(page):
    extras = tomllib.loads(PYPROJECT)["project"]["optional-dependencies"]
    installed = set()
    for command, code in re.findall(
        r'pip install -e "\.\[(.*?)\]"|```python\n(.*?)```', page, re.DOTALL
    ):
        installed = installed.union(
            *(packages(part, extras) for part in command.split(",") if part)
        )
        assert "torch" in installed or "import torch" not in code
    assert "jax[tpu]" not in installed  # which prints errors at each start where there is no TPU


def test_a_newcomer_reads_it_in_one_go():
    assert len(README.splitlines()) <= 120


def test_every_file_and_folder_of_the_map_exists():
    table = README.split("## Map of the code")[1].split("\n## ")[0]
    for name in re.findall(r"^\| (.*?) \|", table, re.MULTILINE)[2:]:
        for path in re.findall(r"`([\w./]+)`", name):
            assert (ROOT / path).exists() or (ROOT / "jax_transformer" / path).exists(), path


def run_python_of(pages, folder):
    if not (folder / "runs").exists():
        save(folder / "runs" / "0", tiny_model(["a b c", "c b a"], 12))  # as train.py leaves it
    program = folder / "snippets.py"
    snippets = re.findall(r"```python\n(.*?)```", "".join(pages), re.DOTALL)
    program.write_text("\n".join(snippets), "utf-8")
    run_python(program, cwd=folder)
    return len(snippets)


@pytest.mark.exhaustive
def test_python_of_the_readme_runs(tmp_path):
    assert run_python_of([README], tmp_path) >= 2


@pytest.mark.exhaustive
def test_the_curves_of_a_killed_run_are_drawn(tmp_path):
    (tmp_path / "runs" / "0").mkdir(parents=True)
    (tmp_path / "runs" / "0" / "metrics.jsonl").write_text(
        '{"step": 10, "loss": 5.5}\n{"step": 20, "loss": 4.5}\n{"step": 30, "lo'
    )
    assert run_python_of([KILLED_RUNS], tmp_path) == 1
    assert (tmp_path / "curves.png").stat().st_size > 1000


@pytest.mark.exhaustive
def test_linen_nnx_and_equinox_hold_the_same_tree(tmp_path):
    pytest.importorskip("equinox")
    assert run_python_of([MODULES], tmp_path) >= 6


@pytest.mark.exhaustive
def test_the_model_of_pytorchs_tutorial_comes_and_goes_home(tmp_path):
    assert "PAD_IDX, BOS_IDX, EOS_IDX = 0, 1, 2, 3" in TUTORIAL  # as there
    assert run_python_of([TUTORIAL], tmp_path) == 4


@pytest.mark.exhaustive
def test_the_page_about_encoders_runs(tmp_path):
    pytest.importorskip("transformers")
    from tests.convert.families.case import foreign_model, write_tokenizer
    from tests.convert.families.test_encoders import encoder_of

    model = foreign_model("umt5", **write_tokenizer("umt5", tmp_path / "model"))
    model.save_pretrained(tmp_path / "model")
    for name in ("text_encoder", "prot_t5_xl_half_uniref50-enc"):
        write_tokenizer("umt5", tmp_path / name)
        encoder_of(model).save_pretrained(tmp_path / name)
    ids = "```python\nimport numpy\nids = numpy.array([[3, 4, 1], [5, 1, 0]], 'int32')\n```\n"
    assert run_python_of([ids, ENCODERS], tmp_path) == 7


@pytest.mark.exhaustive
def test_the_page_about_labels_runs(tmp_path):
    pytest.importorskip("transformers")
    from tests.classification.test_classifier import NLI, write

    write(tmp_path / "bart-large-mnli", id2label=NLI)
    write(tmp_path / "t5-tagger", "t5", "token")
    lines = ["a b c", "c b a", "b a", "c c"]
    save(tmp_path / "runs" / "translation", tiny_model(lines, 12, max_length=64))
    pairs = "".join(f"{line}\t{line}\tsame\na\t{line}\tother\n" for line in lines)
    (tmp_path / "pairs.tsv").write_text(pairs, "utf-8")
    page = CLASSIFICATION.replace("STEPS, ROWS = 1000, 32", "STEPS, ROWS = 202, 4")
    assert run_python_of([page], tmp_path) == 3


@pytest.mark.exhaustive
def test_the_page_about_sounds_runs(tmp_path):
    soundfile = pytest.importorskip("soundfile")
    from tests.published.folder import write_folder
    from tests.published.rows import WHISPER

    write_folder(WHISPER[0], tmp_path / "whisper-small")  # whose windows have a second
    random = np.random.default_rng(0)
    for name, rate in {"speech.flac": 16_000, "talk.wav": 22_050}.items():
        soundfile.write(tmp_path / name, random.normal(0, 0.1, (3 * rate, 2)), rate)
    (tmp_path / "broken.mp3").write_bytes(b"no sound")
    assert run_python_of([TRANSCRIPTION.replace("}, 100\n", "}, 3\n")], tmp_path) == 5
    assert "-->" in (tmp_path / "talk.srt").read_text("utf-8")


@pytest.mark.exhaustive
def test_the_page_about_vectors_of_sentences_runs_on_eight_devices(tmp_path, monkeypatch):
    for name in ("train", "test"):
        for code in ("en", "de"):
            lines = [f"{code} {number} x{number % 7}" for number in range(40)]
            (tmp_path / f"{name}.{code}").write_text("\n".join(lines), "utf-8")
    page = SENTENCES.replace("32, 128, 1000", "32, 16, 101").replace("6000)", "200)")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    assert run_python_of([page], tmp_path) == 1


def test_the_pages_say_one_thing_about_the_demonstration():
    claim = re.search(r"`taskset -c 0 python train.py` took (\d+) s on one core of .*?[.,]", README)
    results = (ROOT / "docs" / "results.md").read_text("utf-8")
    assert claim[0][:-1] in results
    assert f"wall time, compilation included: {claim[1]} s" in results
    matches = r"exact match on 1,000 held-out numbers: .*%"
    assert re.findall(matches, README) == re.findall(matches, results)


def test_the_start_page_has_the_errors_and_the_commands_of_the_readme():
    seconds = re.search(r"\d+ s on one core", README)[0]
    for claim in ("python train.py", "docs.draw parity", f"in {seconds}"):
        assert claim in " ".join(INDEX.split())


@pytest.mark.exhaustive
def test_python_and_commands_of_the_documents_run(tmp_path):
    # The pages go on from each other. The commands use the files that the Python has written.
    pages = [INDEX, FUNCTIONS, LAYOUTS, ROBUSTNESS, EXPORT.partition("## Out to PyTorch")[2]]
    assert run_python_of(pages, tmp_path) >= 8
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    commands = "".join(re.findall(r"```bash\n(.*?)```", LAYOUTS, re.DOTALL))
    assert len(commands.splitlines()) == 3
    for command in commands.splitlines():
        done = subprocess.run(
            command.split(),
            cwd=tmp_path,
            env=os.environ | {"PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert weights.read(tmp_path / "back.pt").keys() == weights.read(tmp_path / "mine.pt").keys()
