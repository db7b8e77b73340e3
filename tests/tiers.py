"""The tiers of the tests: a quick one for a person, an exhaustive one for CI, and the sweep.

`pytest` runs the quick tier: what shows a fault in a second. `pytest -m exhaustive` runs the rest
of what CI runs. `pytest -m sweep` runs what is long and seldom red: every value where CI has some,
and every pair of exhaustive parameters. A test of the sweep is of no other tier.
"""

import pytest

from jax_transformer import TransformerConfig
from tests.models import OTHERS

# These presets hold every value of every field that changes a result, but for the positions of
# tensor2tensor, the output scale of T5, rounded sinusoids, the zero vector of Marian and what
# `OTHERS` holds, which have cases of their own.
QUICK_PRESETS = ("torch_nn", "shared_heads", "pre_norm_memory_norm", "marian", "bart", "umt5")
# These hold the rest of them. The remaining presets differ from one of these by single fields.
DISTINCT_PRESETS = (*QUICK_PRESETS, "vaswani2017", "pre_norm", "t5", "m2m100")
MODELS = (*TransformerConfig.presets(), *OTHERS)
DISTINCT_MODELS = (*DISTINCT_PRESETS, *OTHERS)
QUICK_MODELS = (*QUICK_PRESETS, "pre_norm_decoder", "windows")
QUICK_FAMILIES = ("marian", "bart", "m2m_100", "t5", "umt5")


def tiered(values, quick, exhaustive=None):
    """Return the values as parameters of a test; those that are not quick are exhaustive.

    Args:
        exhaustive: Of those, the ones that CI runs; the others are of the sweep. None is all.
    """
    rows = [(value,) for value in values]
    of_ci = None if exhaustive is None else lambda value: value in exhaustive
    return tiered_rows(rows, lambda value: value in quick, of_ci)


def tiered_rows(rows, is_quick, is_exhaustive=None):
    """Return rows of values as parameters of a test; the tiers are those of `tiered`."""

    def marks(row):
        if is_quick(*row):
            return ()
        if is_exhaustive is None or is_exhaustive(*row):
            return pytest.mark.exhaustive
        return pytest.mark.sweep

    return [pytest.param(*row, marks=marks(row)) for row in map(tuple, rows)]
