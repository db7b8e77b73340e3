"""The picture of a run: loss, learning rate and BLEU over the steps."""

from pathlib import Path
from typing import Any

from jax_transformer.errors import InputError
from jax_transformer.storage.faults import faults_named
from jax_transformer.storage.writing import staged_file

AXES = {  # label of each panel, from the top, and the values that it draws
    "loss, nats a target token": ("loss", "validation_loss"),
    "learning rate": ("learning_rate",),
    "BLEU of the validation text": ("validation_bleu",),
}


def draw_curves(path: Path, reports: list[dict[str, Any]]) -> None:
    """Draw the reports that `read_metrics` returned; an existing file is replaced.

    Args:
        path: A .png, .pdf or .svg file.
        reports: Mappings with "step" and some of the drawn values; a value that no report has
            gets no panel.
    """
    # A figure without pyplot needs no window and leaves no global state.
    from matplotlib.figure import Figure

    known = set().union(*reports)
    drawn = {label: names for label, names in AXES.items() if known.intersection(names)}
    if not drawn:
        raise InputError("there is no report of a loss")
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
    with faults_named(path, "cannot be written", OSError), staged_file(path) as scratch:
        figure.savefig(scratch)
