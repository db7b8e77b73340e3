"""The command line: `jax-transformer COMMAND ...`."""

import errno
import gc
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from jax_transformer import __version__
from jax_transformer.commands.command_line import parse
from jax_transformer.errors import EXTRA_OF, InputError, naming_the_extra, shorten
from jax_transformer.runs.signals import interruptible
from jax_transformer.runtime.host_memory import use_one_heap

# Each command is a function in the module of the same name beside this one. Only the module of the
# chosen command is imported.
COMMANDS = {
    "train": "train a model on parallel text, or on the embedded number words",
    "prepare": "encode the text of a training once, before the training",
    "translate": "translate the lines of a file or of standard input",
    "transcribe": "write what is said in sound files: text or subtitles",
    "embed": "write one vector for each line of a file",
    "evaluate": "score translations: BLEU, chrF, exact match, MetricX",
    "average": "write the mean of a run's last checkpoints as a model",
    "convert": "read weights in one layout and write them in another",
    "extend": "add a language, characters or words to a model of transformers",
    "export": "write a model for programs that know nothing of this library",
    "verify": "run JAX and PyTorch on the same weights and compare every block",
    "compare": "compare what two programs computed, block by block",
    "suggest": "find the config and the layout of weights that nobody described",
    "budget": "print the memory, FLOPs and time that training a model takes",
}
NO_COMMANDS = {  # that people look for
    "serve": "copy docs/examples/serve.py, or that for Ray, which docs/serving.md shows"
}
LONGEST_ARGUMENT = 1024  # characters
FUSIONS = "xla_cpu_experimental_ynn_fusion_type"  # an option of XLA
PARSES_ITSELF = ("train", "prepare")  # which read a --config file first


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; bad input, or an error of the system, is one line and exit code 1.

    Ctrl-C ends the process with one line and exit code 130.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    name = " ".join(["jax-transformer", *arguments[:1]])
    _open_closed_descriptors()
    # Jupyter sets it, and rich would draw live lines into a pipe or a file.
    os.environ.pop("FORCE_COLOR", None)
    use_one_heap()  # before `interruptible` starts a thread
    try:
        with interruptible(), naming_the_extra(name):
            check_arguments(arguments)
            check_working_folder()
            if not arguments or arguments[0] in ("-h", "--help"):
                print(usage())
            elif arguments[0] == "--version":
                print(f"jax-transformer {__version__}")
            else:
                command_call(*arguments)()
            if sys.stdout is not None:
                sys.stdout.flush()  # an error of it is noticed here and not at the exit
    except InputError as error:
        sys.exit(f"error: {error}")
    except ModuleNotFoundError as error:
        if error.name not in EXTRA_OF:
            raise
        sys.exit(f"error: {error}")
    except BrokenPipeError:  # the reader of standard output has left, as `head` does
        _drop_output()
        sys.exit(1)
    except OSError as error:  # of a file or a device, not of this library
        if error.errno is None:
            raise
        # Python keeps nothing to drop where PYTHONUNBUFFERED is set; errors of files are named.
        is_output = _drop_output() or (error.filename is None and error.errno == errno.ENOSPC)
        place = "standard output" if is_output else error.filename or name
        sys.exit(f"error: {place}: {error.strerror}")


def check_arguments(arguments: Sequence[str]) -> None:
    """Refuse arguments that cannot be shown in a message of one line."""
    for number, argument in enumerate(arguments, start=1):
        shown = f"argument {number}, {shorten(argument)},"
        if len(argument) > LONGEST_ARGUMENT:
            raise InputError(
                f"{shown} has {len(argument):,} characters; at most {LONGEST_ARGUMENT:,} are read"
            )
        if any("\ud800" <= character <= "\udfff" for character in argument):
            raise InputError(f"{shown} is not UTF-8; rename the file that it names")


def check_working_folder() -> None:
    """Refuse a working folder that was removed, in which libtpu aborts the process."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise InputError("the working folder is gone; change to one that exists") from error


def _open_closed_descriptors() -> None:
    """Open /dev/null where standard input, output or error is closed: no file gets its number."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number


def _drop_output() -> bool:
    """Drop what standard output cannot take, so that Python's exit is quiet; say whether any."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def quiet_libtpu(pci_devices: Path = Path("/sys/bus/pci/devices")) -> None:
    """Tell libtpu, where it is installed beside no TPU, what it would print errors about."""
    if importlib.util.find_spec("libtpu") is None:
        return
    # The vendor of a TPU is Google.
    if any(file.read_text().strip() == "0x1ae0" for file in pci_devices.glob("*/vendor")):
        return
    from jax_transformer.runtime.topologies import ENVIRONMENT

    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)


def sum_rows_rightly() -> None:
    """Switch off, before JAX is imported, what sums wrongly on a CPU: jax-ml/jax issue 39103."""
    from importlib import metadata  # which takes a tenth of the time of --help

    flags = os.environ.get("XLA_FLAGS", "")
    if metadata.version("jaxlib") == "0.10.2" and FUSIONS not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{FUSIONS}=-reduce"


def command_call(name: str, *arguments: str) -> Callable[[], None]:
    """Import the command's module; return the call of its function with the parsed arguments."""
    if name in NO_COMMANDS:
        raise InputError(f"{name} is no command: {NO_COMMANDS[name]}")
    if name not in COMMANDS:
        raise InputError(f"command {name!r} is unknown; choose one of {', '.join(COMMANDS)}")
    quiet_libtpu()
    sum_rows_rightly()
    # What the imports make stays, and no collection need visit it: a quarter of the processor time
    # of a warm `translate` of two lines.
    gc.disable()
    command = getattr(importlib.import_module(f"jax_transformer.commands.{name}"), name)
    gc.freeze()
    gc.enable()
    if name in PARSES_ITSELF:
        return partial(command, *arguments)
    return partial(command, parse(command, arguments))


def usage() -> str:
    """Return what `jax-transformer --help` prints."""
    width = max(map(len, COMMANDS))
    lines = "".join(f"  {name:<{width}}  {summary}\n" for name, summary in COMMANDS.items())
    return (
        f"usage: jax-transformer COMMAND ...\n\n{lines}\n"
        "jax-transformer COMMAND --help shows the arguments of a command, --help-all also those\n"
        "that few people use."
    )


if __name__ == "__main__":
    main()
