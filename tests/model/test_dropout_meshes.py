"""Generated masks on a mesh: each device draws its own rows, and no two devices the same.

tests/runs/test_mesh.py has the packed masks, which are the same on every mesh. Run as a module,
this file prints what it finds: a process of its own can have eight devices.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import use_abstract_mesh

from jax_transformer.kernels.dropout import dropout
from jax_transformer.runtime.sharding import make_mesh, row_sharding
from tests.programs import run_python

RATE = 0.3


def generated_masks():
    """Return how many rows of a generated mask on a mesh differ, and the share of kept elements."""
    mesh = make_mesh("data=4,fsdp=2")
    x = jnp.ones((16, 1000))

    def drop(x, key):
        with use_abstract_mesh(mesh.abstract_mesh):
            return dropout(x, RATE, key, "generated")

    run = jax.jit(drop, in_shardings=(row_sharding(mesh), None))
    kept = np.asarray(run(x, jax.random.key(3))) > 0
    return {"rows": len(np.unique(kept, axis=0)), "kept": float(kept.mean())}


@pytest.mark.exhaustive
def test_each_device_draws_its_own_rows():
    report = json.loads(run_python("-m", "tests.model.test_dropout_meshes", devices=8).stdout)
    assert report["rows"] == 16
    assert abs(report["kept"] - (1 - RATE)) < 0.02  # 5 standard deviations


if __name__ == "__main__":
    print(json.dumps(generated_masks()))
