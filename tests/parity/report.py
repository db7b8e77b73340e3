"""Errors beyond the forward pass, into docs/parity.md: python -m tests.parity.report.

For every preset and both precisions: logits, gradients and 20 optimizer steps against torch on
CPU, the worst error and the leaf that has it. JAX runs on whatever device it finds; then the same
float32 model with each precision of matrix products, simulated where the device has only one.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from rich.progress import track

from jax_transformer import TransformerConfig
from tests.parity import measure
from tests.parity.document import write_section
from tests.parity.ladder import BOUNDS
from tests.parity.precision import MANTISSA_BITS, with_rounded_products

COMMAND = "python -m tests.parity.report"
DOCUMENT = Path("docs/parity.md")
DTYPES = ("float64", "float32")
PRECISIONS = ("default", "tensorfloat32", "highest")  # of a device's products


def measure_preset(preset: str, dtype: str) -> list[str]:
    """Return the cells of a row: error and leaf of logits, gradients and 20 steps."""
    jax.config.update("jax_enable_x64", dtype == "float64")
    config = measure.trainable(preset)
    seed = TransformerConfig.presets().index(preset)
    pair = measure.make_pair(config, dtype, seed)
    batches = measure.random_batches(config, measure.STEPS)
    with jax.default_matmul_precision("highest"):
        forward = measure.forward(pair, batches[0])
        gradients = measure.gradients(pair, batches[0])
        trained = measure.train(pair, batches, measure.SETTINGS)
    jax.config.update("jax_enable_x64", False)
    return [
        f"{forward:.1e}",
        *(cell(gradients[objective]) for objective in ("logits", "loss")),
        cell(measure.training_errors(trained)),
    ]


def cell(errors: dict[str, float]) -> str:
    """Return the worst error and its leaf, abbreviated."""
    leaf, error = measure.worst(errors)
    return f"{error:.1e} {leaf.replace('layers_', '').replace('_attention', '')}"


def precisions() -> list[str]:
    """Return a row a precision of float32 products: errors of logits and gradients."""
    pair = measure.make_pair(measure.trainable("vaswani2017"), "float32")
    (batch,) = measure.random_batches(pair.config, 1)
    rows = []
    for precision in PRECISIONS:
        with jax.default_matmul_precision(precision):
            rows.append(precision_row(f"{precision}, {jax.default_backend()}", pair, batch))
    if jax.default_backend() == "cpu":  # whose products are float32, whatever is asked for
        for precision in MANTISSA_BITS:

            def jit(function: Callable[..., Any], precision: str = precision) -> measure.Jit:
                return jax.jit(with_rounded_products(function, precision))

            rows.append(precision_row(f"{precision}, simulated", pair, batch, jit))
    return rows


def precision_row(name: str, pair: Any, batch: Any, jit: measure.Jit = jax.jit) -> str:
    """Return the row of one precision."""
    forward = measure.forward(pair, batch, jit)
    errors = measure.gradients(pair, batch, jit)["loss"]
    return f"| {name} | {forward:.1e} | {measure.worst(errors)[1]:.1e} |"


def main() -> None:
    """Measure, print, and write the section of the document."""
    header = "| preset | precision | logits | gradient of the logits | of the loss | 20 steps |"
    lines = [header, "|---|---|---|---|---|---|"]
    runs = [(preset, dtype) for preset in TransformerConfig.presets() for dtype in DTYPES]
    for preset, dtype in track(runs, "presets"):
        lines.append(f"| {preset} | {dtype} | {' | '.join(measure_preset(preset, dtype))} |")
    logits, gradient, adam = (f"{BOUNDS[k][0]:.0e}" for k in ("logits", "gradient", "adam"))
    lines.append(f"| bound | float64 | {logits} | {gradient} | {gradient} | {adam} |")
    lines += ["", "| products | logits | gradient of the loss |", "|---|---|---|", *precisions()]
    text = "\n".join(lines)
    print(text)
    write_section(DOCUMENT, COMMAND, text)


if __name__ == "__main__":
    main()
