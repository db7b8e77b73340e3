"""The folder of this library among the user's caches."""

import os
from pathlib import Path


def user_cache() -> Path | None:
    """Return the folder by the XDG Base Directory Specification; None without a home folder."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if named.is_absolute():  # the specification ignores a relative path
        return named / "jax-transformer"
    try:
        return Path.home() / ".cache" / "jax-transformer"
    except RuntimeError:  # neither HOME nor an entry of the user in the system's list
        return None
