"""Packed masks do not depend on how many devices an array is spread over; generated ones do.

Run as a module, this file prints what differs: a process of its own can have eight devices.
"""

import functools
import itertools
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from jax_transformer import apply
from jax_transformer.kernels.dropout import dropout
from jax_transformer.runtime.sharding import make_mesh, row_sharding
from tests.models import random_params, random_tokens, small_config
from tests.parity.ladder import error

RATE = 0.3
SHAPES = ((16, 24), (8, 5, 40))
DEVICES = (1, 2, 4, 8)


def shard(x, count, axis):
    """Return `x` split over the first devices along an axis; None has the whole on each."""
    spec = [None] * x.ndim
    if axis is not None:
        spec[axis] = "devices"
    mesh = Mesh(jax.devices()[:count], ("devices",))
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))


def drop(x, key):
    return dropout(x, RATE, key)


def values_and_slopes(drop, arrays, key):
    """Return what dropout leaves of each array, and the gradients, which show the mask again."""
    values, pull = jax.vjp(lambda *arrays: [drop(x, key) for x in arrays], *arrays)
    return values, pull([jnp.ones_like(x) for x in arrays])


def compare_masks(key):
    """Return how many cases were compared with one array on one device, and which differ."""
    random = np.random.default_rng(4)
    arrays = [random.normal(size=shape).astype("float32") for shape in SHAPES]
    cases = list(itertools.product(arrays, (0, -1)))
    plain = jax.jit(functools.partial(values_and_slopes, drop))([x for x, _ in cases], key)
    compared, unequal = 0, []
    for remat, count in itertools.product((False, True), DEVICES):
        sharded = [shard(x, count, axis) for x, axis in cases]
        function = jax.checkpoint(drop) if remat else drop
        spread = jax.jit(functools.partial(values_and_slopes, function))(sharded, key)
        for (x, axis), *results in zip(cases, *spread, *plain, strict=True):
            value, slope, plain_value, plain_slope = results
            assert len(value.sharding.device_set) == len(slope.sharding.device_set) == count
            compared += 1
            if not (np.array_equal(value, plain_value) and np.array_equal(slope, plain_slope)):
                unequal.append((x.shape, axis, remat, count))
    return {"compared": compared, "unequal": unequal}


def compare_models(key):
    """Return how far logits differ between meshes, and how far dropout moved them."""
    config = small_config("pre_norm", num_encoder_layers=1, num_decoder_layers=1, dropout=0.1)
    params = random_params(config)
    src, tgt = (np.resize(ids, (8, ids.shape[1])) for ids in random_tokens(config))
    run = jax.jit(apply, static_argnums=1)
    logits = []
    for count in (1, 8):
        weights = jax.tree.map(functools.partial(shard, count=count, axis=None), params)
        tokens = shard(src, count, 0), shard(tgt, count, 0)
        logits.append(run(weights, config, *tokens, dropout_key=key))
    without = run(params, config, src, tgt)
    return {"error": float(error(*logits)), "moved": float(error(logits[0], without))}


def generated_masks(key):
    """Return how many rows of a generated mask on a mesh differ, and the share of kept elements."""
    mesh = make_mesh("data=4,fsdp=2")
    x = jnp.ones((16, 1000))

    def drop(x, key):
        with use_abstract_mesh(mesh.abstract_mesh):
            return dropout(x, RATE, key, "generated")

    kept = np.asarray(jax.jit(drop, in_shardings=(row_sharding(mesh), None))(x, key)) > 0
    return {"rows": len(np.unique(kept, axis=0)), "kept": float(kept.mean())}


@pytest.mark.exhaustive
def test_masks_do_not_depend_on_the_mesh(request):
    devices = "--xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-m", "tests.model.test_dropout_meshes"],
        cwd=request.config.rootpath,
        env=os.environ
        | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {devices}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    report = json.loads(done.stdout)
    assert report["masks"] == {"compared": 32, "unequal": []}
    # Each device draws its own rows, and no two devices the same.
    assert report["generated"]["rows"] == 16
    assert abs(report["generated"]["kept"] - (1 - RATE)) < 0.02  # 5 standard deviations
    assert report["model"]["error"] <= 1e-6
    assert report["model"]["moved"] > 1e-2  # dropout was on


if __name__ == "__main__":
    key = jax.random.key(3)
    found = {"masks": compare_masks, "model": compare_models, "generated": generated_masks}
    print(json.dumps({name: compute(key) for name, compute in found.items()}))
