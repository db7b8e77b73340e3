"""Freed memory is kept: the system need not clear it again for the next request."""

import sys
from itertools import pairwise

import pytest

from tests.programs import run_python

PROGRAM = """
import resource, sys
import numpy as np
from jax_transformer.runtime.host_memory import keep_freed_memory

kept = sys.argv[1] == "keep" and keep_freed_memory()
np.ones(25_000_000, np.float32)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
np.ones(25_000_000, np.float32)
print(int(kept), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

TRAINING = """
import os, resource, signal, sys
from jax_transformer.commands.main import main

# A shell lets what it runs in the background ignore it; in its foreground a thread waits for it.
signal.signal(signal.SIGINT, signal.default_int_handler)
write, faults = sys.stdout.write, []

def count_faults(text):
    if "validation loss" in text:
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    if len(faults) == 4:
        os.write(2, " ".join(map(str, faults)).encode())
        os._exit(0)
    return write(text)

sys.stdout.write = count_faults
main(["train", *sys.argv[1:]])
"""


def faults(mode):
    """Return whether memory is kept, and the page faults of a second request of 100 MB."""
    return map(int, run_python("-c", PROGRAM, mode).stdout.split())


def test_the_second_request_faults_no_page_where_memory_is_kept():
    kept, faults_if_kept = faults("keep")
    _, default = faults("default")
    assert kept == sys.platform.startswith("linux")
    assert default > 10  # of 4 or 2,048 KiB each
    assert faults_if_kept < 10 or not kept


@pytest.mark.exhaustive
def test_the_steps_of_a_training_fault_few_pages(tmp_path):
    options = "--steps=99 --evaluation-interval=5 --d-ff=2048 --bucket-count=1"
    done = run_python("-c", TRAINING, *options.split(), f"--output={tmp_path / 'run'}")
    _, *counts = map(int, done.stderr.split())
    between = [after - before for before, after in pairwise(counts)]
    # A heap of its own costs 25,000 pages in each of the five steps between two evaluations. A
    # checkpoint that is written beside a step may make the one heap grow, once.
    assert min(between) < 5_000 or not sys.platform.startswith("linux"), between
