"""Parameters whose parts lie on several devices: equal results, or one line."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from jax_transformer import InputError
from jax_transformer.storage.weights.arrays import as_numpy
from tests.compilation import QUICKLY

ROOT = Path(__file__).parents[2]

ON_FOUR_DEVICES = """
import json, sys
from pathlib import Path
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax_transformer import apply, generate, init_params, score
from jax_transformer.convert import to_torch
from jax_transformer.model.parameters import parameter_shardings
from jax_transformer.runtime.sharding import make_mesh
from jax_transformer.translation.model_folder import TrainedModel, model_digest, save
from tests.runs.runs import make_settings

settings = make_settings()
config = settings.config
params = jax.device_get(init_params(jax.random.key(0), config))
split = jax.device_put(params, parameter_shardings(make_mesh("tensor=2,fsdp=2"), params, config))
both = (params, split)
src = np.array([[6, 7, 2], [5, 6, 2]], np.int32)
logits = [np.asarray(apply(one, config, src, src)) for one in both]
scores = [np.asarray(score(one, config, src, src)) for one in both]
tokens = [np.asarray(generate(one, config, src, max_new_tokens=4).tokens) for one in both]
tensors = [to_torch(one, config) for one in both]
models = [TrainedModel(config, one, settings.tokenizer) for one in both]
for model, folder in zip(models, ("whole", "split")):
    save(Path(sys.argv[1]) / folder, model)
mesh, refused = jax.make_mesh((2,), ("rows",)), []  # Explicit
rows, copies = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("rows",), ()))
def halved(leaf):
    return leaf if leaf.shape[0] % 2 else jax.device_put(leaf, rows)

for explicit in (jax.tree.map(halved, params), jax.device_put(params, copies)):
    try:
        refused.append(str(generate(explicit, config, src, max_new_tokens=4)))
    except Exception as error:
        refused.append(f"{type(error).__name__}: {error}")
print(json.dumps({
    "refused": refused,
    "split": sum(not leaf.is_fully_replicated for leaf in jax.tree.leaves(split)),
    "logits": float(np.abs(logits[0] - logits[1]).max()),
    "scores": float(np.abs(scores[0] - scores[1]).max()),
    "tokens": bool((tokens[0] == tokens[1]).all()),
    "tensors": all(np.array_equal(tensors[0][name], tensors[1][name]) for name in tensors[0]),
    "digest": model_digest(models[0]) == model_digest(models[1]),
}))
"""


@pytest.mark.exhaustive
def test_parameters_on_several_devices_give_the_same_results(tmp_path):
    flags = f"--xla_force_host_platform_device_count=4 {QUICKLY}"
    done = subprocess.run(
        [sys.executable, "-c", ON_FOUR_DEVICES, tmp_path],
        capture_output=True,
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": flags},
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["split"] > 0
    assert max(found["logits"], found["scores"]) < 1e-5
    assert found["tokens"]
    assert found["tensors"]
    assert found["digest"]
    assert len(found["refused"]) == 2
    for refusal in found["refused"]:
        assert refusal.startswith("InputError: params lie on Explicit mesh axes, as jax.make_mesh")
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "split" / path.name).read_bytes(), path.name
    print(f"{found['split']} parameters split over 4 devices: {found}")


def test_parts_on_the_devices_of_other_processes_are_refused():
    spread = types.SimpleNamespace(
        is_fully_addressable=False, is_fully_replicated=False, shape=(4, 2)
    )
    with pytest.raises(InputError, match=r"of shape \(4, 2\) lies on the devices of several proc"):
        as_numpy(spread)
