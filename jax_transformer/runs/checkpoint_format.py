"""What a checkpoint of a run looks like on disk: names, digests, and the formats so far.

A run's checkpoints are a directory with one subdirectory for each step. A step holds `arrays`,
written by orbax, with the sha256 of each of its files, and `run`, a JSON file with everything else,
among it the sha256 of each array.
"""

import base64
import contextlib
import hashlib
import logging
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_transformer.errors import InputError, shorten
from jax_transformer.runs.state import RunCheckpoint
from jax_transformer.runtime import distributed

FORMAT = 4  # of what a step's directory holds
ARRAYS, RUN = "arrays", "run"
FILES = "files.json"  # sha256 of each file of `arrays`

# Names of format 1 and what format 2 calls them.
TRAINING_CONFIG_NAMES = {
    "token_budget": "max_tokens",
    "compute_type": "compute_dtype",
    "average_decay": "ema_decay",
}
PROGRESS_NAMES = {"left_out": "rejected"}
ARRAY_FOLDERS = {"state/average/": "state/ema/"}


def upgrade(content: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON content of a checkpoint of any format so far, in the present format.

    The names of the arrays stay those on disk; see `upgraded_array_name`.

    Raises:
        InputError: The content is of another format.
    """
    found = content.get("format")
    if type(found) is not int or not 1 <= found <= FORMAT:
        raise InputError(
            f"is of format {shorten(found)}, but this version of the library reads formats 1 "
            f"to {FORMAT}; use the version that wrote it"
        )
    if content["format"] == 1:
        content = _from_format_1(content)
    if content["format"] == 2:
        content = _from_format_2(content)
    if content["format"] == 3:
        content = _from_format_3(content)
    return content


def _from_format_1(content: dict[str, Any]) -> dict[str, Any]:
    settings = content["settings"]
    training_config = _renamed(settings["training_config"], TRAINING_CONFIG_NAMES)
    return content | {
        "format": 2,
        "settings": settings | {"training_config": training_config},
        "progress": _renamed(content["progress"], PROGRESS_NAMES),
    }


def _from_format_2(content: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer was the text of its only file, and every run drew its first parameters."""
    file = base64.b64encode(content["settings"]["tokenizer"].encode()).decode()
    tokenizer = {
        "tokenizer": {"kind": "byte_pair", "files": ["tokenizer.json"]},
        "tokenizer_files": {"tokenizer.json": file},
    }
    settings = content["settings"] | tokenizer | {"generation": None, "origin": None}
    return content | {"format": 3, "settings": settings}


def _from_format_3(content: dict[str, Any]) -> dict[str, Any]:
    """An epoch was one window; its batches were others, so such a run cannot be continued."""
    progress = dict(content["progress"])
    for name in ("nonfinite", "skipped"):
        progress[name] = [[epoch, 0, batch] for epoch, batch in progress[name]]
    progress["window"] = [[[epoch, 0, batch], rest] for (epoch, batch), rest in progress["window"]]
    progress["next"] = [progress["next"][0], 0, progress["next"][1]]
    planned = "planned by an earlier version, which alone can continue the run"
    settings = content["settings"] | {"data_sha256": planned}
    return content | {"format": 4, "settings": settings, "progress": progress}


def upgraded_array_name(name: str) -> str:
    """Return what the present format calls an array of any format so far."""
    for old, new in ARRAY_FOLDERS.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _renamed(fields: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in fields.items()}


def named_arrays(checkpoint: RunCheckpoint) -> dict[str, np.ndarray]:
    """Return copies of a checkpoint's arrays by their paths; a random key as its words.

    All processes must call this, and each gets the whole arrays.
    """
    return {name: _to_host(leaf) for name, leaf in named_leaves(checkpoint)}


def named_leaves(checkpoint: RunCheckpoint) -> list[tuple[str, Any]]:
    """Return every array of a checkpoint with its path, in the order of the tree's leaves."""
    tree = {"state": checkpoint.state, "best_params": checkpoint.best_params}
    names = []
    for part in ("state", "best_params"):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree[part]):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            names.append((f"{part}/{name}", leaf))
    return names


def is_key(leaf: Any) -> bool:
    """Return whether an array holds random keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _to_host(leaf: Any) -> np.ndarray:
    return distributed.to_host(jax.random.key_data(leaf) if is_key(leaf) else leaf)


def describe(array: np.ndarray) -> dict[str, Any]:
    """Return dtype, shape and sha256 of an array, ready for JSON."""
    digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
    return {"dtype": str(array.dtype), "shape": list(array.shape), "sha256": digest}


def in_one_line(error: Exception) -> str:
    """Return an error as one line; of one of tensorstore, only what the system said."""
    text = " ".join(str(error).split(" [tensorstore_spec")[0].split())
    if code := re.search(r"os_error_code='(\d+)'", text):
        text = os.strerror(int(code[1]))
    return f"{type(error).__name__}: {text}"[:300]


@contextlib.contextmanager
def orbax_quiet() -> Iterator[None]:
    """Silence what orbax and tensorstore say of an error beside raising it, from every thread.

    Orbax logs a traceback. It also closes its event loop at the first write that fails; each other
    write that ends later then prints that the loop is closed. Some end after the error has left
    this context, so after an error these lines stay silent.
    """
    log, hook = logging.getLogger("absl"), sys.unraisablehook
    level = log.level

    def without_closed_loops(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    log.setLevel(logging.CRITICAL)
    sys.unraisablehook = without_closed_loops
    try:
        yield
        sys.unraisablehook = hook
    finally:
        log.setLevel(level)
