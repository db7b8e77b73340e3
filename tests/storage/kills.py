"""Kills every writer before each of its changes of the disk, and looks at what is left.

A program for test_kills.py: the process of pytest has threads, so it should not fork.
"""

import contextlib
import itertools
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jax_transformer.convert import to_huggingface, write_layout
from jax_transformer.convert.huggingface import read_config
from jax_transformer.convert.layouts import LAYOUTS
from jax_transformer.runs.evaluation import draw_curves
from jax_transformer.storage import weights as weight_files
from jax_transformer.storage.folder import staged
from jax_transformer.storage.writing import replace_file
from jax_transformer.translation import model_folder
from tests.models import random_params, small_config, tiny_model

CHANGES = {  # audit events of Python; each is raised before the call
    *("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate"),
    *("os.chmod", "os.utime", "shutil.rmtree", "shutil.copyfile"),
}
EXCHANGE = "renameat2"  # a function of the C library; Python tells when its name is looked up
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

MODELS = [tiny_model(["a b c", "c d"], size, seed=size) for size in (12, 14)]
MARIAN = small_config("marian")
PARAMS = [random_params(MARIAN, seed) for seed in (0, 1)]
TENSORS = [{"table": params["token_embedding"]["embedding"]} for params in PARAMS]


class Writer(NamedTuple):
    """A function that writes one of two versions of a file or folder, and one that reads it."""

    write: Callable[[Path, int], object]
    read: Callable[[Path], object] = Path.read_bytes


def few_files(folder: Path, version: int) -> None:
    """Write files of which one is replaced, and one is in the second version only."""
    with staged(folder) as staging:
        for name in ("config.json", "weights", "a", "b", "c", "d")[: 1 + 5 * version]:
            (staging / name).write_text(f"{name} {version}")


def huggingface_folder(folder: Path, version: int) -> None:
    """Write shards and their index; they have equal names in both versions."""
    options = {"family": "marian", "max_shard_size": 40_000, "overwrite": True}
    to_huggingface(PARAMS[version], MARIAN, folder, **options)


WRITERS = {
    " of files": Writer(few_files, lambda folder: sorted(folder.iterdir())),
    " of this library": Writer(
        lambda folder, version: model_folder.save(folder, MODELS[version], overwrite=True),
        model_folder.load,
    ),
    " of Hugging Face": Writer(huggingface_folder, read_config),
    ".safetensors": Writer(
        lambda path, version: weight_files.write(path, TENSORS[version], overwrite=True)
    ),
    ".pt": Writer(lambda path, version: weight_files.write(path, TENSORS[version], overwrite=True)),
    ".toml": Writer(
        lambda path, version: write_layout(path, list(LAYOUTS.values())[version], overwrite=True)
    ),
    "": Writer(lambda path, version: replace_file(path, b"version %d" % version)),
    ".png": Writer(lambda path, version: draw_curves(path, [{"step": 1, "loss": 2.0 + version}])),
}


def is_killed(write: Callable[[], object], folder: Path, moment: int, seconds: float = 0.0) -> bool:
    """Run a writer in a child process and kill it; return whether it had not come to its end.

    Args:
        write: The writer.
        folder: Changes of the disk at and below it count.
        moment: Number of the change before which the child is killed.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setsid()  # its own children are found by its group
            _kill_at(folder, moment)
            write()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        assert os.WTERMSIG(status) == signal.SIGKILL, f"died of {status}"
        return True
    assert status == 0, "the writer has failed"
    return False


def _kill_at(folder: Path, moment: int) -> None:
    """Let this process be killed when it changes the disk below a folder for the nth time."""
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
        if not changes(event, arguments):
            return
        count += 1
        if count == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all files under a folder, and the names of empty folders."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else b""
        for path in folder.rglob("*")
        if path.is_file() or not any(path.iterdir())
    }


def kill_everywhere(home: Path, name: str, exists: bool) -> int:
    """Kill a writer before each change of the disk, with or without an old version; count kills."""
    writer, target, begin = WRITERS[name], home / f"model{name}", home.with_name("begin")
    home.mkdir()
    if exists:
        writer.write(target, 0)
    old = contents(home)
    shutil.copytree(home, begin)
    writer.write(target, 1)
    new = contents(home)
    for moment in itertools.count(1):
        shutil.rmtree(home)
        shutil.copytree(begin, home)
        if not is_killed(lambda: writer.write(target, 1), home, moment):
            break  # the writer has come to its end
        if target.exists():
            left = contents(home)
            writer.read(target)
            assert contents(home) == left, f"{name}, {moment}: reading has changed something"
        found = {key: content for key, content in contents(home).items() if key[0] != "."}
        assert found in (old, new), f"{name}, kill {moment}: neither old nor new: {[*found]}"
        writer.write(target, 1)
        assert contents(home) == new, f"{name}, kill {moment}: leftovers in {[*contents(home)]}"
    shutil.rmtree(home)
    shutil.rmtree(begin)
    return moment - 1


if __name__ == "__main__":
    os.fsync = lambda descriptor: None  # slow, and no kill loses what the system was told to write
    kills = 0
    for name, exists in itertools.product(WRITERS, (False, True)):
        kills += kill_everywhere(Path(sys.argv[1]) / "home", name, exists)
        print(f"{kills:,} kills, after {name or 'a file'}", flush=True)
