"""How two results are compared, within which bounds, and where the errors are kept."""

import numpy as np
import torch

from jax_transformer import TransformerConfig

# float64, float32: the largest error that is still called identical.
BOUNDS = {
    "block": (1e-14, 2e-6),
    "logits": (1e-14, 2e-6),
    "gradient": (1e-12, 1e-5),  # of the leaf's largest
    "adam": (1e-12, 1e-4),  # parameters after 20 steps
}


def error(actual, expected):
    """Return max|a - b| / max(1, max|b|), or infinity where either is not finite."""
    actual, expected = np.asarray(actual), to_numpy(expected)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    assert actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
    if not (np.isfinite(actual).all() and np.isfinite(expected).all()):
        return np.inf
    return np.abs(actual - expected).max() / max(1, np.abs(expected).max())


def to_numpy(x):
    return x.detach().numpy() if isinstance(x, torch.Tensor) else np.asarray(x)


def bound(kind, dtype):
    return BOUNDS[kind][("float64", "float32").index(str(dtype))]


class Ladder:
    """Checks errors against their bounds and remembers the worst of each rung."""

    def __init__(self):
        self.worst = {}

    def check(self, preset, block, actual, expected, kind="block"):
        dtype = np.asarray(actual).dtype.name
        measured = error(actual, expected)
        rung = self.worst.setdefault((block, preset), {})
        rung[dtype] = max(measured, rung.get(dtype, 0.0))
        allowed = bound(kind, dtype)
        assert measured <= allowed, f"{preset} {block} {dtype}: {measured:.1e} > {allowed:.0e}"

    def table(self):
        """Return the worst errors as Markdown: a row a preset, a column a block, both dtypes."""
        blocks = list(dict.fromkeys(block for block, _ in self.worst))
        lines = [f"| preset | {' | '.join(blocks)} |", f"|---|{'---|' * len(blocks)}"]
        for preset in TransformerConfig.presets():
            rungs = [self.worst.get((block, preset), {}) for block in blocks]
            if any(rungs):
                lines.append(f"| {preset} | {' | '.join(map(self._cell, rungs))} |")
        return "\n".join(lines)

    def _cell(self, rung):
        return " · ".join(f"{rung[dtype]:.0e}" for dtype in ("float64", "float32") if dtype in rung)
