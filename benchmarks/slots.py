"""How full the slots of a search are: python -m benchmarks.slots MODEL INPUT.

Counts the rows times steps of all loops beside the tokens that were needed, and the programs that
were compiled (encoders and loops), and times a second call in this process.
"""

import time
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.systems import processor, read_lines
from jax_transformer import Translator
from jax_transformer.decoding import slots


def main(
    model: tyro.conf.Positional[Path],
    source: tyro.conf.Positional[Path],
    /,
    sizes: tuple[int, ...] = (1_000, 16_000),
    beam: int = 1,
) -> None:
    """Translate inputs of several sizes, and print what the search did.

    Args:
        model: Folder of a model.
        source: Text whose lines are repeated.
        sizes: Numbers of lines.
        beam: Hypotheses that beam search keeps.
    """
    advance, search, lines = slots._advance, slots.search, read_lines(source)
    done: dict[str, int] = {}

    def counted(*arguments: Any, **settings: Any) -> Any:
        state = arguments[2].state
        (cache,) = state.caches
        rows, length = len(state.ended), cache.ancestors.shape[2]
        begun = int(cache.position) % length  # the search counts modulo the ring where it goes on
        found = advance(*arguments, **settings)
        steps = int(found[0].state.caches[0].position) - begun
        done["rows"] = done.get("rows", 0) + rows * steps
        return found

    def counted_search(*arguments: Any, **settings: Any) -> Any:
        found = search(*arguments, **settings)  # greedy: its longest target is its number of steps
        rows, steps = len(found[1]), int(found[0].lengths.max())
        done["rows"] = done.get("rows", 0) + rows * steps
        return found

    table = Table("lines", "rows times steps", "needed", "ratio", "programs", "processor seconds")
    for size in sizes:
        jax.clear_caches()
        translator = Translator(model)
        texts = list(np.resize(lines, size))
        programs = slots._enter, advance, search
        before = sum(each._cache_size() for each in programs)
        for _ in range(2):
            done.clear()
            started = time.process_time()
            with mock.patch.multiple(slots, _advance=counted, search=counted_search):
                results = list(translator(texts, beam_size=beam))
            seconds = time.process_time() - started
        compiled = sum(each._cache_size() for each in programs) - before
        needed = sum(len(result.tokens) for result in results)
        cells = f"{done['rows']:,}", f"{needed:,}", f"{done['rows'] / needed:.3f}"
        table.add_row(f"{size:,}", *cells, str(compiled), f"{seconds:.1f}")
    Console().print(table, f"{processor()}, beam {beam}")


if __name__ == "__main__":
    tyro.cli(main)
