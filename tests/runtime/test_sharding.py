"""The mesh of a line of text, the rule table, and constraints that only a mesh makes."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jax_transformer import apply, init_params
from jax_transformer.model.tree import parameter_shardings, unsplit_warnings
from jax_transformer.runtime import sharding
from jax_transformer.training.config import TrainingConfig
from jax_transformer.training.step import state_shapes
from tests.models import random_tokens, small_config


def even_config(preset):
    sizes = {"d_model": 16, "num_heads": 4, "d_ff": 12}
    sizes |= {"num_encoder_layers": 1, "num_decoder_layers": 2}
    return small_config(preset, src_vocab_size=42, tgt_vocab_size=42, **sizes)


def abstract(*sizes):
    return AbstractMesh(sizes, sharding.AXES, axis_types=sharding.AXIS_TYPES)


def specs(tree, mesh, config):
    """Return the spec of each array by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(parameter_shardings(mesh, tree, config))
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.spec for path, leaf in leaves
    }


@functools.cache
def shapes_of(config):
    return jax.eval_shape(lambda: init_params(jax.random.key(0), config))


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ("data=8", (8, 1, 1)),
        ("data=4,fsdp=2", (4, 2, 1)),
        (" tensor = 2 , data = 2 , fsdp = 2 ", (2, 2, 2)),
        ("data=-1", (8, 1, 1)),
        ("fsdp=-1,tensor=4", (1, 2, 4)),
        ("fsdp=8,data=-1", (1, 8, 1)),
    ],
)
def test_a_line_names_the_sizes_of_the_axes(sizes, shape):
    assert sharding.parse_sizes(sizes, 8) == shape


def test_no_line_is_one_device():
    for sizes in (None, "", "data=-1", "tensor=1"):
        mesh = sharding.make_mesh(sizes, jax.devices()[:1])
        assert dict(mesh.shape) == {"data": 1, "fsdp": 1, "tensor": 1}
        assert mesh.axis_types == (AxisType.Auto,) * 3
    assert sharding.describe(mesh).startswith("mesh: data=1, fsdp=1, tensor=1 of 1 x ")


def test_every_matrix_is_spread_over_both_axes():
    mesh = abstract(1, 2, 2)
    for preset in ("vaswani2017", "shared_heads", "pre_norm_memory_norm", "marian"):
        config = even_config(preset)
        params = shapes_of(config)
        found = specs(params, mesh, config)
        assert list(unsplit_warnings(mesh, config)) == (
            ["tensor=2 does not divide 1: 15 parameters are not split over it"]
            if preset == "shared_heads"
            else []
        )
        for (name, spec), leaf in zip(found.items(), jax.tree.leaves(params), strict=True):
            same_for_all_heads = preset == "shared_heads" and re.search("query|key|value", name)
            expected = {"fsdp"} if same_for_all_heads else {"fsdp", "tensor"}
            if leaf.ndim == 2:
                assert set(spec) - {None} == expected, (preset, name)
            else:
                assert set(spec) <= {"tensor"}, (preset, name)


def test_columns_first_then_rows():
    config = even_config("vaswani2017")
    found = specs(shapes_of(config), abstract(1, 2, 2), config)
    layer = "decoder/layers_1"
    for projection in ("query", "key", "value"):
        assert found[f"{layer}/cross_attention/{projection}/kernel"] == PartitionSpec(
            "fsdp", "tensor"
        )
    assert found[f"{layer}/self_attention/output/kernel"] == PartitionSpec("tensor", "fsdp")
    assert found[f"{layer}/feed_forward/inner/kernel"] == PartitionSpec("fsdp", "tensor")
    assert found[f"{layer}/feed_forward/inner/bias"] == PartitionSpec("tensor")
    assert found[f"{layer}/feed_forward/outer/kernel"] == PartitionSpec("tensor", "fsdp")
    assert found[f"{layer}/feed_forward/outer/bias"] == PartitionSpec()
    assert found[f"{layer}/feed_forward_residual/norm/scale"] == PartitionSpec()


def test_the_whole_state_lies_as_its_parameters():
    config = even_config("torch_nn")
    settings = TrainingConfig(ema_decay=0.9, clip_norm=1.0, weight_decay=0.1, spike_factor=5.0)
    found = specs(state_shapes(config, settings), abstract(2, 2, 2), config)
    params = {name: spec for name, spec in found.items() if name.startswith("params/")}
    copies = 0
    for name, spec in found.items():
        own = re.search(r"(?:mu|nu|ema)/(.*)", name)
        if own:
            assert spec == params[f"params/{own[1]}"]
            copies += 1
        elif name not in params:
            assert spec == PartitionSpec()  # counters, the key, recent losses
    assert copies == 3 * len(params) > 0
    assert sum(spec != PartitionSpec() for spec in params.values()) > len(params) / 2


def test_what_does_not_divide_stays_whole_and_is_told():
    config = small_config("vaswani2017")  # 3 heads, d_ff 53, vocabulary 41, d_model 42
    params = shapes_of(config)
    found = specs(params, abstract(1, 3, 2), config)
    layer = "encoder/layers_0"
    assert found[f"{layer}/self_attention/query/kernel"] == PartitionSpec(
        "fsdp", None
    )  # 42 columns, 3 heads
    assert found[f"{layer}/feed_forward/outer/kernel"] == PartitionSpec(None, "fsdp")
    assert found["token_embedding/embedding"] == PartitionSpec(None, "fsdp")
    (line,) = unsplit_warnings(abstract(1, 3, 2), config)
    assert line == "tensor=2 does not divide 3, 41, 53: 48 parameters are not split over it"
    two = list(unsplit_warnings(abstract(1, 4, 2), config))
    assert [line.split(" does")[0] for line in two] == ["fsdp=4", "tensor=2"]
    assert list(unsplit_warnings(abstract(8, 3, 1), config)) == []


def constraints(mesh, rows=6):
    """Return the specs that the model asks for, traced under a mesh."""
    config = even_config("pre_norm")
    src, tgt = (np.resize(ids, (rows, ids.shape[1])) for ids in random_tokens(config))
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.make_jaxpr(lambda params: apply(params, config, src, tgt))(shapes_of(config))
    return [
        equation.params["sharding"].spec
        for equation in traced.eqns
        if equation.primitive.name == "sharding_constraint"
    ]


def test_streams_are_spread_after_embeddings_and_layers():
    table, stream = PartitionSpec("tensor", None), PartitionSpec(("data", "fsdp"), None, None)
    encoder, decoder = [table, stream, stream], [table, stream, stream, stream]
    assert constraints(abstract(1, 3, 2)) == encoder + decoder
    free = PartitionSpec(PartitionSpec.UNCONSTRAINED, None, None)
    assert constraints(abstract(2, 2, 2), rows=6)[1] == free  # 4 do not divide 6


def test_without_a_mesh_nothing_is_asked_for():
    foreign = AbstractMesh((2,), ("rows",), axis_types=(AxisType.Auto,))
    manual = AbstractMesh((2, 1, 1), sharding.AXES, axis_types=(AxisType.Manual,) * 3)
    for mesh in (AbstractMesh((), ()), foreign):
        assert constraints(mesh) == []
    x = jnp.ones((2, 3))
    assert sharding.shard_rows(x) is x
    with jax.sharding.use_abstract_mesh(manual):
        assert sharding.shard_rows(x) is x
