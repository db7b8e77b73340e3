"""A batch whose rows do not divide among the devices: padded, and the loss of one device.

Run as a module, this file prints what differs: a process of its own can have eight devices.
"""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import use_abstract_mesh

from jax_transformer.kernels.execution import Execution
from jax_transformer.runtime.sharding import make_mesh
from jax_transformer.text.batches import training_batches
from jax_transformer.text.plan import plan_epoch
from jax_transformer.training.config import TrainingConfig
from jax_transformer.training.mesh import fill_rows, sharded_batches
from jax_transformer.training.objective import batch_loss
from tests.models import random_params, small_config
from tests.text.texts import corpus_of

ROWS, DEVICES, LENGTH = 60, 8, 9


def compare(batching, sizes, parts):
    """Return by how much loss and gradient on eight devices differ from those on one.

    The loss on eight is computed in parts.
    """
    config = small_config("pre_norm", num_encoder_layers=1, num_decoder_layers=1)
    random = np.random.default_rng(0)
    sides = [
        tuple(random.integers(3, 37, random.integers(5, LENGTH + 1)) for _ in range(ROWS))
        for _ in range(2)
    ]
    corpus = corpus_of(*sides, src_vocab_size=37, tgt_vocab_size=37)
    settings = TrainingConfig(
        batching=batching, bucket_count=1, pack_length=LENGTH, max_tokens=ROWS * LENGTH
    )
    plan = plan_epoch(corpus, settings, epoch=0)[:1]
    (whole,) = training_batches(corpus, plan)
    mesh = make_mesh(sizes)
    (spread,) = sharded_batches(mesh, corpus, fill_rows(plan, mesh, num_microbatches=1))
    assert len(spread.src.sharding.device_set) == DEVICES

    def run(batch, execution):
        def mean_loss(params, batch):
            total, count = batch_loss(params, batch, config, 0.1, execution=execution)
            return total / count

        return jax.jit(jax.value_and_grad(mean_loss))(random_params(config), batch)

    one = run(whole, Execution())
    with use_abstract_mesh(mesh.abstract_mesh):
        many = run(spread, Execution(loss_parts=parts))
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(one[1]))
    leaves = zip(*(jax.tree.leaves(gradients) for _, gradients in (one, many)), strict=True)
    return {
        "rows": [len(whole.src), len(spread.src)],
        "loss": abs(float(many[0] / one[0]) - 1),
        "gradient": float(max(np.abs(a - np.asarray(b)).max() for a, b in leaves) / largest),
    }


@pytest.mark.exhaustive
def test_sixty_rows_on_eight_devices_are_sixty_rows_on_one(request):
    devices = f"--xla_force_host_platform_device_count={DEVICES}"
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.test_partial_batch"],
        cwd=request.config.rootpath,
        env=os.environ
        | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {devices}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    for figures in json.loads(done.stdout).values():
        assert figures["rows"] == [60, 64]
        assert figures["loss"] <= 1e-6
        assert figures["gradient"] <= 1e-6


if __name__ == "__main__":
    found = {}
    for batching in ("buckets", "packed"):
        for sizes, parts in ((f"data={DEVICES}", 1), (f"data={DEVICES}", 4), ("data=2,fsdp=4", 4)):
            found[f"{batching} {sizes} {parts}"] = compare(batching, sizes, parts)
    print(json.dumps(found))
