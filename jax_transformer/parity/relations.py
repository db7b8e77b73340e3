"""Three relations of two programs: invariance of rows, accuracy of each, parity of both."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_transformer.errors import InputError
from jax_transformer.parity.report import aligned
from jax_transformer.parity.values import Rule
from jax_transformer.storage.weights.arrays import as_numpy


class Program(NamedTuple):
    """One function of batches [B, ...], with equal weights in two precisions.

    Attributes:
        run: The program as it is examined.
        exact: The same in float64.
    """

    run: Callable[[np.ndarray], Any]
    exact: Callable[[np.ndarray], Any]


class Relations(NamedTuple):
    """What holds, by the names of the programs; prints as a table.

    Attributes:
        invariance: max|f(row among others) - f(row)|, as it is: 0 is the aim.
        accuracy: How far a program is from its own float64, in units of its precision.
        parity: How far the first program is from the second one, in the same units.
    """

    invariance: Mapping[str, float]
    accuracy: Mapping[str, float]
    parity: float

    def __str__(self) -> str:
        rows = [("program", "invariance", "accuracy in roundings")]
        for name, accuracy in self.accuracy.items():
            rows.append((name, f"{self.invariance[name]:.1e}", f"{accuracy:.1f}"))
        return "\n".join([*aligned(rows), f"parity: {self.parity:.1f} roundings"])

    __repr__ = __str__


def relations(
    programs: Mapping[str, Program],
    rows: np.ndarray,
    *,
    sizes: Sequence[int] = (1, 2, 7, 16, 64),
    seed: int = 0,
) -> Relations:
    """Return how two programs keep the three relations.

    Args:
        programs: The two programs by their names; the second is the one to follow.
        rows: Inputs [N, ...] with N at least the largest of `sizes`.
        sizes: Of batches. In each, others stand beside the first row, drawn by `seed`.

    Raises:
        InputError: There are not two programs, or too few rows.
    """
    if len(programs) != 2 or len(rows) < max(sizes):
        text = f"{len(programs)} programs and {len(rows)} rows; give two and at least {max(sizes)}"
        raise InputError(text)
    random, invariance, found = np.random.default_rng(seed), dict.fromkeys(programs, 0.0), {}
    for name, program in programs.items():
        found[name] = [as_numpy(run(rows)) for run in program]
        alone = as_numpy(program.run(rows[:1]))[0]
        for size in sizes:
            others = 1 + random.permutation(len(rows) - 1)[: size - 1]
            place = int(random.integers(size))
            batch = as_numpy(program.run(np.insert(rows[others], place, rows[0], axis=0)))
            invariance[name] = max(invariance[name], float(np.abs(batch[place] - alone).max()))
    pairs = [*found.values(), [run for run, _ in found.values()]]
    differences = [Rule().difference(a, b) for a, b in pairs]
    errors = [each.error / each.epsilon for each in differences]
    return Relations(invariance, dict(zip(found, errors, strict=False)), errors[-1])
