"""Models to export: of every preset, with random numbers that choose tokens clearly."""

import re

import jax
import pytest

from jax_transformer import InputError, TransformerConfig
from tests.models import OTHERS as OF_ALL_TESTS
from tests.models import random_params, unchecked

OTHER_FUNCTION = re.compile(r"not written, because \d+ of 16 random sources")  # of a refusal
# No preset has them: heads that share a projection, no positions, offset positions after a norm.
OTHERS = {
    "shared_projection": {"head_projection": "shared", "qkv_bias": True},
    "no_positions": {"positions": "none", "norm_placement": "pre", "final_norm": True},
    "one_final_norm": {"decoder_final_norm": True, "gated_feed_forward": True},
    "tensor2tensor": {"positions": "sinusoidal_tensor2tensor", "position_offset": 3}
    | {"position_rounding": "bfloat16"},
    "pre_norm_decoder": {"decoder_norm_placement": "pre", "decoder_final_norm": True}
    | {"attention_scale": "d_model"},
    "narrow_heads": {"d_kv": 7, "norm_bias": False, "activation": "silu"},
    "scaled_queries": {"attention_scale": 7.0},
}
# The fields of language models of today, in texts that are longer than the windows.
BLOCKS = {name: OF_ALL_TESTS[name] for name in ("windows", "merged", "ssru")}


def with_preset(base, name, **fields):
    """A model of a preset with random numbers in every leaf, large enough to choose clearly.

    The presets of `OTHERS` and `BLOCKS` are the paper's with other fields.
    """
    if name in OTHERS | BLOCKS:
        name, fields = "vaswani2017", fields | (OTHERS | BLOCKS)[name]
    defaults, tokenizer = TransformerConfig.preset(name), base.tokenizer
    sizes = {"d_model": 24, "num_heads": 3, "d_ff": 32, "max_length": 40, "dropout": 0.0}
    sizes |= {"src_vocab_size": 30, "tgt_vocab_size": 30}
    sizes |= {"num_encoder_layers": 2, "num_decoder_layers": 3}
    sizes |= {key: getattr(tokenizer, key) for key in ("pad_id", "bos_id", "eos_id")}
    if defaults.num_kv_heads is not None:
        sizes["num_kv_heads"] = 1
    if defaults.d_kv is not None:
        sizes["d_kv"] = 6 if defaults.positions == "rotary" else 5
    if defaults.positions == "relative":
        sizes |= {"relative_attention_num_buckets": 10, "relative_attention_max_distance": 9}
    if defaults.sliding_window is not None:
        sizes |= {"sliding_window": 3, "sliding_window_pattern": 2}
    config = TransformerConfig.preset(name, **(sizes | fields))
    params = jax.tree.map(lambda leaf: 1.5 * leaf, random_params(config, seed=3))
    return base._replace(config=config, params=params)


def refusal(export, model, folder):
    """Return the one line of an export that is refused; it writes nothing."""
    with unchecked(), pytest.raises(InputError) as refused:
        export(model, folder / "out")
    assert not any(folder.iterdir())
    return str(refused.value)
