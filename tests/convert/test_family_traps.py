"""Traps on the way to each family's numbers: with one set, the comparison must go red.

Each is a mistake that changes no shape and raises nothing.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import pytest
import torch

from jax_transformer import apply
from jax_transformer.convert.families import FAMILIES
from jax_transformer.convert.families.family import config_from_json, config_to_json
from jax_transformer.convert.huggingface import from_huggingface
from jax_transformer.convert.table import flatten, nest
from jax_transformer.errors import InputError
from jax_transformer.model import functional
from jax_transformer.model.masks import source_mask
from jax_transformer.model.transformer import Transformer
from jax_transformer.model.tree import parameter_shapes
from tests.convert.families.case import (
    change_values,
    foreign_model,
    foreign_results,
    ragged_tokens,
)
from tests.parity.ladder import bound, error


class Trap(NamedTuple):
    """A mistake: it returns a wrong config and wrong parameters, given the right ones."""

    family: str
    shape: str
    mistake: Callable[[Any, Any], tuple[Any, Any]] = lambda config, params: (config, params)
    patch: tuple[Any, str, Callable[..., Any]] | None = None  # of the library: module, name
    seen: float = 1e-3  # the error that it must exceed


Bart = functools.partial(Trap, "bart", "other_ids")
M2m = functools.partial(Trap, "m2m_100", "other_ids")
Marian = functools.partial(Trap, "marian", "three_heads")


def fields(**changes):
    """Return the mistake of other fields; parameters that then have no place are left out."""

    def mistake(config, params):
        wrong = dataclasses.replace(config, **changes)
        kept = parameter_shapes(wrong)
        return wrong, nest({path: leaf for path, leaf in flatten(params).items() if path in kept})

    return mistake


def leaves(change):
    """Return the mistake of a function (path, leaf, leaf of a path) of each parameter."""

    def mistake(config, params):
        flat = flatten(params)
        return config, nest({path: change(path, leaf, flat) for path, leaf in flat.items()})

    return mistake


def swapped(first, second):
    """Return the mistake of two names for each other, in every path."""
    names = {first: second, second: first}
    return leaves(
        lambda path, leaf, flat: flat[
            re.sub(f"{first}|{second}", lambda name: names[name[0]], path)
        ]
    )


def untransposed(projection):
    return leaves(lambda path, leaf, flat: leaf.T if f"{projection}/kernel" in path else leaf)


def without_offset(config, params):
    changed = dataclasses.replace(config, position_offset=0)
    rows = leaves(lambda path, leaf, flat: leaf[:-2] if "_positions" in path else leaf)
    return rows(changed, params)


def scale_of_bart(config, params, *, name):
    """Read a config.json without the key as BART's class does."""
    family = FAMILIES[name]
    values = config_to_json(family, config)
    del values["scale_embedding"]
    assert config_from_json(family, values) == config
    defaults = {**family.defaults, "scale_embedding": False}
    return config_from_json(dataclasses.replace(family, defaults=defaults), values), params


def encode_normed_tokens(self, src, src_mask=None, *, src_positions=None):
    x = self.source_embedding_norm(self.embed(src, "source"))
    return self.encoder(self.add_positions(x, "source"), source_mask(src, self.config))


def with_halves(length, d_model, kind, offset=0, rounding="none"):
    return sinusoidal_positions(length + offset, d_model, "sinusoidal_halves")[offset:]


def flipped(distance, *others):
    return relative_position_buckets(-distance, *others)


def both_directions(distance, buckets, longest, bidirectional):
    return relative_position_buckets(distance, buckets, longest, True)


