"""The folder in which compiled programs are kept between processes."""

import os
from pathlib import Path

import jax


def keep_compilations() -> None:
    """Keep what XLA compiles in the user's cache folder, unless JAX is given another one."""
    if jax.config.jax_compilation_cache_dir is None:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(folder / "jax-transformer"))
