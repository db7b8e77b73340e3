"""The training step, compiled for NVIDIA GPUs without one."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jax_transformer.errors import InputError
from jax_transformer.runtime import topologies
from jax_transformer.runtime.sharding import make_mesh
from jax_transformer.runtime.topologies import (
    DEVICES,
    GPUS,
    OutOfMemory,
    compile_for_topology,
    data_sheet,
    topology_devices,
)
from jax_transformer.text.batches import Batch
from jax_transformer.training.config import TrainingConfig
from jax_transformer.training.step import sharded_train_step, state_shapes
from tests import compiled
from tests.models import one_layer

pytestmark = pytest.mark.exhaustive


ATTENTIONS = 3  # of an encoder layer and a decoder layer
CONFIG = one_layer("vaswani2017", vocab_size=256, d_model=64, num_heads=1, d_ff=128, dropout=0.0)
SETTINGS = TrainingConfig(compute_dtype="bfloat16")


@pytest.mark.parametrize(
    ("plugins", "cuda"), [("absent", "absent.xla_cuda13"), ("json", "json.xla_cuda13")]
)
def test_without_the_plugin_a_line_names_it(monkeypatch, plugins, cuda):
    monkeypatch.setattr(topologies, "PLUGINS", plugins)
    monkeypatch.setattr(topologies, "CUDA", cuda)
    with pytest.raises(InputError, match=r'H100:8.* pip install "jax-transformer\[cuda\]"'):
        topology_devices("H100:8")


def test_a_training_step_for_two_gpus_has_cudnns_attention_and_asynchronous_reductions():
    pytest.importorskip(topologies.CUDA)
    mesh = make_mesh("data=2", topology_devices("H100:2"))
    ids = jax.ShapeDtypeStruct((16, 32), jnp.int32)
    lowered = sharded_train_step(mesh, CONFIG, SETTINGS).lower(
        state_shapes(CONFIG, SETTINGS), Batch(ids, ids, ids)
    )
    program = compile_for_topology(lowered, "H100:2")
    text = program.as_text()
    kernels = re.findall(r'custom_call_target="__cudnn\$fmha(\w+)"', text)
    assert sum(kernel.endswith("Backward") for kernel in kernels) == ATTENTIONS
    assert len(kernels) == 2 * ATTENTIONS
    reductions = [one for one in compiled.collectives(*compiled.parse(text)) if one.num_bytes > 64]
    assert {one.kind for one in reductions} == {"all-reduce"}
    assert all(one.asynchronous for one in reductions)
    assert program.memory_analysis().temp_size_in_bytes > 0
    found = compiled.report(program)
    assert found.total_cycles > 0
    assert found.unestimated == {"cudnn": 2 * ATTENTIONS}


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_has_a_data_sheet_and_compiles(name):
    assert data_sheet(f"{name}:1") == DEVICES[name]
    pytest.importorskip(topologies.CUDA)
    (device,) = topology_devices(f"{name}:1")
    x = jax.ShapeDtypeStruct(
        (8, 8), jnp.bfloat16, sharding=jax.sharding.SingleDeviceSharding(device)
    )
    program = compile_for_topology(jax.jit(jnp.matmul).lower(x, x), f"{name}:1")
    assert program.memory_analysis().peak_memory_in_bytes > 0


def test_a_program_that_a_gpu_cannot_hold_is_refused_because_xla_does_not(monkeypatch):
    lowered = jax.jit(jnp.sin).lower(1.0)  # any program, whose memory is:
    memory = SimpleNamespace(peak_memory_in_bytes=int(79e9))
    monkeypatch.setattr(jax.stages.Compiled, "memory_analysis", lambda _: memory)
    assert compile_for_topology(lowered, "A100:1")
    memory.peak_memory_in_bytes = int(81e9)
    with pytest.raises(OutOfMemory) as refused:
        compile_for_topology(lowered, "A100:1")
    assert (refused.value.needed, refused.value.available) == (81e9, 80e9)