sinusoidal_positions = functional.sinusoidal_positions
relative_position_buckets = functional.relative_position_buckets
SCALED = fields(output_scale="inverse_sqrt_d_model")
UNSCALED = fields(output_scale="none")
TRAPS = {
    "the offset of positions forgotten": Bart(without_offset),
    "the norm of embeddings forgotten": Bart(fields(embedding_norm=False)),
    "the norm of embeddings before positions": Bart(
        patch=(Transformer, "encode", encode_normed_tokens)
    ),
    "post-norm for pre-norm": Trap("mbart", "other_ids", fields(norm_placement="post")),
    "the final norm forgotten": Trap("blenderbot", "other_ids", fields(final_norm=False)),
    "M2M100 with the sinusoids of Marian": M2m(
        patch=(functional, "sinusoidal_positions", with_halves)
    ),
    "the query not transposed": Bart(untransposed("query")),
    "an absent scale as in BART": M2m(functools.partial(scale_of_bart, name="m2m_100")),
    "Marian with the paper's sinusoids": Marian(fields(positions="sinusoidal")),
    "Marian with GELU": Marian(fields(activation="gelu")),
    "Marian without the output's bias": Marian(
        leaves(lambda path, leaf, flat: 0 * leaf if path == "output_projection/bias" else leaf)
    ),
    "query and key swapped": Marian(swapped("query", "key")),
    "output scale forgotten": Trap("t5", "tied", UNSCALED),
    "output scale too much": Trap("t5", "v1_1", SCALED),
    "output scale of mT5": Trap("mt5", "own_output", SCALED),
    "scores divided": Trap("t5", "tied", fields(attention_scale="head_dim")),
    "mean subtracted": Trap("t5", "tied", fields(norm="layer_norm")),
    "epsilon of BART": Trap("t5", "v1_1", fields(norm_epsilon=1e-5)),
    "distance flipped": Trap(
        "t5", "tied", patch=(functional, "relative_position_buckets", flipped)
    ),
    "decoder in both directions": Trap(
        "t5", "tied", patch=(functional, "relative_position_buckets", both_directions)
    ),
    "one bias for all layers": Trap(
        "umt5",
        "tied",
        leaves(lambda path, leaf, flat: flat[re.sub(r"_\d+/relative", "_0/relative", path)]),
    ),
    "exact gelu": Trap("t5", "v1_1", fields(activation="gelu"), seen=1e-4),
    "gate and inner swapped": Trap("t5", "v1_1", swapped("gate", "inner")),
}
quick_apply = jax.jit(apply, static_argnames="config")


@functools.cache
def right(family, shape, table=1.0):
    """Return a model's config, parameters and tokens, and the logits of transformers."""
    model = foreign_model(family, shape, torch.float64)
    if table != 1:
        model.shared.weight.data *= table
    config, params = from_huggingface(model)
    src, tgt = ragged_tokens(config)
    return config, params, src, tgt, foreign_results(model, config, src, tgt)[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TRAPS)
def test_a_trap_is_seen(name, x64, monkeypatch):
    trap = TRAPS[name]
    # Where the epsilon of a norm counts, the squares of the embeddings are as small.
    table = 1e-3 if "epsilon" in name else 1.0
    config, params, src, tgt, logits = right(trap.family, trap.shape, table)
    measured = error(quick_apply(params, config, src, tgt), logits)
    run = quick_apply
    if trap.patch is not None:
        monkeypatch.setattr(*trap.patch)
        run = jax.jit(lambda *arguments: apply(*arguments), static_argnums=1)  # not traced yet
    wrong_config, wrong_params = trap.mistake(config, params)
    wrong = error(run(wrong_params, wrong_config, src, tgt), logits)
    print(f"\n{name}: {wrong:.1e} instead of {measured:.1e}")
    assert measured <= bound("logits", "float64")
    assert wrong > trap.seen


def test_trap_of_the_width_of_a_head(tmp_path):
    """Where the heads of T5 are together as wide as the model, the width could be left unread."""
    foreign_model("t5", "tied", d_model=40, d_kv=10, num_heads=4).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="relative_attention_bias"):
        from_huggingface(change_values(tmp_path, d_kv=8, num_heads=5))
    foreign_model("t5").save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"wrong shape.*SelfAttention"):
        from_huggingface(change_values(tmp_path, d_kv=14))  # 42 // 3
