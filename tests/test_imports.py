"""Who imports whom: arrows point down, and the reference in PyTorch needs no JAX."""

import ast
from pathlib import Path

import pytest

import jax_transformer
import torch_reference
from tests.programs import run_python

PACKAGE = Path(jax_transformer.__file__).parent

# From the bottom to the top. A room may import from itself and from rooms of lower lines.
ROOMS = (
    ("errors",),
    ("config",),
    ("storage",),
    ("runtime",),
    ("audio",),
    ("kernels",),
    ("model",),
    ("decoding", "text", "tokenizers"),
    ("convert",),
    ("adapters",),
    ("training",),
    ("translation",),
    ("embedding", "evaluation"),
    ("classification", "transcription"),
    ("export", "runs"),
    ("parity",),
    ("porting",),
    ("commands",),
)
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}


def imported_rooms(path):
    """Yield the rooms that a file imports when it runs or is type-checked, wherever it does."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jax_transformer"):
            _, *rooms = node.module.split(".")
            yield from [rooms[0]] if rooms else [name.name for name in node.names]


@pytest.mark.parametrize("room", LEVEL)
def test_no_room_imports_from_a_higher_one(room):
    files = (
        (PACKAGE / room).rglob("*.py") if (PACKAGE / room).is_dir() else [PACKAGE / f"{room}.py"]
    )
    for path in files:
        for other in imported_rooms(path):
            if other == "__version__" or other == room:
                continue
            allowed = LEVEL[other] <= LEVEL[room]
            assert allowed, f"{path.relative_to(PACKAGE)} imports from {other}, a higher room"


def test_every_file_has_a_room():
    found = {
        path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in PACKAGE.rglob("*.py")
    }
    assert found - {"__init__", "__main__", "__pycache__"} == set(LEVEL)


RUN_WITHOUT_JAX = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"jax", "jaxlib", "flax", "optax", "orbax", "grain"}:
            raise ModuleNotFoundError(f"{name} is not installed here")

sys.meta_path.insert(0, Blocked())
import torch
import torch_reference
import torch_reference.training
from jax_transformer.config import TransformerConfig

config = TransformerConfig.preset(
    "vaswani2017", src_vocab_size=11, tgt_vocab_size=11, d_model=8, num_heads=2, d_ff=16
)
model = torch_reference.Transformer(config).eval()
src, tgt = torch.tensor([[5, 6, 2]]), torch.tensor([[1, 4]])
print(list(model(src, tgt).shape), torch_reference.generate(model, src, max_new_tokens=2).lengths)
"""


def test_the_torch_reference_runs_where_jax_is_not_installed():
    root = Path(torch_reference.__file__).parents[1]
    assert run_python("-c", RUN_WITHOUT_JAX, cwd=root).stdout.startswith("[1, 2, 11]")


IMPORT_ALL = """
import importlib, os, pkgutil, signal, sys
import flax, grain, jax, optax, orbax.checkpoint, sacrebleu, tokenizers, torch, transformers

import jax_transformer
import torch_reference

# What Windows lacks; macOS lacks some of the names of `os` too.
sys.modules |= dict.fromkeys(["fcntl", "grp", "pwd", "resource", "termios", "pty", "tty", "syslog"])
for name in ("O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_NONBLOCK fchmod fork getuid killpg mkfifo "
             "posix_fallocate sched_getaffinity setsid statvfs sysconf").split():
    delattr(os, name)
for name in ("SIGALRM SIGHUP SIGKILL SIGPIPE SIGUSR1 SIGUSR2 alarm setitimer").split():
    delattr(signal, name)
for package in (jax_transformer, torch_reference):
    for file in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not file.name.endswith("__main__"):
            importlib.import_module(file.name)
            print(file.name)
"""


@pytest.mark.exhaustive
def test_every_file_can_be_imported_on_other_systems():
    imported = run_python("-c", IMPORT_ALL, cwd=PACKAGE.parent).stdout.split()
    assert {"jax_transformer.text.store", "jax_transformer.commands.train"} <= {*imported}
