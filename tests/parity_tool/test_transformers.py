"""Models of transformers beside this library's, with mistakes: names and cuts of both differ."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import pytest
import torch

from jax_transformer import Transformer, convert, parity
from tests.convert.families.case import foreign_model, ragged_tokens, widened

T5, BART = "encoder.block.0.layer", "model.encoder.layers.0"
BIAS = f"{T5}.0.SelfAttention.relative_attention_bias"
# The family, fields of the config that are wrong, the block of transformers, and what is said.
WRONG_FIELDS = [
    ("t5", {"norm_epsilon": 1e-5}, f"{T5}.0.layer_norm", "norm of epsilon 1e-05"),
    ("t5", {"norm": "layer_norm"}, f"{T5}.0.layer_norm", "a has a layer norm"),
    ("t5", {"attention_scale": "head_dim"}, f"{T5}.0.SelfAttention", "before"),
    ("t5", {"relative_attention_max_distance": 9}, BIAS, ""),
    ("t5", {"activation": "silu"}, f"{T5}.1.DenseReluDense.act", "b has relu"),
    ("bart", {"norm_epsilon": 1e-6}, "model.encoder.layernorm_embedding", "a has a layer norm"),
    ("bart", {"activation": "gelu_tanh"}, f"{BART}.activation_fn", "b has gelu by erf"),
    ("bart", {"attention_scale": "none"}, f"{BART}.self_attn", "scale 1, "),
    ("bart", {"embedding_scale": "none"}, "model.encoder.embed_tokens", "times"),
    ("bart", {"num_heads": 6}, f"{BART}.self_attn", "attention of 6 heads"),
]
# What is wrong with a kernel, its path in this library, and its block in transformers.
WRONG_KERNELS = """
negated encoder layers_1 self_attention key: encoder.block.1.layer.0.SelfAttention.k
negated decoder layers_0 cross_attention value: decoder.block.0.layer.1.EncDecAttention.v
negated decoder layers_1 feed_forward outer: decoder.block.1.layer.2.DenseReluDense.wo
transposed encoder layers_1 self_attention query: model.encoder.layers.1.self_attn.q_proj
transposed decoder layers_0 cross_attention key: model.decoder.layers.0.encoder_attn.k_proj
transposed decoder layers_1 self_attention output: model.decoder.layers.1.self_attn.out_proj
unbiased decoder layers_1 feed_forward inner: model.decoder.layers.1.fc1
unbiased encoder layers_0 self_attention value: model.encoder.layers.0.self_attn.v_proj
"""


@cache
def expected(model_type):
    """Return config, params, ids, and the record of a model of transformers in float64."""
    model = widened(foreign_model(model_type), model_type)
    config, params = convert.from_huggingface(model)
    src, tgt = ragged_tokens(config)
    inputs = {"input_ids": src, "attention_mask": src != config.pad_id, "decoder_input_ids": tgt}
    inputs = {name: torch.from_numpy(ids).long() for name, ids in inputs.items()}
    record = parity.record(model, lambda model: model(**inputs, use_cache=False).logits)
    return config, params, (src, tgt), record


def compared(model_type, change=lambda params: None, **fields):
    with jax.enable_x64(True):
        config, params, ids, record = expected(model_type)
        params = jax.tree.map(jnp.asarray, params)  # dicts of its own
        change(params)
        module = Transformer(dataclasses.replace(config, **fields))
        return parity.compare(
            parity.record(module, lambda m: m.apply({"params": params}, *ids)), record
        )


@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", ["t5", "bart"])
def test_the_right_model_agrees(model_type):
    comparison = compared(model_type)
    assert comparison.first_differing is None
    values = [pair for pair in comparison.blocks if pair.paired == "value"]
    assert len(values) > 0.8 * sum(pair.b is not None for pair in comparison.blocks)


@pytest.mark.sweep
@pytest.mark.parametrize(("model_type", "fields", "block", "words"), WRONG_FIELDS)
def test_a_wrong_field_is_found_at_its_block(model_type, fields, block, words):
    comparison = compared(model_type, **fields)
    assert comparison.first_differing.b == block
    assert words in "; ".join(comparison.explanations)


@pytest.mark.sweep
@pytest.mark.parametrize("line", WRONG_KERNELS.strip().splitlines())
def test_a_wrong_kernel_is_found_at_its_block(line):
    (fault, *path), block = line.partition(": ")[0].split(), line.partition(": ")[2]

    def change(params):
        for part in path:
            params = params[part]
        name = "bias" if fault == "unbiased" else "kernel"
        right = params[name]
        faults = {"negated": -right, "transposed": right.T, "unbiased": 0 * right}
        params[name] = faults[fault]

    comparison = compared("bart" if block.startswith("model") else "t5", change)
    assert comparison.first_differing.b == block
    words = {"negated": "times -1", "transposed": "transposed", "unbiased": "a bias"}
    assert words[fault] in "; ".join(comparison.explanations)
