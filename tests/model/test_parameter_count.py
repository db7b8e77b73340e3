"""The count of parameters by arithmetic is that of the parameters themselves."""

import math
import random
import time
from typing import get_args, get_type_hints

import jax
import pytest

from jax_transformer import InputError, TransformerConfig, init_params
from jax_transformer.config import LARGEST
from jax_transformer.model.parameter_count import parameter_count
from jax_transformer.presets import PRESETS

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


def traced_count(config):
    shapes = jax.eval_shape(lambda: init_params(jax.random.key(0), config))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


@pytest.mark.parametrize("preset", PRESETS)
def test_the_count_of_every_preset_is_that_of_its_parameters(preset):
    config = TransformerConfig.preset(preset, **SMALL)
    assert parameter_count(config) == traced_count(config)


def random_configs(seed, count):
    """Yield configs whose choices are random; those that contradict themselves are left out."""
    choose, hints = random.Random(seed), get_type_hints(TransformerConfig)
    choices = {name: get_args(hint) for name, hint in hints.items()}
    words = {name: values for name, values in choices.items() if values and type(values[0]) is str}
    words |= {name: (True, False) for name, hint in hints.items() if hint is bool}
    words |= {"decoder_final_norm": (None, True, False), "d_kv": (None, 5), "position_offset": (0,)}
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


def test_the_count_of_any_config_is_that_of_its_parameters():
    for config in random_configs(0, 20):
        assert parameter_count(config) == traced_count(config), config


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
