"""How the process keeps the memory that XLA's CPU backend works in."""

import ctypes
import sys

# Parameters of glibc's mallopt (malloc.h).
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
MOST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Have the C library keep what is freed for the next request, and return whether it does.

    On a CPU, XLA asks for the temporary memory of a step anew at every call. By default glibc
    gives so large a piece back to the system each time, which must clear its pages again for the
    next. Kept in one heap it stays mapped, and the process holds the most it ever needed. To be
    called before JAX starts its threads, since a thread that has a heap of its own stays with it;
    only glibc on Linux is told anything.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((M_ARENA_MAX, 1), (M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, MOST))
    return all(mallopt(parameter, value) == 1 for parameter, value in settings)
