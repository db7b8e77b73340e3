"""A search over a large vocabulary copies neither its table nor converts it to float32."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_transformer import TransformerConfig, apply, encode, generate, init_cache, init_params
from jax_transformer.decoding.cache import decode_step
from jax_transformer.kernels import panels
from jax_transformer.kernels.execution import DEFAULT_SEARCH_EXECUTION
from jax_transformer.model import masks
from tests.decoding.plain import random_model
from tests.parity.ladder import bound, error

pytestmark = pytest.mark.exhaustive

# The table of nllb-200-distilled-600M, under a model that is small otherwise. Nothing is computed.
LARGE = {"d_model": 1024, "num_heads": 16, "d_ff": 64, "src_vocab_size": 256_206}
LARGE |= {"tgt_vocab_size": 256_206, "num_encoder_layers": 1, "num_decoder_layers": 1}


@pytest.mark.parametrize(
    ("output", "dtype", "beam_size"),
    [("tied", "float32", 1), ("tied", "bfloat16", 4), ("linear", "bfloat16", 4)],
)
def test_the_program_holds_no_second_table(output, dtype, beam_size):
    config = TransformerConfig.preset("pegasus", **LARGE, output_projection=output)
    params = jax.eval_shape(partial(init_params, config=config), jax.random.key(0))
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), params)
    options = {"config": config, "max_new_tokens": 5, "beam_size": beam_size}
    program = jax.jit(partial(generate, **options)).lower(
        params, src=jax.ShapeDtypeStruct((1, 7), jnp.int32)
    )
    table = params["token_embedding"]["embedding"]
    found = program.compile().memory_analysis()
    assert found.argument_size_in_bytes > table.size * table.dtype.itemsize
    assert found.temp_size_in_bytes < table.size * table.dtype.itemsize / 4


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_without_copies_is_the_plain_one(dtype, rows, monkeypatch):
    monkeypatch.setattr(panels, "MOST_BYTES", 0)
    config, params, src = random_model("vaswani2017")
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), params)
    arranged = panels.arrange_for_steps(params, config, DEFAULT_SEARCH_EXECUTION, rows)
    assert jax.tree.structure(arranged) == jax.tree.structure(params)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    memory, mask = encode(params, config, src[:rows]), masks.source_mask(src[:rows], config)
    cache = init_cache(params, config, memory, 4, mask)
    found, _ = decode_step(params, config, cache, np.full(rows, 5))
    expected = apply(wide, config, src[:rows], np.full((rows, 1), 5))[:, 0]
    assert found.dtype == dtype
    # bfloat16 has 8 bits, and every block rounds to it.
    found = found.astype(jnp.float32)
    assert error(found, expected) <= (bound("logits", "float32") if dtype == "float32" else 2**-5)
