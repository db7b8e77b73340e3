"""Draw the named pictures, or all of them."""

import importlib
import sys

import jax
from matplotlib import rc_context

from docs.draw.style import STYLE

NAMES = ("parity", "alignment", "beam", "batches", "mesh", "lora")

if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # the picture of the mesh shows eight
    for name in sys.argv[1:] or NAMES:
        with rc_context(STYLE):
            importlib.import_module(f"docs.draw.{name}").draw()
