"""The training step as XLA compiles it for TPU slices: what must be in the program and what not."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

from jax_transformer.runtime.sharding import make_mesh
from jax_transformer.runtime.topologies import compile_for_topology, topology_devices
from jax_transformer.text.batches import Batch
from jax_transformer.training.budget import Workload, compile_step
from jax_transformer.training.config import TrainingConfig
from jax_transformer.training.step import sharded_evaluation_step, state_shapes
from tests.compiled import parse, report, scheduled, wide_arrays
from tests.models import one_layer

pytest.importorskip("libtpu")
pytestmark = pytest.mark.exhaustive  # it compiles for minutes

SLICE = "v5e:2x4"
VOCAB, WIDTH, HEADS, INNER, LENGTH, ROWS = 1152, 128, 4, 384, 64, 32
CONFIG = one_layer("vaswani2017", vocab_size=VOCAB, d_model=WIDTH, num_heads=HEADS, d_ff=INNER)
BFLOAT16 = TrainingConfig(compute_dtype="bfloat16")
MESHES = ("data=8", "data=2,fsdp=2,tensor=2")
UNREAD = 2  # what the guard found in the step before: a step writes it and does not read it


@pytest.fixture(scope="module", params=MESHES)
def mesh(request):
    return request.param


@pytest.fixture(scope="module")
def step(mesh):
    """The compiled step on one of the meshes."""
    return compile_step(CONFIG, Workload(ROWS, LENGTH, mesh, BFLOAT16), SLICE)


@pytest.fixture(scope="module")
def found(step):
    return report(step)


def test_the_whole_state_is_donated(found):
    state = jax.tree.leaves(state_shapes(CONFIG, BFLOAT16))
    assert found.donated == len(state) - UNREAD


def test_no_float32_array_has_the_vocabularys_width(step, mesh):
    width = VOCAB // 2 if "tensor" in mesh else VOCAB
    assert not wide_arrays(step.as_text(), width)


def test_a_device_draws_random_bits_for_its_own_rows(step, mesh):
    module, _ = parse(step.as_text())
    own = ROWS // (4 if "tensor" in mesh else 8)
    drawn = [
        one.shapes for rows in module.values() for one in rows if one.opcode == "rng-bit-generator"
    ]
    assert drawn
    for shapes in drawn:
        assert max(math.prod(shape) for _, shape in shapes) <= own * LENGTH * WIDTH


def test_parameters_are_gathered_in_bfloat16(found, mesh):
    gathered = {one.dtype for one in found.collectives if one.kind == "all-gather"}
    assert gathered == (set() if mesh == "data=8" else {"bf16"})


def test_gradients_are_exchanged_in_bfloat16(found):
    sums = {one.dtype: one for one in found.collectives if "reduce" in one.kind}
    assert sums["bf16"].num_bytes > 100_000
    assert "f32" not in sums or sums["f32"].num_bytes < 10_000  # norms, counts and the loss


def test_heads_are_not_copied_to_transpose_them(step):
    module, entry = parse(step.as_text())
    head_dim = WIDTH // HEADS
    copied = [
        (instruction.opcode, instruction.shapes)
        for name in scheduled(module, entry)
        for instruction in module[name]
        if instruction.opcode in ("copy", "transpose")
        and any(len(shape) == 4 and head_dim in shape for _, shape in instruction.shapes)
    ]
    assert copied == []


# (kind, dtype, asynchronous): (count, bytes on a device)
COLLECTIVES = {
    "data=8": {("all-reduce", "bf16", False): (9, 1_085_956), ("all-reduce", "s32", False): (1, 4)},
    "data=2,fsdp=2,tensor=2": {
        ("all-gather", "bf16", False): (2, 163_840),
        ("all-gather", "bf16", True): (31, 966_656),
        ("all-reduce", "bf16", False): (15, 2_979_588),
        ("all-reduce", "f32", False): (5, 4_240),
        ("all-reduce", "s32", False): (1, 4),
        ("reduce-scatter", "bf16", False): (1, 491_520),
    },
}


def test_the_collectives_are_those_of_the_golden_list(found, mesh):
    counted = {
        (one.kind, one.dtype, one.asynchronous): (one.count, one.num_bytes)
        for one in found.collectives
    }
    print(counted)
    assert counted == COLLECTIVES[mesh]


VARIANTS = {
    "packed, rematerialised layers": {"batching": "packed", "remat": "layers"},
    "one loop over two layers": {"scan_layers": True},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_other_steps_compile_and_donate_their_state(name):
    config, fields = CONFIG, VARIANTS[name]
    if name == "one loop over two layers":
        config = dataclasses.replace(CONFIG, num_encoder_layers=2, num_decoder_layers=2)
    training_config = dataclasses.replace(BFLOAT16, **fields)
    step = compile_step(config, Workload(4, LENGTH, training=training_config), "v5e:1x1")
    state = jax.tree.leaves(state_shapes(config, training_config))
    assert report(step).donated == len(state) - UNREAD
    loops = sum(one.opcode == "while" for rows in parse(step.as_text())[0].values() for one in rows)
    assert loops == (4 if "loop" in name else 0)  # two stacks, forward and backward


def test_the_evaluation_step_compiles_and_changes_nothing():
    mesh = make_mesh("data=8", topology_devices(SLICE))
    ids = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)
    params = state_shapes(CONFIG, BFLOAT16).params
    step = sharded_evaluation_step(mesh, CONFIG, BFLOAT16)
    found = report(compile_for_topology(step.lower(params, Batch(ids, ids, ids))))
    assert found.donated == 0
    assert {one.kind for one in found.collectives} == {"all-reduce"}  # of sum and count
    assert sum(one.num_bytes for one in found.collectives) == 8
