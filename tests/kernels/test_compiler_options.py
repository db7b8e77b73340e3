"""The options of a training step's compilation, and what libtpu makes of them."""

import jax
import jax.numpy as jnp
import pytest

from jax_transformer.kernels.compiler_options import REDUCED_TOGETHER, TPU_OPTIONS, compiler_options
from jax_transformer.runtime.sharding import make_mesh
from jax_transformer.runtime.topologies import compile_for_topology, topology_devices
from jax_transformer.text.batches import Batch
from jax_transformer.training.config import TrainingConfig
from jax_transformer.training.step import sharded_train_step, state_shapes
from tests import compiled
from tests.models import one_layer

WIDTH = 256  # the kernels of attention, in bfloat16, are the smallest that are reduced alone
CONFIG = one_layer(
    "vaswani2017", vocab_size=512, d_model=WIDTH, num_heads=2, d_ff=2 * WIDTH, dropout=0.0
)
SETTINGS = TrainingConfig(compute_dtype="bfloat16")


@pytest.fixture(scope="module")
def chips():
    pytest.importorskip("libtpu")
    return topology_devices("v5e:2x4")


def test_a_cpu_is_given_no_options():
    assert compiler_options(make_mesh(None, jax.devices())) == {}


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        (None, {}),  # a single chip
        ("data=8", TPU_OPTIONS),
        ("fsdp=8", TPU_OPTIONS),
        ("data=4,fsdp=2", {}),
        ("tensor=8", {}),
    ],
)
def test_options_are_for_reductions_among_all_chips(chips, sizes, options):
    assert compiler_options(make_mesh(sizes, chips)) == options


@pytest.mark.exhaustive
def test_gradients_are_reduced_while_the_backward_pass_runs(chips):
    mesh = make_mesh("data=8", chips)
    ids = jax.ShapeDtypeStruct((64, 32), jnp.int32)
    lowered = sharded_train_step(mesh, CONFIG, SETTINGS).lower(
        state_shapes(CONFIG, SETTINGS), Batch(ids, ids, ids)
    )
    program = compile_for_topology(lowered)
    module, entry = compiled.parse(program.as_text())
    found = {True: 0, False: 0}
    for one in compiled.collectives(module, entry):
        if one.kind == "all-reduce" and one.num_bytes >= REDUCED_TOGETHER:
            found[one.asynchronous] += one.num_bytes
    whole = sum(2 * leaf.size for leaf in jax.tree.leaves(state_shapes(CONFIG, SETTINGS).params))
    assert sum(found.values()) >= 0.99 * whole  # each gradient once, in bfloat16
    assert found[True] > whole / 3

    # Between the start and the end of each stand products, most of them of other gradients.
    names = [one.name for one in module[entry]]
    starts = [name for name in names if name.startswith("async-collective-start")]
    assert len(starts) >= 8
    for start in starts:
        end = start.replace("start", "done")
        between = module[entry][names.index(start) + 1 : names.index(end)]
        assert sum(compiled.kind(module, one) == "products" for one in between) >= 1, start
