"""The two models side by side: the same classes, parameters and methods in the same order."""

import ast
import inspect

import pytest

import torch_reference
from jax_transformer import convert
from jax_transformer.convert.table import flatten
from jax_transformer.model import layers, merged_attention, self_over_memory, ssru
from tests.models import random_params, small_config
from tests.tiers import MODELS, QUICK_MODELS, tiered

PAIRS = {
    "layers": (layers, torch_reference.layers),
    "merged_attention": (merged_attention, torch_reference.merged_attention),
    "self_over_memory": (self_over_memory, torch_reference.self_over_memory),
    "ssru": (ssru, torch_reference.ssru),
}
# All that differs: a class that torch.nn has, and the caches of layers that only JAX decodes with.
EXCEPTIONS = {
    "Dropout": ["__call__", "is_active", "_key"],
    "MergedAttentionLayer": ["init_cache"],
    "SelfOverMemoryLayer": ["init_cache", "_step"],
    "SSRULayer": ["init_cache", "write_step"],
}
COUNTERPARTS = {"__call__": "forward", "setup": "__init__"}  # the words of Flax and of torch


def methods(module):
    """Return the class and the name of each method of modules, in the order of the source."""
    return [
        (node.name, COUNTERPARTS.get(member.name, member.name))
        for node in ast.parse(inspect.getsource(module)).body
        if isinstance(node, ast.ClassDef) and not issubclass(getattr(module, node.name), tuple)
        for member in node.body
        if isinstance(member, ast.FunctionDef) and member.name not in ("__init__", "setup")
    ]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS.values(), ids=PAIRS)
def test_classes_and_methods_are_the_same_in_the_same_order(ours, theirs):
    exceptions = [
        (owner, COUNTERPARTS.get(name, name))
        for owner, names in EXCEPTIONS.items()
        for name in names
        if hasattr(ours, owner) and getattr(ours, owner).__module__ == ours.__name__
    ]
    assert [pair for pair in methods(ours) if pair not in exceptions] == methods(theirs)
    assert set(exceptions) <= set(methods(ours))


@pytest.mark.parametrize("preset", tiered(MODELS, QUICK_MODELS))
def test_a_parameter_has_the_same_name_in_both(preset):
    """Through the reference layout, whose rows only rename the leaves."""
    config = small_config(preset)
    theirs = list(torch_reference.Transformer(config).state_dict())
    ours = convert.to_torch(random_params(config), config)
    assert set(ours) == set(theirs)
    leaves = {"kernel": "weight", "scale": "weight", "embedding": "weight", "bias": "bias"}
    renamed = set()
    for path in flatten(random_params(config)):
        *parts, leaf = path.split("/")
        renamed.add(".".join([*parts, leaves[leaf]]).replace(".layers_", ".layers."))
    assert renamed == set(theirs)
