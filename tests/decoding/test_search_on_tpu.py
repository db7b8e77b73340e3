"""`generate` as XLA compiles it for one TPU chip: greedy and beam search, sampling, translate's."""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from jax_transformer import generate
from jax_transformer.decoding.greedy import BLOCK
from jax_transformer.kernels.attention_backend import execution_on
from jax_transformer.kernels.execution import SearchExecution
from jax_transformer.model.transformer import init_params
from jax_transformer.runtime.topologies import compile_for_topology, topology_devices
from tests.compiled import parse, report, scheduled
from tests.models import one_layer

pytestmark = pytest.mark.exhaustive

pytest.importorskip("libtpu")

ROWS, SOURCE, TARGET, VOCAB = 16, 40, 48, 1152
CONFIG = one_layer("vaswani2017", vocab_size=VOCAB, d_model=128, num_heads=2, d_ff=384)
SEARCHES = {
    "greedy": {},
    "beam": {"beam_size": 4, "num_hypotheses": 4, "length_penalty": 0.6},
    "sampling": {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    # The rules that folders of Hugging Face models ask `translate` for.
    "translate": {
        "beam_size": 4,
        "length_penalty": 1.0,
        "length_normalization": "power",
        "early_stopping": True,
        "forced_last_token": 2,
        "banned_tokens": (0,),
        "no_repeat_ngram_size": 3,
    },
}


class Search(NamedTuple):
    """A search for one chip, in bfloat16: its options, lowered text, and what XLA made of it."""

    options: dict
    lowered: str
    compiled: jax.stages.Compiled

    @property
    def count(self):
        """Number of hypotheses of a source."""
        return self.options.get("beam_size", 1)

    @property
    def lowered_loop(self):
        """The lowered text from the loop on."""
        return self.lowered[self.lowered.index("stablehlo.while") :]


@pytest.fixture(scope="module", params=SEARCHES)
def search(request):
    (device,) = topology_devices("v5e:1x1")
    execution = execution_on(device, "bfloat16", CONFIG, kind=SearchExecution)
    options = SEARCHES[request.param]

    def run(params, src, key):
        key = key if request.param == "sampling" else None
        return generate(
            params, CONFIG, src, max_new_tokens=TARGET, key=key, execution=execution, **options
        )

    def place(leaf, dtype):
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=SingleDeviceSharding(device))

    params = jax.eval_shape(lambda: init_params(jax.random.key(0), CONFIG))
    params = jax.tree.map(lambda leaf: place(leaf, jnp.bfloat16), params)
    src = place(jax.ShapeDtypeStruct((ROWS, SOURCE), jnp.int32), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    lowered = jax.jit(run).lower(params, src, place(key, key.dtype))
    return Search(options, lowered.as_text(), compile_for_topology(lowered))


def test_the_search_is_one_loop_of_estimated_steps(search):
    (loop,) = report(search.compiled).loops
    assert "while" in loop.path
    assert loop.cycles["products"] > 0
    assert loop.cycles["attention"] > 0


def test_a_step_writes_the_cache_in_place(search):
    module, entry = parse(search.compiled.as_text())
    size = ROWS * TARGET * CONFIG.d_model * 2  # bytes of the keys of a layer, of one beam
    outside = {one.name for one in module[entry]}
    views = ("parameter", "get-tuple-element", "tuple", "bitcast")
    written = [
        one
        for name in scheduled(module, entry)
        for one in module[name]
        if one.name not in outside and one.opcode not in views
        if one.num_bytes >= size and not any(VOCAB in shape for _, shape in one.shapes)
    ]
    assert len(written) == 2  # keys and values
    for one in written:
        called = re.search(r"calls=%([\w.\-]+)", one.line)
        inside = module[called[1]] if called else [one]
        assert inside[-1].opcode == "dynamic-update-slice"


def test_no_form_of_a_cpu_enters_the_loop(search):
    """Rows are not flattened, nor logits and kernels cut; a product serves all heads."""
    loop, width = search.lowered_loop, CONFIG.d_model
    products = re.findall(r"dot_general.*: \(tensor<(\S+)>, tensor<(\S+)>\) ->", loop)
    caches = [f"{ROWS}x{length}x{width}xbf16" for length in (TARGET * search.count, SOURCE)]
    assert [right for _, right in products if right.count("x") != 2] == [
        cache for cache in caches for _ in ("keys", "values")
    ]
    assert all(left.startswith(f"{ROWS}x{search.count}x") for left, _ in products)
    assert f"tensor<{ROWS}x{VOCAB // BLOCK}x{BLOCK}x" not in loop


def test_norms_read_float32_and_convert_nothing_in_the_loop(search):
    narrow = rf"convert .*: \(tensor<{CONFIG.d_model}xbf16>\)"
    assert not re.findall(narrow, search.lowered_loop)


def test_only_top_p_sorts_the_vocabulary(search):
    sorts = re.findall(rf"\[\S*{VOCAB}\]\S* sort\(", search.compiled.as_text())
    assert bool(sorts) == ("top_p" in search.options)
