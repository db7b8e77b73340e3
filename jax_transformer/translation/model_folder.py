"""A trained model on disk: a directory of config.json, tokenizer.json and parameters/ (orbax)."""

import hashlib
import json
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from jax_transformer.config import TransformerConfig
from jax_transformer.convert import huggingface
from jax_transformer.data.tokenizer import Tokenizer
from jax_transformer.errors import InputError
from jax_transformer.model import Params, init_params
from jax_transformer.runtime import distributed

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
PARAMETERS = "parameters"


class Checkpoint(NamedTuple):
    """A model that can translate text.

    Attributes:
        config: The shape of the model.
        tokenizer: The vocabulary of its ids.
        params: Its parameters.
    """

    config: TransformerConfig
    tokenizer: Tokenizer
    params: Params


def check_free(directory: Path, overwrite: bool) -> None:
    """Refuse a directory that `save` would not write; touches nothing.

    Args:
        directory: Where a checkpoint is to be written.
        overwrite: Whether a checkpoint that is there already may be replaced.

    Raises:
        InputError: Something is there that may not be replaced, or a parent is no directory.
    """
    if directory.exists() or directory.is_symlink():
        if not overwrite:
            raise InputError(
                f"{directory}: exists already; name another output, overwrite it, or resume "
                "the run in it"
            )
        if directory.is_symlink() or not (directory / CONFIG_FILE).is_file():
            raise InputError(
                f"{directory}: is no checkpoint and so is not overwritten; name another output, "
                "or delete it"
            )
    parent = next(parent for parent in directory.absolute().parents if parent.exists())
    if not (parent.is_dir() and os.access(parent, os.W_OK)):
        raise InputError(f"{directory}: cannot be made, {parent} is no writable directory")


def save(directory: Path, checkpoint: Checkpoint, overwrite: bool = False) -> None:
    """Write a checkpoint, whole or not at all: to a temporary sibling, which is then renamed.

    Args:
        directory: The checkpoint's directory; its parents are made.
        checkpoint: What to write.
        overwrite: Whether a checkpoint that is there already is replaced.

    Raises:
        InputError: The directory exists and may not be replaced.
    """
    check_free(directory, overwrite)
    write(directory, checkpoint)


def write(directory: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint into a directory that may be there already; `save` checks it first.

    What is there of another checkpoint is replaced, all else is kept. The description comes last,
    and without it a directory is no checkpoint: one that was cut off is never half loaded.

    Args:
        directory: The checkpoint's directory; it and its parents are made.
        checkpoint: What to write.
    """
    directory = directory.absolute()
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as scratch:
        written = Path(scratch) / "written"
        written.mkdir()
        _write_parts(written, checkpoint)
        if not directory.exists():
            written.rename(directory)
            return
        replaced = Path(scratch) / "replaced"
        replaced.mkdir()
        for name in (CONFIG_FILE, TOKENIZER_FILE, PARAMETERS):
            if (directory / name).exists():
                (directory / name).rename(replaced / name)
        for name in (PARAMETERS, TOKENIZER_FILE, CONFIG_FILE):
            (written / name).rename(directory / name)


def _write_parts(written: Path, checkpoint: Checkpoint) -> None:
    checkpoint.tokenizer.save(written / TOKENIZER_FILE)
    alone = distributed.orbax_alone()
    with ocp.StandardCheckpointer(multiprocessing_options=alone) as checkpointer:
        checkpointer.save(written / PARAMETERS, checkpoint.params)
    description = {
        "config": checkpoint.config.to_dict(),
        "tokenizer_sha256": checkpoint.tokenizer.digest(),
        "parameters_sha256": {
            path.relative_to(written / PARAMETERS).as_posix(): _sha256(path)
            for path in sorted((written / PARAMETERS).rglob("*"))
            if path.is_file()
        },
    }
    (written / CONFIG_FILE).write_text(json.dumps(description, indent=2) + "\n", "utf-8")


def load(directory: Path) -> Checkpoint:
    """Read a checkpoint that `save` has written.

    Raises:
        InputError: It is no checkpoint directory, a part is missing or damaged, or the parts do
            not belong together.
    """
    if huggingface.is_huggingface(directory):
        config, params, tokenizer, _ = huggingface.load_folder(directory)
        return Checkpoint(config, tokenizer, params)
    config, tokenizer_digest, digests = _read_config(directory)
    tokenizer = Tokenizer.load(directory / TOKENIZER_FILE)
    if tokenizer.digest() != tokenizer_digest:
        raise InputError(
            f"{directory / TOKENIZER_FILE}: is not the tokenizer that the model was trained with "
            f"(tokenizer_sha256 of {CONFIG_FILE}); copy the checkpoint again"
        )
    if not config.src_vocab_size == config.tgt_vocab_size == tokenizer.vocab_size:
        raise InputError(
            f"{directory / CONFIG_FILE}: src_vocab_size={config.src_vocab_size} and "
            f"tgt_vocab_size={config.tgt_vocab_size} must be the tokenizer's "
            f"{tokenizer.vocab_size}"
        )
    return Checkpoint(config, tokenizer, _read_params(directory / PARAMETERS, config, digests))


def _read_config(directory: Path) -> tuple[TransformerConfig, str, dict[str, str]]:
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise InputError(f"{directory}: is no checkpoint directory: {CONFIG_FILE} is not in it")
    try:
        description = json.loads(path.read_text("utf-8"))
        config = TransformerConfig.from_dict(description["config"])
        digests = {
            str(name): str(value) for name, value in description["parameters_sha256"].items()
        }
        return config, str(description["tokenizer_sha256"]), digests
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{path}: is damaged ({error}); copy the checkpoint again") from error


def _read_params(directory: Path, config: TransformerConfig, digests: dict[str, str]) -> Params:
    if not digests:
        raise InputError(f"{directory}: has no files by {CONFIG_FILE}; copy the checkpoint again")
    # Damage is found here and not by orbax, whose threads would go on complaining.
    for name, digest in digests.items():
        path = directory / name
        if not path.is_file():
            raise InputError(f"{path}: is missing; copy the checkpoint again")
        if _sha256(path) != digest:
            raise InputError(f"{path}: is damaged (its sha256 differs); copy the checkpoint again")
    alone = distributed.orbax_alone()
    with ocp.StandardCheckpointer(multiprocessing_options=alone) as checkpointer:
        found = checkpointer.metadata(directory.absolute()).item_metadata.tree
        expected = jax.eval_shape(partial(init_params, config=config), jax.random.key(0))
        _check_shapes(directory, _shapes(found), _shapes(expected))
        return checkpointer.restore(directory.absolute(), expected)


def _check_shapes(directory: Path, found: dict[str, str], expected: dict[str, str]) -> None:
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            raise InputError(
                f"{directory}: {name} is {found.get(name, 'missing')}, but by {CONFIG_FILE} it is "
                f"{expected.get(name, 'no parameter')}"
            )


def _shapes(tree: Any) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in leaves
    }


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
