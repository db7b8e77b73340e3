"""A kind of tries with planted faults, which the driver must recognise."""

import os
import time
from pathlib import Path

import numpy as np

from benchmarks.attack.outcomes import Attempt, Outcome, WrongResult
from jax_transformer.errors import InputError

FAULTS = (
    *("refused", "same", "long", "wrong", "traceback", "hang", "crash", "memory", "changed"),
    *("left behind", "too much"),
)


def prepare(draw: np.random.Generator, folder: Path, stock: Path, quick: bool) -> Attempt:
    """Return the try whose fault the file beside the stock names; see `FAULTS`."""
    del draw, quick
    fault = (stock.parent / "fault").read_text()
    (folder / "file").write_text("before")

    def run() -> Outcome:
        if fault == "long":
            raise InputError("one line", "and another one")
        if fault == "wrong":
            raise WrongResult("another result")
        if fault == "traceback":
            raise TypeError("a fault of the library")
        if fault == "hang":
            time.sleep(600)
        if fault == "crash":
            os.abort()
        if fault == "memory":
            np.ones(2**23).sum()  # 64 MiB
        if fault == "too much":
            np.ones(2**33)
        if fault == "changed":
            (folder / "file").write_text("after")
            raise InputError("refused, after a file was changed")
        if fault == "left behind":
            (folder / ".file.writing").mkdir()
            raise InputError("refused, after a folder was made")
        if fault == "refused":
            raise InputError("refused")
        return Outcome.SAME

    return Attempt(fault, run, (folder,))
