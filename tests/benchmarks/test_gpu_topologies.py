"""The training step, compiled for NVIDIA GPUs without one."""

import re

import jax
import jax.numpy as jnp
import pytest

from benchmarks import compiled, gpu_topologies
from benchmarks.gpu_topologies import gpu_devices
from jax_transformer import TransformerConfig
from jax_transformer.errors import InputError
from jax_transformer.runtime.sharding import make_mesh
from jax_transformer.runtime.topologies import compile_for_topology
from jax_transformer.text.batches import Batch
from jax_transformer.training.config import TrainingConfig
from jax_transformer.training.step import sharded_train_step, state_shapes

pytestmark = pytest.mark.exhaustive


ATTENTIONS = 3  # of an encoder layer and a decoder layer
CONFIG = TransformerConfig.preset(
    "vaswani2017",
    src_vocab_size=256,
    tgt_vocab_size=256,
    d_model=64,
    num_heads=1,
    d_ff=128,
    num_encoder_layers=1,
    num_decoder_layers=1,
    dropout=0.0,
)
SETTINGS = TrainingConfig(compute_dtype="bfloat16")


@pytest.mark.parametrize("name", ["H100", "H100:", "H100:0", "H100:16", "B200:8", "v5e:2x4"])
def test_an_unknown_gpu_or_number_is_refused(name):
    with pytest.raises(InputError, match=r"topology='.*' must be one of H100 and a number from 1"):
        gpu_devices(name)


@pytest.mark.parametrize(
    ("plugins", "cuda"), [("absent", "absent.xla_cuda13"), ("json", "json.xla_cuda13")]
)
def test_without_the_plugin_a_line_names_it(monkeypatch, plugins, cuda):
    monkeypatch.setattr(gpu_topologies, "PLUGINS", plugins)
    monkeypatch.setattr(gpu_topologies, "CUDA", cuda)
    with pytest.raises(InputError, match=r'H100:8.* pip install "jax-transformer\[cuda\]"'):
        gpu_devices("H100:8")


def test_a_training_step_for_two_gpus_has_cudnns_attention_and_asynchronous_reductions():
    pytest.importorskip(gpu_topologies.CUDA)
    mesh = make_mesh("data=2", gpu_devices("H100:2"))
    ids = jax.ShapeDtypeStruct((16, 32), jnp.int32)
    lowered = sharded_train_step(mesh, CONFIG, SETTINGS).lower(
        state_shapes(CONFIG, SETTINGS), Batch(ids, ids, ids)
    )
    program = compile_for_topology(lowered)
    text = program.as_text()
    kernels = re.findall(r'custom_call_target="__cudnn\$fmha(\w+)"', text)
    assert sum(kernel.endswith("Backward") for kernel in kernels) == ATTENTIONS
    assert len(kernels) == 2 * ATTENTIONS
    reductions = [one for one in compiled.collectives(*compiled.parse(text)) if one.num_bytes > 64]
    assert {one.kind for one in reductions} == {"all-reduce"}
    assert all(one.asynchronous for one in reductions)
    assert program.memory_analysis().temp_size_in_bytes > 0
