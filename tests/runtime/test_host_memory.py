"""Freed memory is kept: the system need not clear it again for the next request."""

import subprocess
import sys

PROGRAM = """
import resource, sys
import numpy as np
from jax_transformer.runtime.host_memory import keep_freed_memory

told = sys.argv[1] == "keep" and keep_freed_memory()
np.ones(25_000_000, np.float32)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
np.ones(25_000_000, np.float32)
print(int(told), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(mode):
    """Return whether the C library was told, and the page faults of a second request of 100 MB."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, mode], check=True, capture_output=True, text=True
    )
    return map(int, done.stdout.split())


def test_the_second_request_faults_no_page_where_the_library_is_told():
    told, kept = faults("keep")
    _, default = faults("default")
    assert told == sys.platform.startswith("linux")
    assert default > 10  # of 4 or 2,048 KiB each
    assert kept < 10 or not told
