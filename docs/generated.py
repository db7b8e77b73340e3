"""Pages that the code itself holds: the two models side by side, and the help of the commands."""

import contextlib
import inspect
import io
import os
from types import ModuleType

import torch_reference
from jax_transformer.commands import main as command_line
from jax_transformer.model import layers, transformer

# The part of figure 1, and the class of it in JAX and in PyTorch.
PAIRS = {
    "Attention": (layers, torch_reference.layers, "MultiHeadAttention"),
    "Feed-forward network": (layers, torch_reference.layers, "FeedForward"),
    "Residual connection and norm": (layers, torch_reference.layers, "Residual"),
    "What a self-attention reads beside its vectors": (
        layers,
        torch_reference.layers,
        "AttentionContext",
    ),
    "Encoder layer": (layers, torch_reference.layers, "EncoderLayer"),
    "Decoder layer": (layers, torch_reference.layers, "DecoderLayer"),
    "The whole model": (transformer, torch_reference.model, "Transformer"),
}
INTRODUCTION = """---
hide: [toc]
---

# Both models side by side

The left column is `jax_transformer`, a thin Flax Linen module around pure functions. The right one
is `torch_reference`, plain `torch.nn`. Classes, parameters and methods have the same names in the
same order, which `pytest tests/test_twins.py` checks; the numbers agree, which
`pytest tests/parity -m "" -s -n 0` shows ([the figures](../parity.md)). A decoder layer takes an
optional cache in both; the compiled search is JAX's alone.
"""


def column(module: ModuleType, name: str, title: str) -> str:
    """Return the source of a class as a block of code, with its file as the title."""
    code = inspect.getsource(getattr(module, name))
    path = module.__name__.replace(".", "/")
    return f'```python title="{title}: {path}.py"\n{code}```'


def side_by_side() -> str:
    """Return the page that shows each class of both models in two columns."""
    parts = [INTRODUCTION]
    for heading, (ours, theirs, name) in PAIRS.items():
        columns = (column(ours, name, "JAX"), column(theirs, name, "PyTorch"))
        cells = "\n".join(f"<div markdown>\n\n{code}\n\n</div>" for code in columns)
        parts.append(f'## {heading}\n\n<div class="columns" markdown>\n{cells}\n</div>\n')
    return "\n".join(parts)


def commands() -> str:
    """Return the page with the help of every command."""
    parts = ["# Commands", "What `jax-transformer COMMAND --help-all` prints."]
    os.environ["COLUMNS"] = "96"  # argparse reads it
    for name, purpose in command_line.COMMANDS.items():
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            command_line.command_call(name, "--help-all")()
        parts += [
            f"## jax-transformer {name}",
            f"{purpose.capitalize()}.",
            f"```text\n{printed.getvalue()}```",
        ]
    return "\n\n".join(parts) + "\n"
