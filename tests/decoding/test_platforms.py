"""What another platform executes in a search: the same tokens and scores, computed on a CPU."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_transformer.kernels.execution import SearchExecution
from jax_transformer.kernels.products import linear
from tests.decoding.plain import quick_generate, random_model
from tests.parity.ladder import ROUNDED, bound, error
from tests.tiers import tiered

# Presets of which each decodes in another way: tied and separate tables, shared projections of the
# heads and targets that attend to the memory alone, a relative bias of the stack or of each layer.
PRESETS = ["vaswani2017", "pre_norm", "shared_heads", "t5", "umt5"]
SEARCHES = {
    "greedy": {},
    "beam": {"beam_size": 3, "num_hypotheses": 3, "length_penalty": 0.6},
    "sampling": {"key": jax.random.key(5), "top_k": 6, "temperature": 1.5},
}
LONG_AND_VARIED = {"max_new_tokens": 9, "min_new_tokens": 6, "no_repeat_ngram_size": 2}


CASES = [(preset, "tpu", name) for preset in PRESETS for name in SEARCHES]
CASES += [("vaswani2017", "gpu", name) for name in SEARCHES]


@pytest.mark.parametrize("case", tiered(CASES, [("umt5", "tpu", "beam")]), ids=str)
def test_a_search_finds_the_same_targets_by_the_forms_of_any_platform(case):
    preset, platform, name = case
    ids = {"pad_id": 0, "bos_id": 0, "eos_id": 1} if preset in ("t5", "umt5") else {}
    config, params, src = random_model(preset, **ids)
    options = LONG_AND_VARIED | SEARCHES[name]
    found, expected = (
        quick_generate(params, config, src, execution=SearchExecution.for_platform(by), **options)
        for by in (platform, "cpu")
    )
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    assert error(found.scores, expected.scores) <= ROUNDED
    assert len(np.unique(found.tokens)) > 3


@pytest.mark.parametrize("count", [1, 7, 8, 9])
def test_padded_rows_change_no_product(count):
    random = np.random.default_rng(count)
    shapes = (count, 1, 5), (5, 3), (3,)
    x, kernel, bias = (jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes)
    found = linear(x, kernel, bias, "padded")
    assert error(found, x @ kernel + bias) <= bound("block", "float32")


def test_a_single_source_is_multiplied_as_eight_rows():
    config, params, src = random_model("vaswani2017")
    tpu = SearchExecution.for_platform("tpu")
    program = quick_generate.lower(params, config, src[:1], max_new_tokens=5, execution=tpu)
    loop = program.as_text().partition("stablehlo.while")[2]
    kernels = rf"tensor<\d+x({config.d_model}|{config.d_ff}|{config.tgt_vocab_size})xf32>"
    rows = re.findall(rf"dot_general.*: \(tensor<(\S+)x\d+xf32>, {kernels}\)", loop)
    assert [left for left, _ in rows] == ["8"] * 9
