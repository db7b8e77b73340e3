"""Kernels in panels: the same products, and nothing computed twice for them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_transformer import encode, init_cache
from jax_transformer.decoding.cache import decode_step, next_step
from jax_transformer.kernels.execution import DEFAULT_SEARCH_EXECUTION, SearchExecution
from jax_transformer.kernels.panels import ALIGNMENT, MOST_ROWS, arrange_for_steps
from tests.decoding.plain import quick_generate, random_model
from tests.models import random_params, random_tokens, small_config
from tests.parity.ladder import bound, error
from tests.tiers import tiered


@pytest.mark.parametrize("rows", tiered([(1, (2, 42, 32)), (3, (1, 42, 64))], [(3, (1, 42, 64))]))
@pytest.mark.parametrize("preset", tiered(["bias_free_qkv", "pre_norm"], ["pre_norm"]))
def test_a_step_over_panels_is_the_plain_one(preset, rows):
    num_rows, shape = rows
    config = small_config(preset, num_encoder_layers=1)  # no kernel of it divides into panels
    params = jax.tree.map(jnp.asarray, random_params(config))
    src, tgt = (jnp.asarray(tokens[:num_rows]) for tokens in random_tokens(config))
    src_mask = (src != config.pad_id)[:, None, None, :]
    memory = jax.jit(encode, static_argnums=1)(params, config, src, src_mask)
    step = jax.jit(decode_step, static_argnames="config")
    plain = cache = init_cache(params, config, memory, tgt.shape[1], src_mask)
    arranged = arrange_for_steps(params, config, DEFAULT_SEARCH_EXECUTION, num_rows)
    assert arranged["output_projection"]["kernel"].columns.shape == shape
    over_panels = jax.jit(next_step, static_argnums=(1, 4))
    for tokens in tgt.T:
        expected, plain = step(params, config, plain, tokens)
        given = arranged, config, cache, tokens[:, None], DEFAULT_SEARCH_EXECUTION
        found, cache = over_panels(*given)
        assert error(found[:, 0], expected) <= bound("logits", "float32")


@pytest.mark.parametrize("num_rows", [MOST_ROWS, MOST_ROWS + 1])
def test_few_rows_are_multiplied_by_panels_and_computed_once(num_rows):
    config, params, src = random_model("vaswani2017", d_model=128, num_heads=4, d_ff=256)
    src = np.resize(src, (num_rows, src.shape[1]))
    text = quick_generate.lower(params, config, src, max_new_tokens=5).compile().as_text()
    products = re.findall(rf"f32\[\d,{num_rows},64\]\S* dot\(", text)
    assert bool(products) == (num_rows <= MOST_ROWS)
    copies = re.findall(rf"\n%.* -> f32\[\d,{num_rows},\d{{3}}\] {{\n(.*?)\n}}", text, re.S)
    assert bool(copies) == (num_rows <= MOST_ROWS)
    for copy in copies:
        assert not re.findall(" (add|multiply|maximum|divide)\\(", copy)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_only_a_program_for_a_cpu_multiplies_by_panels(platform):
    config, params, src = random_model("vaswani2017", d_model=128, num_heads=4, d_ff=256)
    options = {"max_new_tokens": 5, "execution": SearchExecution.for_platform(platform)}
    text = quick_generate.lower(params, config, src[:3], **options).as_text()
    products = re.findall(r"dot_general.*tensor<\dx3x128xf32>, tensor<\dx128x64xf32>", text)
    assert bool(products) == (platform == "cpu")


@pytest.mark.parametrize("preset", tiered(["vaswani2017", "bias_free_qkv", "bart"], ["bart"]))
def test_a_program_for_a_gpu_pads_the_vocabulary_before_its_loop(preset):
    config = small_config(preset)
    assert config.tgt_vocab_size % ALIGNMENT
    wide = config.tgt_vocab_size + -config.tgt_vocab_size % ALIGNMENT
    params, (src, _) = random_params(config), random_tokens(config)
    found = {}
    for copied in ("aligned", "none"):
        execution = SearchExecution.for_platform("gpu", copied_kernels=copied)
        given = {"max_new_tokens": 7, "execution": execution}
        found[copied] = quick_generate(params, config, src, **given)
        text = quick_generate.lower(params, config, src, **given).as_text()
        products = re.findall(rf"dot_general.*x{wide}xf32>", text)
        assert bool(products) == (copied == "aligned")
    assert np.array_equal(found["aligned"].tokens, found["none"].tokens)
    assert error(found["aligned"].scores, found["none"].scores) <= bound("logits", "float32")
