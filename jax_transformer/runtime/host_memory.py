"""The memory of this machine: how much there is, and that XLA's CPU backend keeps what it freed."""

import contextlib
import ctypes
import os
import sys
from pathlib import Path

from jax_transformer.errors import InputError

# Parameters of glibc's mallopt (malloc.h).
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
MOST = 2**31 - 1


def use_one_heap() -> bool:
    """Let every thread that starts later allocate from one heap; return whether it does.

    By default glibc gives a thread its own heap, which unmaps each freed part whatever is set.
    """
    return _mallopt((M_ARENA_MAX, 1))


def keep_freed_memory() -> bool:
    """Make the C library keep freed memory for the next request; return whether it does.

    On a CPU, XLA allocates the temporary memory of a step at every call. By default glibc returns
    so large a block to the system each time, and the system must clear its pages again.
    """
    return use_one_heap() and _mallopt((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, MOST))


def _mallopt(*settings: tuple[int, int]) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(
        mallopt(parameter, value) == 1 for parameter, value in settings
    )


def total_memory() -> int | None:
    """Return the bytes that this process may have at most; None where the system does not say."""
    limits = []
    with contextlib.suppress(AttributeError, OSError, ValueError):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with contextlib.suppress(OSError, ValueError):  # "max" where the group has no limit
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text("ascii")))
    with contextlib.suppress(ImportError, OSError):
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        limits += [] if limit == resource.RLIM_INFINITY else [limit]
    return min((limit for limit in limits if limit > 0), default=None)


def check_memory(needed: int, what: str, remedy: str) -> None:
    """Refuse what needs more bytes than this machine has, before any of it is allocated."""
    total = total_memory()
    if total is not None and needed > total:
        raise InputError(
            f"{what} needs at least {needed / 1e9:,.1f} GB, but this machine has "
            f"{total / 1e9:,.1f} GB; {remedy}"
        )
