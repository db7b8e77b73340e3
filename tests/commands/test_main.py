"""The command line as a whole: help, extras, unknown commands."""

import importlib.metadata
import io
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import huggingface_hub
import pytest

from jax_transformer import InputError, __version__
from jax_transformer.commands import main as cli
from jax_transformer.errors import EXTRA_OF
from jax_transformer.runtime.topologies import ENVIRONMENT
from tests.commands.training import refused
from tests.tiers import tiered

ROOT = Path(__file__).parents[2]


def ran(program, *arguments, **options):
    """Return the exit code of a program of Python in a process of its own, and what it printed."""
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, **options)
    return done.returncode, done.stdout, done.stderr


WITHOUT_EXTRAS = """
import json, sys
from jax_transformer import InputError
from jax_transformer.commands import main as cli
from jax_transformer.errors import EXTRA_OF

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
try:
    import torch_reference
except ModuleNotFoundError as error:
    said["torch_reference"] = str(error)
for name in [name for name in EXTRA_OF if EXTRA_OF[name] == "train"]:
    del sys.modules[name]
try:
    cli.main(["verify", "weights.pt", "--config=config.json"])
except SystemExit as left:
    said["verify of weights"] = left.code
print(json.dumps(said))
"""


def test_help_needs_no_library_and_a_command_without_its_extra_says_which(tmp_path):
    code, printed, err = ran(WITHOUT_EXTRAS, cwd=tmp_path)
    assert (code, err) == (0, "")
    shown, _, said = printed.strip().rpartition("\n")
    for command in cli.COMMANDS:
        assert f"  {command} " in shown
    said = json.loads(said)
    assert said["compare"].startswith("error: the following arguments are required: A, B")
    for command in cli.COMMANDS.keys() - {"compare"}:
        expected = (
            rf"error: jax-transformer {command} needs (\w+), which is not installed: "
            rf'pip install "jax-transformer\[(\w+)\]"'
        )
        module, extra = re.fullmatch(expected, said[command]).groups()
        assert EXTRA_OF[module] == extra == "train"
    torch = 'needs torch, which is not installed: pip install "jax-transformer[torch]"'
    assert said["verify of weights"].endswith(torch)
    assert said["torch_reference"] == f"torch_reference {torch}"


@pytest.mark.parametrize("vendor", ["0x8086", "0x1ae0"])
def test_libtpu_is_told_that_there_is_no_tpu_where_there_is_none(tmp_path, monkeypatch, vendor):
    pytest.importorskip("libtpu")
    (tmp_path / "0000:00:01.0").mkdir()
    (tmp_path / "0000:00:01.0" / "vendor").write_text(f"{vendor}\n")
    monkeypatch.setattr(os, "environ", {"TPU_WORKER_HOSTNAMES": "a,b"})
    cli.quiet_libtpu(tmp_path)
    assert os.environ["TPU_WORKER_HOSTNAMES"] == "a,b"
    assert ("TPU_ACCELERATOR_TYPE" in os.environ) == (vendor != "0x1ae0")
    os.environ.pop("TPU_ACCELERATOR_TYPE", None)
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda _: None)
    cli.quiet_libtpu(tmp_path)
    assert "TPU_ACCELERATOR_TYPE" not in os.environ


@pytest.mark.exhaustive
def test_a_command_is_quiet_where_libtpu_finds_no_tpu():
    pytest.importorskip("libtpu")
    told = {"JAX_PLATFORMS", *ENVIRONMENT}
    environment = {name: value for name, value in os.environ.items() if name not in told}
    program = "from jax_transformer.commands.main import quiet_libtpu as quiet; "
    program += "import jax; quiet(); print(jax.devices())"  # without it, libtpu mostly complains
    code, _, err = ran(program, env=environment)
    assert (code, err) == (0, "")


ROWS = """
import numpy as np
from jax_transformer.commands.main import sum_rows_rightly
sum_rows_rightly()
import jax
matrix, rows = (np.random.default_rng(2).normal(size=(n, 3)).astype(np.float32) for n in (3, 40961))
found = jax.jit(jax.vmap(lambda row: jax.numpy.sum((matrix @ row) ** 2)))(rows)
expected = ((rows.astype(float) @ matrix.T.astype(float)) ** 2).sum(1)
print(int(np.sum(abs(found - expected) > 1e-5 * expected)))
"""


