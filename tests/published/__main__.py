"""Prints the table of docs/measured/published_folders.md: `python -m tests.published [WORDS]`.

With words, only the rows whose names have them all.
"""

import os
import sys
import tempfile
from pathlib import Path

import jax
import torch

from tests.compilation import QUICKLY
from tests.published.comparison import COLUMNS, compare, transformers
from tests.published.rows import ROWS

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICKLY}"
    jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS", "cpu"))
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    print(f"| checkpoint | copies | {' | '.join(COLUMNS)} |")
    print("|---" * (len(COLUMNS) + 2) + "|")
    for row in ROWS:
        if not all(word in row.name for word in sys.argv[1:]):
            continue
        with tempfile.TemporaryDirectory() as folder:
            cells = compare(row, Path(folder) / "model")
        print(f"| {row.name} | {row.seen or '-'} | {' | '.join(cells.values())} |", flush=True)
