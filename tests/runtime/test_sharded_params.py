"""Parameters whose parts lie on several devices: equal results, or one line."""

import json
import types

import pytest

from jax_transformer import InputError
from jax_transformer.storage.weights.arrays import as_numpy
from tests.programs import run_python

ON_FOUR_DEVICES = """
import json, sys
from pathlib import Path
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax_transformer import apply, generate, init_params, score
from jax_transformer.convert import to_torch
from jax_transformer.model.tree import parameter_shardings
from jax_transformer.runtime.sharding import make_mesh
from jax_transformer.translation.model_folder import TrainedModel, model_digest, save
from tests.runs.runs import make_settings

settings = make_settings()
config = settings.config
params = jax.device_get(init_params(jax.random.key(0), config))
def halved(mesh):
    rows = NamedSharding(mesh, PartitionSpec("rows"))
    put = lambda leaf: leaf if leaf.shape[0] % 2 else jax.device_put(leaf, rows)
    return jax.tree.map(put, params)

split = jax.device_put(params, parameter_shardings(make_mesh("tensor=2,fsdp=2"), params, config))
mine = halved(jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,)))
alike = (params, split, mine)
src = np.array([[6, 7, 2], [5, 6, 2]], np.int32)
logits = [np.asarray(apply(one, config, src, src)) for one in alike]
scores = [np.asarray(score(one, config, src, src)) for one in alike]
tokens = [np.asarray(generate(one, config, src, max_new_tokens=4).tokens) for one in alike]
tensors = [to_torch(one, config) for one in alike]
models = [TrainedModel(config, one, settings.tokenizer) for one in alike]
for model, folder in zip(models, ("whole", "split", "mine")):
    save(Path(sys.argv[1]) / folder, model)
explicit, refused = jax.make_mesh((2,), ("rows",)), []
copies = jax.device_put(params, NamedSharding(explicit, PartitionSpec()))
for on_explicit in (halved(explicit), copies):
    try:
        refused.append(str(generate(on_explicit, config, src, max_new_tokens=4)))
    except Exception as error:
        refused.append(f"{type(error).__name__}: {error}")
print(json.dumps({
    "refused": refused,
    "split": sum(not leaf.is_fully_replicated for leaf in jax.tree.leaves(split)),
    "logits": max(float(np.abs(logits[0] - other).max()) for other in logits),
    "scores": max(float(np.abs(scores[0] - other).max()) for other in scores),
    "tokens": all((tokens[0] == other).all() for other in tokens),
    "tensors": all(np.array_equal(tensors[0][k], other[k]) for other in tensors for k in other),
    "digest": len({model_digest(model) for model in models}) == 1,
}))
"""


@pytest.mark.exhaustive
def test_parameters_on_several_devices_give_the_same_results(tmp_path):
    found = json.loads(run_python("-c", ON_FOUR_DEVICES, tmp_path, devices=4).stdout)
    assert found["split"] > 0
    assert max(found["logits"], found["scores"]) < 1e-5
    assert found["tokens"]
    assert found["tensors"]
    assert found["digest"]
    assert len(found["refused"]) == 2
    for refusal in found["refused"]:
        assert refusal.startswith("InputError: params lie on Explicit mesh axes, as jax.make_mesh")
    for path in (tmp_path / "whole").iterdir():
        for folder in ("split", "mine"):
            assert path.read_bytes() == (tmp_path / folder / path.name).read_bytes(), path.name
    print(f"{found['split']} parameters split over 4 devices: {found}")


ON_EIGHT_DEVICES = """
import json
import jax, numpy as np
import jax.numpy as jnp
from jax_transformer import apply, generate
from jax_transformer.kernels.execution import SearchExecution
from jax_transformer.model.tree import parameter_shardings
from jax_transformer.runtime.sharding import make_mesh
from tests.models import random_params, random_tokens, small_config

jax.config.update("jax_enable_x64", True)
found = {}
two_each = "data=2,fsdp=2,tensor=2"
for name, sizes in (("windows", two_each), ("merged", "fsdp=2,tensor=4"), ("ssru", two_each)):
    config = small_config(name, num_encoder_layers=2, num_decoder_layers=2, d_ff=56)
    params, (src, tgt) = random_params(config, dtype=np.float64), random_tokens(config)
    src, tgt = (np.resize(ids, (8, ids.shape[1])) for ids in (src, tgt))

    def logits(params):
        return apply(params, config, src, tgt)

    def run(params):
        output, transpose = jax.vjp(logits, params)
        return output, transpose(jnp.cos(output))

    def search(params, platform):
        by = SearchExecution.for_platform(platform)
        return generate(params, config, src, max_new_tokens=9, beam_size=3, execution=by)

    expected = jax.jit(run)(params), search(params, "cpu")
    mesh = make_mesh(sizes)
    split = jax.device_put(params, parameter_shardings(mesh, params, config))
    query, key = (
        split["encoder"]["layers_0"]["self_attention"][part]["kernel"].sharding.spec
        for part in ("query", "key")
    )
    with jax.set_mesh(mesh):
        ours = jax.jit(run)(split), [search(split, platform) for platform in ("cpu", "tpu")]
    pairs = zip(jax.tree.leaves(ours[0]), jax.tree.leaves(expected[0]), strict=True)
    errors = [np.abs(a - b).max() / max(1, np.abs(b).max()) for a, b in pairs]
    tokens = [np.array_equal(by.tokens, expected[1].tokens) for by in ours[1]]
    found[name] = {"error": float(max(errors)), "tokens": all(tokens)}
    found[name] |= {"query": str(query), "key": str(key)}
print(json.dumps(found))
"""


@pytest.mark.exhaustive
def test_other_blocks_on_eight_devices_are_those_of_one():
    """The second encoder has a single head of keys, which stays whole."""
    found = json.loads(run_python("-c", ON_EIGHT_DEVICES, devices=8).stdout)
    print(found)
    whole = "('fsdp', 'tensor')"
    for name, key in (("windows", whole), ("merged", "('fsdp', None)"), ("ssru", whole)):
        assert found[name]["query"].endswith("('fsdp', 'tensor')")
        assert found[name]["key"].endswith(key)
        assert found[name]["error"] <= 1e-12
        assert found[name]["tokens"]


def test_parts_on_the_devices_of_other_processes_are_refused():
    spread = types.SimpleNamespace(
        is_fully_addressable=False, is_fully_replicated=False, shape=(4, 2)
    )
    with pytest.raises(InputError, match=r"of shape \(4, 2\) lies on the devices of several proc"):
        as_numpy(spread)
