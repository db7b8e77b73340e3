"""The command line as a whole, and `jax-transformer translate` as a command and a program."""

import contextlib
import importlib.metadata
import io
import json
import os
import pty
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from jax_transformer.commands import main as cli
from jax_transformer.commands.extras import EXTRA_OF
from jax_transformer.translation import alignment_plot
from jax_transformer.translation import translate as translation
from jax_transformer.translation.model_folder import save
from jax_transformer.translation.translate import translate
from tests.models import tiny_model

ROOT = Path(__file__).parents[2]
LINES = ["cab", "", "üß abc", "b"]
TEXT = "\n".join(LINES).encode()


@pytest.fixture(scope="module")
def checkpoint():
    return tiny_model(["abc cab üß"], vocab_size=12, seed=3, max_length=12)


@pytest.fixture(scope="module")
def directory(checkpoint, tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint") / "model"
    save(directory, checkpoint)
    return directory


@pytest.fixture
def run(directory, monkeypatch, capsysbinary):
    """Run the command; return its exit code, and what it wrote to standard output and error."""

    def run(text, *options, checkpoint=directory):
        monkeypatch.setattr(sys, "argv", ["x", "translate", str(checkpoint), *map(str, options)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
        code, message = 0, ""
        try:
            cli.main()
        except SystemExit as left:  # Python would print what is no number, and leave with 1
            code, message = (1, f"{left.code}\n") if isinstance(left.code, str) else (left.code, "")
        out, err = capsysbinary.readouterr()
        return code, out.decode(), err.decode() + message

    return run


def command(directory):
    return [sys.executable, "-m", "jax_transformer.commands.main", "translate", directory]


def test_a_program_writes_lines_to_standard_output_and_nothing_else(checkpoint, directory):
    done = subprocess.run(command(directory), input=TEXT, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    texts = [best.text for best, *_ in translate(checkpoint, LINES)]
    assert done.stdout.decode() == "".join(f"{text}\n" for text in texts)
    assert len({*texts}) > 2


def test_progress_is_on_standard_error_where_that_is_a_terminal(checkpoint, directory):
    terminal, its_end = pty.openpty()
    program = subprocess.Popen(
        command(directory), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=its_end
    )
    os.close(its_end)
    program.stdin.write(TEXT)
    program.stdin.close()
    shown = b""
    with contextlib.suppress(OSError):  # what Linux says once the program has left
        while chunk := os.read(terminal, 4096):
            shown += chunk
    os.close(terminal)
    out = program.stdout.read().decode()
    program.stdout.close()
    assert program.wait() == 0
    assert b"translating" in shown
    assert b"3/3" in shown
    assert out == "".join(f"{best.text}\n" for best, *_ in translate(checkpoint, LINES))


def test_a_reader_that_leaves_early_ends_the_program_without_a_word(directory):
    program = subprocess.Popen(
        command(directory),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": ""},  # as where nothing is set
    )
    program.stdout.close()
    program.stdin.write(b"\n")
    program.stdin.close()
    assert program.stderr.read() == b""
    program.stderr.close()
    assert program.wait() == 1


def test_n_best_lines_with_scores(run, checkpoint):
    code, out, err = run(TEXT, "--beam=4", "--nbest=3", "--scores", "--length-penalty=1")
    assert (code, err) == (0, "")
    assert out.endswith("\n")
    rows = [line.split("\t") for line in out[:-1].split("\n")]
    options = {"beam_size": 4, "num_hypotheses": 3, "length_penalty": 1.0}
    expected = [one for best in translate(checkpoint, LINES, **options) for one in best]
    assert len(rows) == 3 * len(LINES)
    assert rows[3:6] == [["0.000000", ""]] * 3  # of the blank line
    for (score, text), one in zip(rows, expected, strict=True):
        assert text == one.text
        assert float(score) == pytest.approx(one.score, abs=1e-6)


def test_blank_lines_stay_in_step_with_the_n_best_of_others(run):
    code, out, _ = run(b"\n" + TEXT + b"\n \n", "--beam=4", "--nbest=3")
    assert code == 0
    lines = out[:-1].split("\n")
    assert len(lines) == 3 * 6
    assert not any(lines[:3] + lines[6:9] + lines[15:])
    assert all(any(lines[start : start + 3]) for start in (3, 9, 12))
    assert run(b"") == (0, "", "")


def test_what_is_cut_is_said_on_standard_error(run):
    text = b"cab\n\n" + b"abc " * 12 + b"\n"
    code, out, err = run(text, "--overlong=cut", "--max-new-tokens=3")
    assert (code, out.count("\n")) == (0, 3)
    assert err == "1 of 3 lines cut to max_length=12 tokens, the first of them line 3\n"


def test_alignments_are_drawn_once(run, tmp_path):
    picture = tmp_path / "plot.png"
    plain = run(TEXT, "--beam=4", "--nbest=3")
    assert run(TEXT, "--beam=4", "--nbest=3", f"--alignments={picture}") == plain
    drawn = picture.read_bytes()
    assert drawn.startswith(b"\x89PNG")
    code, out, err = run(b"", f"--alignments={picture}")
    assert (code, out) == (1, "")
    assert err == f"error: {picture}: exists already; name another picture or overwrite it\n"
    assert picture.read_bytes() == drawn
    assert run(b"b\n", "--overwrite", f"--alignments={picture}", "--max-new-tokens=3")[0] == 0
    assert picture.read_bytes() != drawn


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nbest=3", "--beam=2"], "--nbest 3 must be from 1 to --beam 2"),
        (["--beam=0"], "--nbest 1 must be from 1 to --beam 0"),
        (["--alignments=plot.jpg"], "plot.jpg: the name of a picture must end in .png, .pdf or"),
    ],
)
def test_options_that_cannot_work_are_refused_before_the_model_is_read(run, options, message):
    code, out, err = run(TEXT, *options, checkpoint="nowhere")
    assert (code, out) == (1, "")
    assert err.startswith(f"error: {message}")


def test_the_defaults_of_the_model_hold_unless_a_flag_is_given(run, checkpoint, tmp_path):
    generation = {"beam_size": 4, "length_penalty": 1.0, "max_new_tokens": 5}
    save(tmp_path / "model", checkpoint._replace(generation=generation))
    flags = ("--beam=4", "--length-penalty=1", "--max-new-tokens=5")
    expected = run(TEXT, "--nbest=3", "--scores", *flags)
    assert run(TEXT, "--nbest=3", "--scores", checkpoint=tmp_path / "model") == expected
    options = ("--beam=1", "--length-penalty=0.6", "--max-new-tokens=7")
    assert run(TEXT, *options, checkpoint=tmp_path / "model") == run(TEXT, *options)
    code, out, err = run(TEXT, "--nbest=3")  # by default this model keeps one hypothesis
    assert (code, out, err) == (1, "", "error: --nbest 3 must be from 1 to --beam 1\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"cab\na\xffb\n", ":2:2: byte 0xff is not UTF-8"),
        (b"cab\n\n" + b"abc " * 12 + b"\n", "line 3 is 37 tokens long"),
    ],
)
def test_bad_lines_are_one_line_on_standard_error(run, monkeypatch, tmp_path, text, message):
    monkeypatch.setattr(translation, "generate", lambda *_, **__: pytest.fail("work was done"))
    monkeypatch.setattr(alignment_plot, "draw", lambda *_, **__: pytest.fail("work was done"))
    code, out, err = run(text, f"--alignments={tmp_path / 'plot.png'}")
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


def test_what_is_no_checkpoint_is_refused(run, tmp_path):
    code, _, err = run(TEXT, checkpoint=tmp_path)
    assert code == 1
    assert err.startswith(f"error: {tmp_path}: is not the folder of a trained model")


WITHOUT_EXTRAS = """
import json, sys
from jax_transformer.commands import main as cli
from jax_transformer.commands.extras import EXTRA_OF

sys.modules.update(dict.fromkeys(EXTRA_OF))  # their import then fails, as where there are none
cli.main(["--help"])
import jax_transformer.training.config
assert "jax" not in sys.modules, "help and settings need no framework"
said = {}
for command in cli.COMMANDS:
    try:
        cli.main([command])
    except SystemExit as left:
        said[command] = left.code
for name in [name for name in EXTRA_OF if EXTRA_OF[name] == "train"]:
    del sys.modules[name]
try:
    cli.main(["verify", "weights.pt", "--config=config.json"])
except SystemExit as left:
    said["verify of weights"] = left.code
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def without_extras(tmp_path_factory):
    """What the help and each command print where no extra is installed."""
    directory = tmp_path_factory.mktemp("empty")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS], capture_output=True, cwd=directory, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    shown, _, said = done.stdout.decode().strip().rpartition("\n")
    return shown, json.loads(said)


def test_help_needs_no_library(without_extras):
    shown, _ = without_extras
    for command in cli.COMMANDS:
        assert f"  {command} " in shown


def test_a_command_without_its_extra_says_which(without_extras):
    _, said = without_extras
    for command in cli.COMMANDS:
        expected = (
            rf"error: jax-transformer {command} needs (\w+), which is not installed: "
            rf'pip install "jax-transformer\[(\w+)\]"'
        )
        module, extra = re.fullmatch(expected, said[command]).groups()
        assert EXTRA_OF[module] == extra == "train"
    assert said["verify of weights"].endswith(
        'needs torch, which is not installed: pip install "jax-transformer[torch]"'
    )


def test_train_py_is_the_same_command(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(cli, "main", seen.append)
    monkeypatch.setattr(sys, "argv", ["train.py", "--steps=3"])
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    assert seen == [["train", "--steps=3"]]
    assert len((ROOT / "train.py").read_text().splitlines()) <= 12


def test_every_library_of_an_extra_is_known():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    names = {"orbax-checkpoint": "orbax", "pyyaml": "yaml"}
    for extra in ("train", "tensorboard", "torch", "hf"):
        distributions = [re.match(r"[\w-]+", line)[0] for line in extras[extra]]
        modules = {names.get(name, name) for name in distributions}
        assert modules == {module for module, own in EXTRA_OF.items() if own == extra}
    found = importlib.metadata.packages_distributions()
    assert EXTRA_OF.keys() - found.keys() <= {"tensorboardX", "torch", "transformers"}


def test_a_fault_of_the_library_is_no_missing_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_transformer.commands.budget", None)
    with pytest.raises(ModuleNotFoundError, match="budget"):
        cli.main(["budget"])


def test_an_unknown_command_is_refused():
    with pytest.raises(SystemExit, match="error: command 'trian' is unknown; choose one of train"):
        cli.main(["trian"])
