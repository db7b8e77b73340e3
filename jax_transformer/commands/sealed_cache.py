"""JAX's cache of compiled programs with a digest before each entry.

JAX has no public door for it: what is imported and replaced here is private, and may move.
"""

import hashlib

import jax
from jax._src import compilation_cache
from jax._src.lru_cache import LRUCache

SUFFIX = "-sealed"  # of a key: programs that JAX keeps in the same folder have no digest
DIGEST = 32  # bytes of SHA-256


class SealedCache(LRUCache):
    """A folder of programs that says of an entry that is not whole that there is none."""

    def get(self, key: str) -> bytes | None:
        """Return an entry, or None if there is none that is whole."""
        stored = super().get(key + SUFFIX)
        if stored is None:
            return None
        seal, program = stored[:DIGEST], stored[DIGEST:]
        if seal == _seal(key, program):
            return program
        (self.path / f"{key}{SUFFIX}-cache").unlink(missing_ok=True)
        return None

    def put(self, key: str, program: bytes) -> None:
        """Keep an entry; a process that is killed here leaves one that `get` refuses."""
        super().put(key + SUFFIX, _seal(key, program) + program)


def _seal(key: str, program: bytes) -> bytes:
    return hashlib.sha256(key.encode() + program).digest()


def install() -> None:
    """Let JAX keep its compiled programs in a `SealedCache`."""
    compilation_cache.get_file_cache = _sealed_cache
    compilation_cache.reset_cache()


def _sealed_cache(path: str) -> tuple[SealedCache, str]:
    return SealedCache(path, max_size=jax.config.jax_compilation_cache_max_size), path
