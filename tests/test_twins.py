"""The two models side by side: the same classes, parameters and methods in the same order."""

import ast
import inspect

import pytest
import torch

import torch_reference
from jax_transformer import convert
from jax_transformer.convert.table import flatten
from jax_transformer.model import layers, self_over_memory
from tests.models import random_params, small_config
from tests.tiers import MODELS

PAIRS = {
    "layers": (layers, torch_reference.layers),
    "self_over_memory": (self_over_memory, torch_reference.self_over_memory),
}
# All that differs: a class that torch.nn has, and decoding with a cache, which only JAX has.
EXCEPTIONS = {
    "Dropout": torch.nn.Dropout,
    "MultiHeadAttention.attend_to_cache": "cache",
    "DecoderLayer.init_cache": "cache",
    "DecoderLayer.step": "cache",
}
CACHE = [name for name, kind in EXCEPTIONS.items() if kind == "cache"]
COUNTERPARTS = {"__call__": "forward", "setup": "__init__"}  # the words of Flax and of torch


def classes(module):
    """Return the methods of each class of modules, both in the order of the source."""
    tree = ast.parse(inspect.getsource(module))
    return {
        node.name: [
            COUNTERPARTS.get(member.name, member.name)
            for member in node.body
            if isinstance(member, ast.FunctionDef)
        ]
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not issubclass(getattr(module, node.name), tuple)
    }


def compared(module):
    """Return `classes` without the exceptions, and without constructors."""
    cache_methods = {name.split(".")[1] for name in CACHE}
    return {
        name: [method for method in methods if method not in cache_methods | {"__init__"}]
        for name, methods in classes(module).items()
        if name not in EXCEPTIONS
    }


@pytest.mark.parametrize(("ours", "theirs"), PAIRS.values(), ids=PAIRS)
def test_classes_and_methods_are_the_same_in_the_same_order(ours, theirs):
    assert list(compared(ours).items()) == list(compared(theirs).items())


def test_every_exception_is_one():
    assert len(EXCEPTIONS) <= 4
    ours, theirs = classes(layers), classes(torch_reference.layers)
    assert "Dropout" in ours
    assert "Dropout" not in theirs
    for name in CACHE:
        owner, method = name.split(".")
        assert method in ours[owner]
        assert method not in theirs[owner]


@pytest.mark.parametrize("preset", MODELS)
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
