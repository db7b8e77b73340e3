"""The picture of a run: loss, learning rate and BLEU over the steps."""

import os
import tempfile
from pathlib import Path
from typing import Any

AXES = {  # of the picture's panels, from the top: what is drawn in them
    "loss, nats a target token": ("loss", "validation_loss"),
    "learning rate": ("learning_rate",),
    "BLEU of the validation text": ("validation_bleu",),
}


def draw_curves(path: Path, reports: list[dict[str, Any]]) -> None:
    """Write a picture of what `read_metrics` returned; a file that is there is replaced.

    Args:
        path: A .png, .pdf or .svg file.
        reports: Objects with "step" and some of the values that are drawn; what none of them has
            gets no panel.
    """
    # Neither pyplot nor a window: a figure of its own leaves no state behind.
    from matplotlib.figure import Figure

    known = set().union(*reports)
    drawn = {label: names for label, names in AXES.items() if known.intersection(names)}
    figure = Figure(figsize=(8, 2.5 * len(drawn)), layout="constrained")
    panels = figure.subplots(len(drawn), sharex=True, squeeze=False)[:, 0]
    for panel, (label, names) in zip(panels, drawn.items(), strict=True):
        for name in names:
            points = [(report["step"], report[name]) for report in reports if name in report]
            if points:
                mark = "o-" if name.startswith("validation") else "-"
                panel.plot(*zip(*points, strict=True), mark, label=name, markersize=3)
        panel.set_ylabel(label)
        panel.grid(alpha=0.3)
        if len(panel.lines) > 1:
            panel.legend()
    panels[-1].set_xlabel("step")
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".writing-") as folder:
        figure.savefig(Path(folder) / path.name)
        os.replace(Path(folder) / path.name, path)
