"""The declared tree has the parameters that the modules read, and no other."""

import math
import random
import time
from typing import get_args

import jax
import jax.numpy as jnp
import pytest

from jax_transformer import InputError, Transformer, TransformerConfig, init_params
from jax_transformer.config import LARGEST
from jax_transformer.config.declared import declarations
from jax_transformer.config.presets import PRESETS
from jax_transformer.convert.table import flatten
from jax_transformer.model.tree import (
    PARAMETERS,
    parameter_count,
    parameter_shapes,
    parameters_of,
)
from tests.tiers import DISTINCT_PRESETS, tiered

SMALL = {
    "src_vocab_size": 17,
    "tgt_vocab_size": 17,
    "d_model": 12,
    "num_heads": 3,
    "d_ff": 20,
    "num_encoder_layers": 1,
    "num_decoder_layers": 2,
    "max_length": 11,
    "pad_id": 0,
    "bos_id": 1,
    "eos_id": 2,
}


def traced_shapes(config):
    """Return the shapes of what the modules ask for while Flax traces a forward pass."""
    vectors = config.token_embeddings == "none"
    tokens = jnp.zeros((1, 1, config.d_model)) if vectors else jnp.zeros((1, 1), int)
    sound = config.source_features and jnp.zeros((1, 2, config.source_features))
    src = tokens if sound is None else sound
    call = ("__call__", src, tokens) if config.head == "none" else ("classify", src)
    tree = jax.eval_shape(
        lambda key: Transformer(config).init(key, *call[1:], method=call[0]), jax.random.key(0)
    )["params"]
    return {path: leaf.shape for path, leaf in flatten(tree).items()}


def check_declared(config):
    expected = traced_shapes(config)
    assert parameter_shapes(config) == expected, config
    drawn = jax.eval_shape(lambda: init_params(jax.random.key(0), config))
    assert {path: leaf.shape for path, leaf in flatten(drawn).items()} == expected, config
    assert parameter_count(config) == sum(map(math.prod, expected.values())), config


@pytest.mark.parametrize("preset", tiered(PRESETS, DISTINCT_PRESETS))
def test_the_parameters_of_every_preset_are_the_declared_ones(preset):
    heads = dict.fromkeys(TransformerConfig.preset_fields(preset).keys() & {"num_kv_heads"}, 1)
    check_declared(TransformerConfig.preset(preset, **SMALL | heads))


def random_configs(seed, count):
    """Yield configs whose choices are random; those that contradict themselves are left out."""
    choose, hints = random.Random(seed), declarations(TransformerConfig)
    choices = {name: get_args(hint) for name, hint in hints.items()}
    words = {name: values for name, values in choices.items() if values and type(values[0]) is str}
    words |= {name: (True, False) for name, hint in hints.items() if hint is bool}
    words |= {"decoder_final_norm": (None, True, False), "d_kv": (None, 5), "position_offset": (0,)}
    words |= {"source_features": (None, None, 5)}
    while count:
        fields = {name: choose.choice(values) for name, values in words.items()}
        if choose.random() < 0.5:
            fields |= {"position_offset": 2, "positions": "learned"}
        if choose.random() < 0.5:
            fields |= {"src_vocab_size": 23, "num_encoder_layers": 3}
        try:
            yield TransformerConfig.from_dict(SMALL | fields)
            count -= 1
        except InputError:
            continue


@pytest.mark.exhaustive
def test_the_parameters_of_any_config_are_the_declared_ones():
    for config in random_configs(0, 20):
        check_declared(config)


@pytest.mark.exhaustive
def test_every_parameter_is_of_the_configs_with_the_fields_that_it_needs():
    for needs in {
        str(parameter.needs): parameter.needs for parameter in PARAMETERS.values()
    }.values():
        first = {name: values[0] for name, values in needs.items()}
        if head := first.pop("head", None):
            config = TransformerConfig(**SMALL).with_head(head, labels=["no", "yes"])
        else:
            config = TransformerConfig(**SMALL | first)
        check_declared(config)
        having = {parameter.path for parameter in parameters_of(config)}
        assert having >= {path for path, one in PARAMETERS.items() if one.needs == needs}


def test_the_largest_config_is_counted_at_once():
    config = TransformerConfig(
        src_vocab_size=LARGEST,
        d_model=LARGEST,
        num_heads=1,
        d_ff=LARGEST,
        num_encoder_layers=10_000,
        num_decoder_layers=10_000,
        positions="none",
    )
    start = time.process_time()
    assert parameter_count(config) > 30_000 * LARGEST**2
    assert time.process_time() - start < 0.1


def test_a_scope_without_parameters_is_refused():
    with pytest.raises(InputError, match="scope='encoder/layers_7' holds no parameter"):
        parameter_shapes(TransformerConfig(**SMALL), "encoder/layers_7")
