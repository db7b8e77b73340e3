"""The two tiers of the tests: a quick one for a person, and an exhaustive one for CI.

`pytest` runs the quick tier: what shows a fault in a second. `pytest -m exhaustive` runs the rest:
cross products, fuzzing, kills by the hundred.
"""

import pytest

from jax_transformer import TransformerConfig
from tests.models import OTHERS

# These presets hold every value of every field that changes a result, but for the positions of
# tensor2tensor, the output scale of T5, rounded sinusoids and what `OTHERS` holds, which have cases
# of their own.
QUICK_PRESETS = ("torch_nn", "shared_heads", "pre_norm_memory_norm", "marian", "bart", "umt5")
# These hold the rest of them. The remaining presets differ from one of these by single fields.
DISTINCT_PRESETS = (*QUICK_PRESETS, "vaswani2017", "pre_norm", "t5", "m2m100")
MODELS = (*TransformerConfig.presets(), *OTHERS)
QUICK_MODELS = (*QUICK_PRESETS, "pre_norm_decoder")
QUICK_FAMILIES = ("marian", "bart", "m2m_100", "t5", "umt5")


def tiered(values, quick):
    """Return the values as parameters of a test; those that are not quick are exhaustive."""
    return [
        value if value in quick else pytest.param(value, marks=pytest.mark.exhaustive)
        for value in values
    ]


def tiered_rows(rows, is_quick):
    """Return rows of values as parameters of a test; those that are not quick are exhaustive."""
    return [
        row if is_quick(*row) else pytest.param(*row, marks=pytest.mark.exhaustive) for row in rows
    ]
