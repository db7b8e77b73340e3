"""`jax-transformer translate`, in this process and as a program of its own."""

import subprocess
import sys

import pytest

from jax_transformer import cli, evaluate
from jax_transformer.training.checkpoint import save
from tests.models import tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint():
    return tiny_checkpoint(["abc cab üß"], vocab_size=12, seed=3, max_length=12)


@pytest.fixture(scope="module")
def directory(checkpoint, tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint") / "model"
    save(directory, checkpoint)
    return directory


def program(directory, text):
    return subprocess.run(
        [sys.executable, "-m", "jax_transformer.cli", "translate", directory],
        input=text,
        capture_output=True,
        check=False,
    )


def test_lines_in_lines_out(checkpoint, directory):
    lines = ["cab", "", "üß abc", "b"]
    done = program(directory, "\n".join(lines).encode())
    assert (done.returncode, done.stderr) == (0, b"")
    expected = evaluate.translate(checkpoint, lines)
    assert done.stdout.decode() == "".join(f"{line}\n" for line in expected)
    assert len({*expected}) > 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"cab\na\xffb\n", b":2:2: byte 0xff is not UTF-8"),
        (b"cab\n\n" + b"abc " * 12 + b"\n", b"line 3 is "),
    ],
)
def test_bad_lines_are_one_line_on_standard_error(directory, text, message):
    done = program(directory, text)
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.startswith(b"error: ")
    assert message in done.stderr
    assert done.stderr.count(b"\n") == 1


def test_what_is_no_checkpoint_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["jax-transformer", "translate", str(tmp_path)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code.startswith(f"error: {tmp_path}: is no checkpoint directory")


def test_help_needs_no_framework():
    code = (
        "import sys; from jax_transformer import cli; sys.argv = ['x', '--help']\n"
        "try: cli.main()\n"
        "except SystemExit: print('orbax' in ' '.join(sys.modules), 'sacrebleu' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert b"translate" in done.stdout
    assert done.stdout.endswith(b"False False\n")
