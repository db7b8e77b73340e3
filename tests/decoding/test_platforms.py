"""What another platform executes in a search: the same tokens and scores, computed on a CPU."""

import functools

import jax
import numpy as np
import pytest

from jax_transformer.execution import Execution
from tests.decoding.plain import quick_generate, random_model

# Presets of which each decodes in another way: tied and separate tables, shared projections of the
# heads and targets that attend to the memory alone, a relative bias of the stack or of each layer.
PRESETS = ["vaswani2017", "pre_norm", "shared_heads", "t5", "umt5"]
SEARCHES = {
    "greedy": {},
    "beam": {"beam_size": 3, "num_hypotheses": 3, "length_penalty": 0.6},
    "sampling": {"key": jax.random.key(5), "top_k": 6, "temperature": 1.5},
}
LONG_AND_VARIED = {"max_new_tokens": 9, "min_new_tokens": 6, "no_repeat_ngram_size": 2}


@pytest.mark.parametrize(
    ("preset", "platform"), [(preset, "tpu") for preset in PRESETS] + [("vaswani2017", "gpu")]
)
def test_a_search_finds_the_same_targets_by_the_forms_of_any_platform(preset, platform):
    ids = {"pad_id": 0, "bos_id": 0, "eos_id": 1} if preset in ("t5", "umt5") else {}
    config, params, src = random_model(preset, **ids)
    for name, options in SEARCHES.items():
        find = functools.partial(quick_generate, params, config, src, **LONG_AND_VARIED, **options)
        found, expected = find(execution=Execution.for_platform(platform)), find()
        np.testing.assert_array_equal(found.tokens, expected.tokens, name)
        np.testing.assert_allclose(found.scores, expected.scores, rtol=0, atol=1e-5, err_msg=name)
        assert len(np.unique(found.tokens)) > 3