def test_the_rows_of_a_long_sum_are_right_in_a_command():
    """Without the option, jaxlib 0.10.2 has eight thousand wrong ones."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_cpu_max_isa=AVX2"}
    assert ran(ROWS, env=environment)[:2] == (0, "0\n")


def test_an_option_of_xla_that_the_user_names_stays(monkeypatch):
    own = f"--{cli.FUSIONS}=dot"
    monkeypatch.setattr(os, "environ", {"XLA_FLAGS": own})
    cli.sum_rows_rightly()
    assert os.environ["XLA_FLAGS"] == own


def test_a_working_folder_that_is_gone_is_one_line(tmp_path):
    """What a command imports may abort the process there, as libtpu does."""
    program = f"import os; os.chdir({str(tmp_path)!r}); os.rmdir({str(tmp_path)!r}); "
    program += "from jax_transformer.commands.main import main; main(['--help'])"
    said = "error: the working folder is gone; change to one that exists\n"
    assert ran(program) == (1, "", said)


def test_train_py_is_the_same_command(monkeypatch):
    seen = []
    monkeypatch.setattr(cli, "main", seen.append)
    monkeypatch.setattr(sys, "argv", ["train.py", "--steps=3"])
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    assert seen == [["train", "--steps=3"]]
    assert len((ROOT / "train.py").read_text().splitlines()) <= 12


def test_every_library_of_an_extra_is_known():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    names = {"orbax-checkpoint": "orbax", "pyyaml": "yaml", "tomli-w": "tomli_w"}
    names |= {"huggingface-hub": "huggingface_hub"}
    extras_of_imports = ("train", "tensorboard", "torch", "hf", "hub", "sentences", "ctranslate2")
    for extra in (*extras_of_imports, "onnx", "export"):
        own = [line for line in extras[extra] if not line.startswith("jax-transformer[")]
        distributions = [re.match(r"[\w-]+", line)[0] for line in own]
        modules = {names.get(name, name) for name in distributions}
        assert modules == {module for module, of in EXTRA_OF.items() if of == extra}
    found = importlib.metadata.packages_distributions()
    assert EXTRA_OF.keys() - found.keys() <= {"tensorboardX", "torch", "transformers"}


def test_a_fault_of_the_library_is_no_missing_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_transformer.commands.budget", None)
    with pytest.raises(ModuleNotFoundError, match="budget"):
        cli.main(["budget"])


def test_an_unknown_command_is_refused():
    assert refused("trian").startswith("error: command 'trian' is unknown; choose one of train")
    assert (line := refused("serve", "runs/0")).startswith("error: serve is no command: ")
    assert all((ROOT / path).exists() for path in re.findall(r"docs/[\w/.]+\w", line))
    assert "docs/serving.md" in line


INTERRUPTED = """
import gc, hashlib, os, signal, sys, time, threading
from jax_transformer.commands import main

# A shell lets what it runs in the background ignore it, and the tests with it.
signal.signal(signal.SIGINT, signal.default_int_handler)

def interrupt(*_):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)

def command():
    if sys.argv[1] == "callback":  # which drops a KeyboardInterrupt, as one of jaxlib does
        gc.callbacks.append(interrupt)
        gc.collect()
    elif sys.argv[1] == "suppressed":
        try:
            interrupt()
        except BaseException:
            pass
    else:  # compiled code, in which Python runs no handler
        threading.Timer(0.2, interrupt).start()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)

main.command_call = lambda *_: command
main.main(["train"])
"""


PLACES = ["callback", "suppressed", "compiled code"]


@pytest.mark.parametrize("place", tiered(PLACES, quick=["compiled code"]))
def test_ctrl_c_is_one_line_and_code_130(place):
    assert ran(INTERRUPTED, place, cwd=ROOT) == (130, "", "interrupted\n")


def test_after_a_command_ctrl_c_is_as_before(monkeypatch):
    handlers = []

    def command():
        handlers.append(signal.getsignal(signal.SIGINT))

    monkeypatch.setattr(cli, "command_call", lambda *_: command)
    for before in (signal.default_int_handler, signal.SIG_IGN):
        old = signal.signal(signal.SIGINT, before)
        try:
            cli.main(["train"])
            handlers.append(signal.getsignal(signal.SIGINT))
        finally:
            signal.signal(signal.SIGINT, old)
    inside, after, ignored, still_ignored = handlers
    assert inside is not after
    assert after is signal.default_int_handler
    assert ignored is still_ignored is signal.SIG_IGN


@pytest.mark.parametrize("is_buffered", [True, False])
def test_output_that_cannot_be_written_is_one_line(monkeypatch, is_buffered):
    monkeypatch.setattr(cli, "command_call", lambda *_: lambda: print("a report"))
    with io.TextIOWrapper(open("/dev/full", "wb", -is_buffered), write_through=True) as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert refused("average") == "error: standard output: No space left on device"


def test_an_error_of_the_system_names_the_file(monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "command_call", lambda *_: (tmp_path / ("x" * 300)).stat)
    assert refused("average") == f"error: {tmp_path / ('x' * 300)}: File name too long"


CLOSED = """
import os, sys
from jax_transformer.commands import main

