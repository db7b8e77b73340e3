"""Tries that kill a writer at one of its calls that change the disk."""

import contextlib
import functools
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.attack import stock
from benchmarks.attack.files import digest_of
from benchmarks.attack.mutations import choose
from benchmarks.attack.outcomes import Attempt, Outcome, WrongResult, command
from jax_transformer.convert import read_layout, to_huggingface, write_layout
from jax_transformer.convert.huggingface import from_huggingface
from jax_transformer.convert.layouts import LAYOUTS
from jax_transformer.storage import weights as files
from jax_transformer.translation import model_folder

CHANGES = {  # audit events of Python; each is raised before the call
    *("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate"),
    *("os.chmod", "os.utime", "shutil.rmtree", "shutil.copyfile"),
}
EXCHANGE = "renameat2"  # a function of the C library; Python tells when its name is looked up
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
DIGEST = re.compile("[0-9a-f]{32,}")
LATER = 0.004  # seconds at most; half of the kills come so long after the call


class Writer(NamedTuple):
    """What writes into a folder.

    Attributes:
        write: Writes the old (False) or the new (True) content below a folder.
        read: Returns a digest of the content that the library reads there, or raises.
    """

    write: Callable[[Path, bool], object]
    read: Callable[[Path], str]


def _save_model(folder: Path, new: bool) -> None:
    model_folder.save(folder / "model", stock.model(int(new)), overwrite=True)


def _read_model(folder: Path) -> str:
    return model_folder.model_digest(model_folder.load(folder / "model"))


def _save_family(folder: Path, new: bool) -> None:
    config = stock.config("bart")
    options: dict[str, Any] = {"family": "bart", "overwrite": True}
    to_huggingface(stock.params(config, int(new)), config, folder / "bart", **options)


def _read_family(folder: Path) -> str:
    config, params = from_huggingface(folder / "bart")
    return digest_of(config.to_dict(), params)


def _tensors(new: bool) -> dict[str, np.ndarray]:
    return {"a": np.full((50, 50), int(new), np.float32), "b": np.arange(9) + int(new)}


def _save_weights(suffix: str, folder: Path, new: bool) -> None:
    files.write(folder / f"weights{suffix}", _tensors(new), overwrite=True)


def _read_weights(suffix: str, folder: Path) -> str:
    return digest_of(files.read(folder / f"weights{suffix}"))


def _save_layout(folder: Path, new: bool) -> None:
    config = stock.config(max_length=64 + int(new))
    write_layout(folder / "layout.toml", LAYOUTS["reference"], config, overwrite=True)


def _read_layout(folder: Path) -> str:
    return digest_of(read_layout(folder / "layout.toml").config.to_dict())


def _convert(folder: Path, new: bool) -> None:
    source = folder.parent / f"source{int(new)}"
    command(["convert", str(source), str(folder / "weights.safetensors"), "--overwrite"])


def _prepare_text(folder: Path, new: bool) -> None:
    text = folder.parent / f"text{int(new)}"
    sides = [f"--{name}={text / name}.txt" for name in ("source", "target")]
    command(["prepare", *sides, "--vocab-size=70", f"--prepared={folder / 'prepared'}"])


def _read_prepared(folder: Path) -> str:
    """Read what was prepared of the old text, or make it, as a later run would."""
    _prepare_text(folder, False)
    return "prepared"


def _translate(folder: Path, new: bool) -> None:
    path = folder.parent / f"text{int(new)}" / "source.txt"
    output = folder / "translated.txt"
    arguments = ["translate", str(folder.parent / "source0"), f"--input={path}"]
    names = ("translated.txt.part", "translated.txt.part.json")  # the second: something is whole
    unfinished = all((folder / name).exists() for name in names)
    how = "--resume" if unfinished else "--overwrite"
    command([*arguments, f"--output={output}", how, "--window=64"])


def _read_translated(folder: Path) -> str:
    return digest_of((folder / "translated.txt").read_bytes())


QUICK = {
    "model_folder.save": Writer(_save_model, _read_model),
    "to_huggingface": Writer(_save_family, _read_family),
    "a .safetensors file": Writer(
        functools.partial(_save_weights, ".safetensors"),
        functools.partial(_read_weights, ".safetensors"),
    ),
    "a layout": Writer(_save_layout, _read_layout),
}
WRITERS = QUICK | {
    "convert": Writer(_convert, functools.partial(_read_weights, ".safetensors")),
    "prepare": Writer(_prepare_text, _read_prepared),
    "translate": Writer(_translate, _read_translated),
}
if stock.has("torch"):
    WRITERS["a .pt file"] = Writer(
        functools.partial(_save_weights, ".pt"), functools.partial(_read_weights, ".pt")
    )


COMMANDS = ("convert", "prepare", "translate")  # they read files that lie beside


def in_child(task: Callable[[], object], folder: Path, *, kill_at: tuple[int, float] | None) -> int:
    """Run a task in a child process; return how often it changed the disk, or -1 if it was killed.

    This process has no threads of JAX, so that the child, a fork, can run it.

    Args:
        folder: Changes at and below it count.
        kill_at: Number of the call at which it is killed, and seconds after it; None kills not.

    Raises:
        WrongResult: The task raised an exception.
    """
    report = folder.with_name(f"{folder.name}.txt")
    report.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setsid()  # its own children are found by its group
            counted = _count_changes(folder, kill_at)
            result = task()
            count = counted()
            report.write_text(f"{count}\n{result or ''}")
            code = 0
        except BaseException as error:  # the parent tells it
            report.write_text(f"{type(error).__name__}: {error}")
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if os.WTERMSIG(status) in (signal.SIGKILL, signal.SIGALRM):
            return -1
        raise WrongResult(f"the writer died of signal {os.WTERMSIG(status)}")
    if os.waitstatus_to_exitcode(status):
        raise WrongResult(report.read_text())
    return int(report.read_text().partition("\n")[0])


