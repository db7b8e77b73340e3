"""`jax-transformer verify`: the same weights through both frameworks."""

import sys
from pathlib import Path

import tyro

from jax_transformer.commands.convert import Prefixes
from jax_transformer.convert import weights


def verify(
    source: tyro.conf.Positional[Path],
    /,
    layout: str = "reference",
    config: Path | None = None,
    strip_prefixes: Prefixes = (),
) -> None:
    """Run JAX and torch on the same weights and random input; print the error of every block.

    Leaves with exit code 1 where a block differs by more than rounding.

    Args:
        source: As for convert.
        layout: Names and shapes in the source.
        config: As for convert.
        strip_prefixes: As for convert.
    """
    verification = weights.verify(source, layout, config, strip_prefixes=strip_prefixes)
    print(verification)
    if verification.first_differing:
        sys.exit(1)
