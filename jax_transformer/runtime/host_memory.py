"""Makes the process keep the memory that XLA's CPU backend has freed."""

import ctypes
import sys

# Parameters of glibc's mallopt (malloc.h).
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
MOST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Make the C library keep freed memory for the next request; return whether it does.

    On a CPU, XLA allocates the temporary memory of a step at every call. By default glibc returns
    so large a block to the system each time, and the system must clear its pages again. Kept in one
    heap the block stays mapped, and the process holds the largest amount that it ever needed. Call
    this before JAX starts its threads, because a thread keeps the heap that it has. It changes
    glibc on Linux only.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((M_ARENA_MAX, 1), (M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, MOST))
    return all(mallopt(parameter, value) == 1 for parameter, value in settings)
