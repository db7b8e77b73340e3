"""Traps on the way to each family's numbers: with one set, the comparison must go red.

Each is a mistake that changes no shape and raises nothing. `test_marian.py` has those of Marian:
the scale of embeddings, the sinusoids, the activation, the bias of the output, query and key.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import pytest

from jax_transformer import apply
from jax_transformer.convert.families import FAMILIES
from jax_transformer.convert.families.family import config_from_json, config_to_json
from jax_transformer.convert.huggingface import from_huggingface
from jax_transformer.convert.table import flatten, nest
from jax_transformer.model import functional
from jax_transformer.model.masks import source_mask
from jax_transformer.model.transformer import Transformer
from tests.convert.families.case import case_of, foreign_model, foreign_results, ragged_tokens
from tests.parity.ladder import bound, error


class Trap(NamedTuple):
    """A mistake.

    Attributes:
        family: Model type of the family.
        mistake: Returns a wrong config and wrong parameters, given the right ones.
        patch: What replaces a function of the library: (module, name, function).
    """

    family: str
    mistake: Callable[[Any, Any], tuple[Any, Any]] = lambda config, params: (config, params)
    patch: tuple[Any, str, Callable[..., Any]] | None = None


def fields(**changes):
    """Return the mistake of other fields; parameters that then have no place are left out."""
    return lambda config, params: (dataclasses.replace(config, **changes), params)


def leaves(change):
    """Return the mistake of a function (path, leaf) of each parameter."""

    def mistake(config, params):
        return config, nest({path: change(path, leaf) for path, leaf in flatten(params).items()})

    return mistake


def without_offset(config, params):
    changed = dataclasses.replace(config, position_offset=0)
    return leaves(lambda path, leaf: leaf[:-2] if "_positions" in path else leaf)(changed, params)


def untransposed(projection):
    ends = f"{projection}/kernel"
    return leaves(lambda path, leaf: leaf.T if path.endswith(ends) else leaf)


def scale_of_bart(name):
    """Return the mistake of reading a config.json without the key as BART's class does."""

    def mistake(config, params):
        family = FAMILIES[name]
        values = config_to_json(family, config)
        del values["scale_embedding"]
        assert config_from_json(family, values) == config
        defaults = {**family.defaults, "scale_embedding": False}
        return config_from_json(dataclasses.replace(family, defaults=defaults), values), params

    return mistake


def encode_normed_tokens(self, src, src_mask=None, *, src_positions=None):
    x = self.source_embedding_norm(self.embed(src, "source"))
    return self.encoder(self.add_positions(x, "source"), source_mask(src, self.config))


def with_halves(length, d_model, kind, offset=0):
    return sinusoidal_positions(length + offset, d_model, "sinusoidal_halves")[offset:]


sinusoidal_positions = functional.sinusoidal_positions
TRAPS = {
    "the offset of positions forgotten": Trap("bart", without_offset),
    "the norm of embeddings forgotten": Trap("bart", fields(embedding_norm=False)),
    "the norm of embeddings before positions": Trap(
        "bart", patch=(Transformer, "encode", encode_normed_tokens)
    ),
    "post-norm for pre-norm": Trap("mbart", fields(norm_placement="post")),
    "pre-norm for post-norm": Trap("bart", fields(norm_placement="pre")),
    "the final norm forgotten": Trap("blenderbot", fields(final_norm=False)),
    "M2M100 with the sinusoids of Marian": Trap(
        "m2m_100", patch=(functional, "sinusoidal_positions", with_halves)
    ),
    "M2M100 from row 0": Trap("m2m_100", fields(position_offset=0)),
    "Pegasus with the sinusoids of M2M100": Trap(
        "pegasus", fields(positions="sinusoidal_tensor2tensor")
    ),
    **{
        f"the {projection} not transposed": Trap("bart", untransposed(projection))
        for projection in ("query", "key", "value", "output")
    },
    "an absent scale as in BART, PLBart": Trap("plbart", scale_of_bart("plbart")),
    "an absent scale as in BART, M2M100": Trap("m2m_100", scale_of_bart("m2m_100")),
}


quick_apply = jax.jit(apply, static_argnames="config")


@functools.cache
def right(family):
    """Return a model's config, parameters and tokens, and the logits of transformers."""
    model = foreign_model(family, [*case_of(family).shapes][-1])
    config, params = from_huggingface(model)
    src, tgt = ragged_tokens(config)
    return config, params, src, tgt, foreign_results(model, config, src, tgt)[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TRAPS)
def test_a_trap_is_seen(name, monkeypatch):
    trap = TRAPS[name]
    config, params, src, tgt, logits = right(trap.family)
    run = quick_apply
    if trap.patch is not None:
        run = jax.jit(lambda *arguments: apply(*arguments), static_argnums=1)  # not traced yet
    with jax.default_matmul_precision("highest"):
        measured = error(quick_apply(params, config, src, tgt), logits)
        if trap.patch is not None:
            monkeypatch.setattr(*trap.patch)
        wrong_config, wrong_params = trap.mistake(config, params)
        wrong = error(run(wrong_params, wrong_config, src, tgt), logits)
    print(f"\n{name}: {wrong:.1e} instead of {measured:.1e}")
    assert measured <= bound("logits", "float32")
    assert wrong > 100 * bound("logits", "float32")
