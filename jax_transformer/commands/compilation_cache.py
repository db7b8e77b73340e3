"""The folder in which compiled programs are kept between processes.

JAX runs what it finds in this folder. So it must belong to the user alone, and each entry begins
with a digest: one that was damaged, cut off or moved is deleted, and its program compiled again.
"""

import os
import sys
from pathlib import Path

import jax

from jax_transformer.storage.hub import user_cache


def keep_compilations() -> None:
    """Keep what XLA compiles in the user's cache folder or JAX's; a line on stderr says if not."""
    fault = None
    # A search in slots is several programs, some of which take less than JAX's least of a second.
    least = min(jax.config.jax_persistent_cache_min_compile_time_secs, 0.1)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", least)
    if jax.config.jax_compilation_cache_dir is None:
        folder = user_cache()
        fault = "there is no home folder; set XDG_CACHE_HOME" if folder is None else _fault(folder)
        jax.config.update("jax_compilation_cache_dir", None if fault else str(folder))
    try:
        from jax_transformer.commands import sealed_cache

        sealed_cache.install()
    except (ImportError, AttributeError):
        fault = f"jax {jax.__version__} has another cache than this library knows"
        jax.config.update("jax_compilation_cache_dir", None)
    if fault:
        print(f"compiled programs are not kept: {fault}", file=sys.stderr)


def _fault(folder: Path) -> str | None:
    """Return why others might write into a folder, which is made if it is missing."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        return f"{folder}: {error.strerror}"
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
        return f"others may write into {folder}; own it, and run: chmod go-w {folder}"
    return None
