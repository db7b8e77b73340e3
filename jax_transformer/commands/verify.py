"""`jax-transformer verify`: the same weights in both frameworks."""

import importlib.util
import sys
from pathlib import Path

import tyro

from jax_transformer.commands.convert import Prefixes, file_config, is_checkpoint, read_source
from jax_transformer.convert import files, to_torch
from jax_transformer.convert.verify import verify as verify_tensors
from jax_transformer.errors import InputError


def verify(
    source: tyro.conf.Positional[Path],
    /,
    layout: str = "reference",
    config: Path | None = None,
    strip_prefixes: Prefixes = (),
) -> None:
    """Run JAX and PyTorch on the same weights and random input; print the error of every block.

    This tests the conversion. It does not test whether the config describes your model: both
    sides are built from the same config. The exit code is 1 where a block differs by more than
    rounding.

    Args:
        source: As for convert.
        layout: Names and shapes in the source.
        config: As for convert.
        strip_prefixes: As for convert.
    """
    if importlib.util.find_spec("torch") is None:
        raise InputError("verify runs torch beside jax; install jax-transformer[torch]")
    if source.is_dir() or is_checkpoint(source, layout, config):
        model = read_source(source, layout, config, strip_prefixes)
        verification = verify_tensors(to_torch(model.params, model.config), model.config)
    else:
        read, tensors = file_config(source, config), files.read(source)
        verification = verify_tensors(tensors, read, layout, strip_prefixes=strip_prefixes)
    print(verification)
    if verification.first_differing:
        sys.exit(1)