def command():
    opened = os.open(os.devnull, os.O_RDONLY)
    assert opened > 2, "a file would get what is printed"

main.command_call = lambda *_: command
main.main(["train"])
"""


def test_closed_streams_are_no_files_of_others():
    closing = 'exec "$0" -c "$1" <&- >&- 2>&-'
    done = subprocess.run(["sh", "-c", closing, sys.executable, CLOSED], cwd=ROOT, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize(("stream", "option"), [("stdin", "--input"), ("stdout", "--output")])
def test_translate_with_a_closed_stream_names_the_option(stream, option, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, stream, None)
    assert f"is closed; name a file by {option}" in refused("translate", str(tmp_path))


@pytest.mark.parametrize("command", sorted(cli.COMMANDS.keys() - cli.PARSES_ITSELF))
def test_help_says_each_thing_where_it_is_asked_and_in_plain_words(command, capsys):
    with pytest.raises(SystemExit):
        cli.command_call(command, "--help-all")()
    shown = " ".join(capsys.readouterr().out.split())
    for words in ("As for ", "None", "(default: False", "(default: ()"):
        assert words not in shown


NOWHERE = "nosuch-org/model"  # a name of the hub, and of no folder here
NAMING = {
    "train": (f"--init={NOWHERE}",),
    "prepare": (f"--init={NOWHERE}",),
    "translate": (NOWHERE, "--input=lines"),
    "evaluate": ("lines", "--sources=lines", f"--metricx={NOWHERE}", "--metricx-version=24"),
    "average": (NOWHERE, "out"),
    "convert": (NOWHERE, "out.safetensors"),
    "embed": (NOWHERE, "--input=lines", "--output=out.npy"),
    "transcribe": (NOWHERE, "lines"),
    "extend": (NOWHERE, "out"),
    "export": (NOWHERE, "out"),
    "verify": (NOWHERE,),
    "compare": (NOWHERE, NOWHERE),
    "suggest": (NOWHERE,),
    "budget": (f"--model={NOWHERE}",),
}


ASKS = ("translate", "transcribe", "embed", "export", "train", "prepare")


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_who_translates_exports_or_trains_a_model_asks_the_hub(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lines").write_text("a line\n")
    asked = []

    def refuse(name, **_):
        asked.append(name)
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    assert refused(command, *NAMING[command]).startswith("error: ")
    assert bool(asked) == (command in ASKS)


LONG = "x" * 250  # a name that the disk can hold; those of half-written files are longer
TOO_LONG = {
    "train": ("--output={}", "--prepared={}/store"),
    "prepare": ("--prepared={}",),
    "average": ("run {}", "run new/{}"),
    "translate": ("model --output={}", "model --alignments={}.svg"),
}


@pytest.mark.parametrize("command", TOO_LONG)
def test_a_name_that_is_too_long_is_refused_before_any_work(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for options in TOO_LONG[command]:
        written_beside = "--output=" in options or command == "average"
        names = ("x" * 300, f"{'x' * 300}/output", *((LONG,) if written_beside else ()))
        for name in names:
            line = refused(command, *options.format(name).split())
            assert re.match(r"error: .* cannot be written; .*File name too long", line)
            assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("x" * 4989, "has 5,000 characters; at most 1,024 are read"),
        ("model\udcff", "is not UTF-8; rename the file that it names"),
    ],
)
def test_an_argument_that_cannot_be_shown_is_one_line(capsys, argument, message):
    line = refused("translate", "model", f"--overlong={argument}")
    assert line.startswith("error: argument 3, '--overlong=")
    assert line.endswith(message)
    assert len(line) < 300
    assert capsys.readouterr() == ("", "")


def test_a_pipe_gets_no_escape_codes_where_jupyter_wants_colours(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    cli.main(["budget"])
    printed = capsys.readouterr()
    assert "H100" in printed.out
    assert "\x1b" not in printed.out + printed.err


def test_a_value_in_a_message_is_cut_and_escaped():
    first, second = str(InputError("x" * 5000, "second\nline \udcff")).splitlines()
    assert first == f"{'x' * 700} ... {'x' * 290}"
    assert second == r"second\nline \udcff"


def test_the_version_is_that_of_the_package(capsys):
    cli.main(["--version"])
    assert capsys.readouterr().out == f"jax-transformer {__version__}\n"
