"""What a training step costs with batch, length and layers: python -m benchmarks.cost.

Seconds and temporary memory around the small size of benchmarks.training, float32 on one core; what
is varied alone, in turn, each timed step right after a discarded one. Draws the points, and beside
them the straight line that is nearest. Needs Linux (sched_setaffinity).
"""

import json
import os
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jax
import numpy as np
import tyro
from matplotlib import rc_context
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.nn_transformer import draw_batch, model_config
from benchmarks.systems import processor
from benchmarks.training import SETTINGS, SIZES
from docs.draw.style import JAX, MIDDLE, STYLE
from jax_transformer.runtime.host_memory import keep_freed_memory
from jax_transformer.training.step import init_state, train_step

PICTURE = Path("docs/cost.png")
DROPOUT = 0.1
SIZE = SIZES["small"]._replace(rows=8, layers=2)
VALUES = {  # what is varied, a field of `Size`, and its values
    "rows": (4, 8, 16, 32, 64),
    "length": (16, 32, 64, 128, 256, 512),
    "layers": (1, 2, 4, 8, 12),
}
LABELS = {"rows": "sentence pairs", "length": "tokens a side", "layers": "layers a stack"}


class Line(NamedTuple):
    """A straight line beside measured points.

    Attributes:
        slope: Of the line.
        start: What it has at 0.
        deviation: How far a point is from it at most, as a share of the point.
    """

    slope: float
    start: float
    deviation: float


def nearest_line(values: list[float], costs: list[float]) -> Line:
    """Return the line with the least squares of deviations, each as a share of its point."""
    slope, start = np.polyfit(values, costs, 1, w=1 / np.asarray(costs))
    deviations = np.polyval((slope, start), values) / costs - 1
    return Line(float(slope), float(start), float(np.abs(deviations).max()))


def measure(field: str, rounds: int) -> dict[str, Any]:
    """Return the seconds of a training step in each round, and its temporary bytes, by value."""
    sizes = [SIZE._replace(**{field: value}) for value in VALUES[field]]
    runs, memory = [], []
    for size in track(sizes, f"compiling, {field}"):
        config, batch = model_config(size, DROPOUT), draw_batch(size)
        state = init_state(config, SETTINGS)
        step = train_step.lower(state, batch, config, SETTINGS).compile()
        runs.append((step, state, batch))
        memory.append(step.memory_analysis().temp_size_in_bytes)
    seconds: list[list[float]] = [[] for _ in sizes]
    for _ in track(range(rounds), f"measuring, {field}"):
        for index, (step, state, batch) in enumerate(runs):
            state, _ = jax.block_until_ready(step(state, batch))  # discarded
            begun = time.perf_counter()
            state, _ = jax.block_until_ready(step(state, batch))
            seconds[index].append(time.perf_counter() - begun)
            runs[index] = (step, state, batch)
    return {"values": VALUES[field], "seconds": seconds, "temporary bytes": memory}


def table_of(field: str, found: dict[str, Any]) -> Table:
    """Return the costs, each beside that of the value before it, and beside the line."""
    table = Table(LABELS[field], "times", "seconds", "times", "MB", "times")
    seconds = list(map(median, found["seconds"]))
    columns = [found["values"], seconds, [size / 1e6 for size in found["temporary bytes"]]]
    formats = ("{}", "{:.3f}", "{:,.0f}")
    for index in range(len(seconds)):
        cells = []
        for column, form in zip(columns, formats, strict=True):
            grown = column[index] / column[index - 1] if index else None
            cells += [form.format(column[index]), "" if grown is None else f"{grown:.2f}"]
        table.add_row(*cells)
    lines = [nearest_line(columns[0], column) for column in columns[1:]]
    table.caption = "off the nearest line by at most " + ", ".join(
        f"{line.deviation:.1%} ({unit})" for line, unit in zip(lines, ("s", "MB"), strict=True)
    )
    return table


def draw(results: dict[str, dict[str, Any]]) -> None:
    """Draw points and lines, a column for what is varied, seconds above memory."""
    figure = Figure(figsize=(10, 5.5), layout="constrained")
    panels = figure.subplots(2, len(results), sharex="col")
    for column, (field, found) in zip(panels.T, results.items(), strict=True):
        megabytes = [size / 1e6 for size in found["temporary bytes"]]
        for axes, cost in zip(
            column, (list(map(median, found["seconds"])), megabytes), strict=True
        ):
            line = nearest_line(found["values"], cost)
            ends = np.array([0, max(found["values"])])
            axes.plot(ends, line.start + line.slope * ends, color=MIDDLE, label="a line")
            axes.plot(found["values"], cost, "o", color=JAX, label="measured")
            axes.set_ylim(bottom=0)
        column[-1].set_xlabel(LABELS[field])
    panels[0, 0].set_ylabel("seconds of a training step")
    panels[1, 0].set_ylabel("temporary memory, MB")
    panels[0, 0].legend()
    figure.savefig(PICTURE, metadata={"Software": None})


def main(rounds: int = 3, core: int = 0, json_file: Path | None = None) -> None:
    """Measure the cost of a step, print a table for each thing varied, draw all of them.

    Args:
        rounds: How often each step is timed, in turn with the others.
        core: The one core that everything runs on.
        json_file: Where to write the seconds and bytes, if anywhere.
    """
    os.sched_setaffinity(0, {core})
    keep_freed_memory()
    results = {field: measure(field, rounds) for field in VALUES}
    console = Console()
    for field, found in results.items():
        console.print(table_of(field, found))
    console.print(f"{SIZE}, what is varied aside; jax {version('jax')}, {processor()}")
    with rc_context(STYLE):
        draw(results)
    if json_file is not None:
        record = {"processor": processor(), "size": SIZE._asdict(), "results": results}
        json_file.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    tyro.cli(main)