def _count_changes(folder: Path, kill_at: tuple[int, float] | None) -> Callable[[], int]:
    """Count the calls of this process that change the disk below a folder; end it at one."""
    count, place = 0, str(folder)

    def changes(event: str, arguments: tuple[Any, ...]) -> bool:
        if event == "open":
            path, _, flags = arguments
            return bool(flags & WRITING) and str(path).startswith(place)
        if event == "ctypes.dlsym":
            return arguments[1] == EXCHANGE
        if event == "os.truncate":  # of a descriptor, which names no place
            return True
        relative = [path for path in arguments if isinstance(path, str) and path[:1] != "/"]
        return event in CHANGES and (place in str(arguments) or bool(relative))

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if changes(event, arguments):
            count += 1
            if kill_at is not None and count == kill_at[0]:
                if kill_at[1]:
                    signal.setitimer(signal.ITIMER_REAL, kill_at[1])  # ends the process
                else:
                    os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    return lambda: count


def _listing(folder: Path) -> list[str]:
    """Return the names below a folder, without the digests in them, which know other folders."""
    names = (str(path.relative_to(folder)) for path in folder.rglob("*"))
    return sorted(DIGEST.sub("#", name) for name in names)


class Expected(NamedTuple):
    """What holds without a kill.

    Attributes:
        calls: How often a write changes the disk.
        contents: What is read of the old content, and of the new one.
        listing: The files after the old and then the new one was written.
    """

    calls: int
    contents: tuple[str, str]
    listing: list[str]


_EXPECTED: dict[str, Expected] = {}


def _result(task: Callable[[], str], folder: Path) -> list[str]:
    """Run a task in a child process; return the lines that it returns.

    Raises:
        WrongResult: It raised an exception.
    """
    in_child(task, folder, kill_at=None)
    return folder.with_name(f"{folder.name}.txt").read_text().splitlines()[1:]


def _undisturbed(name: str, writer: Writer, base: Path, kept: Path) -> Expected:
    """Return what holds without a kill; keep the old content."""
    if name not in _EXPECTED:
        folder = base / "written"
        folder.mkdir()

        def write_old() -> str:
            writer.write(folder, False)
            return writer.read(folder)

        [old] = _result(write_old, folder)
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(folder, kept)
        calls = in_child(lambda: writer.write(folder, True), folder, kill_at=None)
        [new] = _result(lambda: writer.read(folder), folder)
        _EXPECTED[name] = Expected(calls, (old, new), _listing(folder))
        shutil.rmtree(folder)
    return _EXPECTED[name]


def _sources(base: Path, stock_folder: Path) -> None:
    """Put beside the folder what the commands read."""
    for new in (False, True):
        model = stock.stocked(stock_folder, f"model{int(new)}", _model_of(int(new)))
        text = stock.stocked(stock_folder, "text", stock.text)
        shutil.copytree(model, base / f"source{int(new)}")
        shutil.copytree(text, base / f"text{int(new)}")
        if new:
            for path in (base / "text1").iterdir():
                lines = path.read_text("utf-8").splitlines(keepends=True)
                path.write_text("".join(lines[:200]), "utf-8")


def _model_of(seed: int) -> Callable[[Path], None]:
    return lambda path: model_folder.save(path, stock.model(seed))


def prepare(draw: np.random.Generator, folder: Path, stock_folder: Path, quick: bool) -> Attempt:
    """Return a try that kills a writer; arguments as for the files."""
    writers = QUICK if quick else WRITERS
    name = choose(draw, list(writers))
    writer = writers[name]
    if name in COMMANDS:
        in_child(lambda: _sources(folder, stock_folder), folder, kill_at=None)
    kept = stock_folder / f"old content of {name}"
    expected = _undisturbed(name, writer, folder, kept)
    target = folder / "written"
    begun = bool(draw.random() < 0.8)  # there is an old content
    if begun:
        shutil.copytree(kept, target)
    else:
        target.mkdir()
    call = int(draw.integers(1, expected.calls + 1))
    later = float(draw.uniform(1e-6, LATER)) if draw.random() < 0.5 else 0.0

    def go_on() -> str:
        """Read what is there, write again, and read that."""
        found = writer.read(target) if begun and name != "translate" else expected.contents[0]
        writer.write(target, True)
        return f"{found}\n{writer.read(target)}"

    def run() -> Outcome:
        in_child(lambda: writer.write(target, True), target, kill_at=(call, later))
        left = _listing(target)
        found, again = _result(go_on, target)
        if found not in expected.contents:
            raise WrongResult(f"{name}: neither the old nor the new content after the kill")
        if again != expected.contents[1]:
            raise WrongResult(f"{name}: the next write gave another content")
        if begun and (rest := set(_listing(target)) - set(expected.listing)):
            raise WrongResult(
                f"{name}: leaves files of the killed writer: {sorted(rest)} of {left}"
            )
        return Outcome.SAME

    when = f"{1000 * later:.1f} ms after" if later else "at"
    old = "" if begun else ", nothing there before"
    return Attempt(f"{name}; killed {when} change {call} of {expected.calls}{old}", run)
