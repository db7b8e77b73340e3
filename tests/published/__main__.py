"""Prints the table of docs/measured/published_folders.md: `python -m tests.published`."""

import sys
import tempfile
from pathlib import Path

from tests.published.comparison import COLUMNS, compare, transformers
from tests.published.rows import ROWS

if __name__ == "__main__":
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
