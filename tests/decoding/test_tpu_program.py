"""What XLA makes of a search for a TPU: compiled for one chip, on a machine that has none."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from jax_transformer import TransformerConfig, generate, init_params
from jax_transformer.execution import Execution
from jax_transformer.runtime.topologies import topology_devices

pytest.importorskip("libtpu")

ROWS, SOURCE, LENGTH, VOCABULARY = 8, 24, 16, 1024
WIDTH, HEADS = 128, 4


@pytest.fixture(scope="module", params=[1, 4], ids=["greedy", "beam"])
def search(request):
    """Return the number of hypotheses, and the search as it is lowered and as it is compiled."""
    config = TransformerConfig.preset(
        "vaswani2017",
        src_vocab_size=VOCABULARY,
        tgt_vocab_size=VOCABULARY,
        d_model=WIDTH,
        num_heads=HEADS,
        d_ff=2 * WIDTH,
        num_encoder_layers=1,
        num_decoder_layers=1,
        max_length=32,
    )
    chip = SingleDeviceSharding(topology_devices("v5e:1x1")[0])
    shapes = jax.eval_shape(functools.partial(init_params, config=config), jax.random.key(0))
    params = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16, sharding=chip), shapes
    )
    find = functools.partial(
        generate,
        config=config,
        max_new_tokens=LENGTH,
        beam_size=request.param,
        execution=Execution.for_platform("tpu"),
    )
    src = jax.ShapeDtypeStruct((ROWS, SOURCE), jnp.int32, sharding=chip)
    lowered = jax.jit(lambda params, src: find(params, src=src)).lower(params, src)
    return request.param, lowered.as_text(), lowered.compile().as_text()


def computation(program, name):
    """Return the lines of a computation of a compiled program."""
    start = re.search(rf"^%?{re.escape(name)} .*{{$", program, re.M).end()
    return program[start : program.index("\n}", start)].splitlines()


def test_the_loop_writes_into_the_cache_and_copies_none_of_it(search):
    count, _, program = search
    cache = rf"= bf16\[{ROWS},{LENGTH * count},{WIDTH}\]\S* (?!get-tuple-element\()"
    bodies = (
        computation(program, name) for name in re.findall(r" while\(.*body=%(\S+?),", program)
    )
    made = [line for body in bodies for line in body if re.search(cache, line)]
    assert len(made) == 2  # keys and values
    for line in made:
        written = computation(program, re.search(r"calls=%(\S+?),", line)[1])
        assert any("dynamic-update-slice(" in inner for inner in written)


def test_no_form_of_a_cpu_enters_the_loop(search):
    """Rows are not flattened, nor cut into panels, and a product serves all heads."""
    count, lowered, _ = search
    loop = lowered[lowered.index("stablehlo.while") :]
    products = re.findall(r"dot_general.*: \(tensor<(\S+)>, tensor<(\S+)>\) ->", loop)
    caches = [f"{ROWS}x{length}x{WIDTH}xbf16" for length in (LENGTH * count, SOURCE)]
    assert [right for _, right in products if right.count("x") != 2] == [
        cache for cache in caches for _ in ("keys", "values")
    ]
    assert all(left.startswith(f"{ROWS}x{count}x") for left, _ in products)


def test_norms_read_float32_and_convert_nothing_in_the_loop(search):
    _, lowered, _ = search
    loop = lowered[lowered.index("stablehlo.while") :]
    assert not re.findall(rf"convert .*: \(tensor<{WIDTH}xbf16>\)", loop)


def test_no_step_sorts_the_vocabulary(search):
    _, _, program = search
    assert not re.findall(rf"\[\S*{VOCABULARY}\]\S* sort\(", program)
