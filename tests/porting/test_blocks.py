"""Attentions and the feed-forward network of a layer, however its products are named."""

import pytest

from jax_transformer.errors import InputError
from jax_transformer.porting.blocks import find_groups
from jax_transformer.porting.names import find_units

WIDTH, INNER = 16, 40
SQUARE, UP, DOWN = (WIDTH, WIDTH), (INNER, WIDTH), (WIDTH, INNER)
ATTENTION = dict.fromkeys("qkvo", SQUARE)


def named(pattern, shapes):
    return {pattern.format(name): shape for name, shape in shapes.items()}


def groups(shapes):
    """Return the names of each group's products by role, the feed-forward network last."""
    found = find_groups(find_units(shapes, WIDTH).products, WIDTH)
    found = sorted(found, key=lambda group: (not group.is_attention, group.units[0].matrix))
    return [
        {role: unit.matrix for role, unit in zip(group.roles, group.units, strict=True)}
        for group in found
    ]


def separate(pattern):
    roles = zip(("query", "key", "value", "output"), "qkvo", strict=True)
    return {role: pattern.format(letter) for role, letter in roles}


CASES = {
    "modules": (
        named("self.{}.weight", ATTENTION)
        | named("cross.{}.weight", ATTENTION)
        | {"ff.0.weight": UP, "ff.2.weight": DOWN},
        [
            separate("cross.{}.weight"),
            separate("self.{}.weight"),
            {"inner": "ff.0.weight", "outer": "ff.2.weight"},
        ],
    ),
    "one module": (
        named("self_{}.weight", ATTENTION)
        | named("cross_{}.weight", ATTENTION)
        | {"fc1.weight": UP, "fc2.weight": DOWN},
        [
            separate("cross_{}.weight"),
            separate("self_{}.weight"),
            {"inner": "fc1.weight", "outer": "fc2.weight"},
        ],
    ),
    "numbers": (
        named("w{}1", ATTENTION) | named("w{}2", ATTENTION) | {"f1": UP, "f2": DOWN},
        [separate("w{}1"), separate("w{}2"), {"inner": "f1", "outer": "f2"}],
    ),
    "squares without names": (
        {f"l{index}.weight": SQUARE for index in range(6)},
        [
            {
                "query": "l0.weight",
                "key": "l1.weight",
                "value": "l2.weight",
                "output": "l3.weight",
            },
            {"inner": "l4.weight", "outer": "l5.weight"},
        ],
    ),
    "lists of projections": (
        {f"mix.{k}.weight": (3 * WIDTH, WIDTH) for k in range(2)}
        | {f"back.{k}.weight": SQUARE for k in range(2)}
        | {"up.weight": UP, "down.weight": DOWN},
        [{"query+key+value": f"mix.{k}.weight", "output": f"back.{k}.weight"} for k in range(2)]
        + [{"inner": "up.weight", "outer": "down.weight"}],
    ),
    "wide attention, gate and inner in one": (
        {"a.q": (24, WIDTH), "a.kv": (48, WIDTH), "a.out": (WIDTH, 24)}
        | {"f.0": (2 * INNER, WIDTH), "f.3": DOWN},
        [
            {"query": "a.q", "key+value": "a.kv", "output": "a.out"},
            {"gate+inner": "f.0", "outer": "f.3"},
        ],
    ),
    "gated": (
        named("a.{}", ATTENTION) | {"wi_0": UP, "wi_1": UP, "wo": DOWN},
        [separate("a.{}"), {"gate": "wi_0", "inner": "wi_1", "outer": "wo"}],
    ),
    "heads as an axis": (
        dict.fromkeys(("a.q", "a.k", "a.v"), (WIDTH, 4, 4))
        | {"a.o": (4, 4, WIDTH)}
        | {"f.0": UP, "f.1": DOWN},
        [separate("a.{}"), {"inner": "f.0", "outer": "f.1"}],
    ),
    "shared heads": (
        dict.fromkeys(("a.q", "a.k", "a.v"), (4, 4)) | {"a.o": SQUARE, "f.0": UP, "f.1": DOWN},
        [separate("a.{}"), {"inner": "f.0", "outer": "f.1"}],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_products_are_grouped(name):
    shapes, expected = CASES[name]
    assert groups(shapes) == expected


@pytest.mark.parametrize("extra", [{"gate.weight": (WIDTH, 7)}, {"x.weight": SQUARE}])
def test_a_product_without_a_group_is_named(extra):
    shapes, _ = CASES["modules"]
    with pytest.raises(InputError, match=next(iter(extra)).replace(".", r"\.")):
        groups(shapes | extra)
