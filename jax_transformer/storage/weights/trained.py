"""Weights as trainers leave them: in a checkpoint, under names of wrappers, beside others."""

import fnmatch
import os
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np

from jax_transformer.errors import InputError, shorten
from jax_transformer.storage.weights import formats, shards, torch_file
from jax_transformer.storage.weights.checks import WeightFileError

# What torch.compile and checkpointed activations put before the names of a module's own parts.
WRAPPERS = re.compile(r"\b(_orig_mod|_checkpoint_wrapped_module)\.")
PARALLEL = "module."  # of DistributedDataParallel and AveragedModel, before every name
AVERAGED = "n_averaged"  # a number of AveragedModel, which is no weight


def read_trained(
    path: str | os.PathLike,
    *,
    key: str | None = None,
    drop: Sequence[str] = (),
    tell: Callable[[str], None] = print,
) -> dict[str, np.ndarray]:
    """Return the weights in a file, or in a folder of shards, by the names of the program.

    Args:
        path: A file as `formats.read` takes, or a folder with one file or with an index.
        key: The entry of a torch.save file that holds the state_dict; without it, the usual ones.
        drop: Names of tensors to leave out; "*" in one stands for any text.
        tell: Takes one line for each thing that was chosen or left out.

    Raises:
        WeightFileError: As for `formats.read`.
        InputError: A name or a pattern of `drop` is that of no tensor.
    """
    path = Path(path)
    if path.is_dir() and key is not None:
        raise WeightFileError(f"{path}: key={key!r} is for torch.save files; leave it out")
    if path.is_dir():
        read = shards.read_weights(path)
    elif key is None and path.suffix in formats.TORCH:
        key, read = torch_file.read_usual(path)
        if key is not None:
            tell(f"note: read the entry {key!r} of {path}; --key reads another")
    else:
        read = formats.read(path, key=key)
    names = plain_names(read)
    tensors = {names[name]: tensor for name, tensor in read.items() if name in names}
    if wrapped := [name for name, own in names.items() if name != own]:
        shown = f"{wrapped[0]} is {names[wrapped[0]]}"
        tell(f"note: {len(wrapped)} names are read without a wrapper's part: {shown}")
    for pattern in drop:
        dropped = fnmatch.filter(tensors, pattern)
        if not dropped:
            raise InputError(f"drop={shorten(pattern)} is the name of no tensor in {path}")
        tell(f"note: left out: {', '.join(dropped)[:500]}")
        for name in dropped:
            del tensors[name]
    return tensors


def plain_names(names: Collection[str]) -> dict[str, str]:
    """Return the program's own name of each name; n_averaged has none under AveragedModel."""
    plain = {name: WRAPPERS.sub("", name) for name in names}
    others = [own for own in plain.values() if own != AVERAGED]
    if others and all(f"{own}.".startswith(PARALLEL) for own in others):
        plain = {n: own.removeprefix(PARALLEL) for n, own in plain.items() if own != AVERAGED}
    return plain if len({*plain.values()}) == len(plain) else {name: name for name in names}
