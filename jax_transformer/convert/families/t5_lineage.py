"""T5, mT5 and UMT5: names of weights, and config.json of each family."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jax_transformer.convert.families.family import (
    ACTIVATIONS,
    ENCODER_DECODER,
    Family,
    flag,
    generation_without_forced_end,
    head_rows,
)
from jax_transformer.convert.table import Layout, Row, transpose
from jax_transformer.storage.weights.arrays import as_numpy

# Names of the one token table; the output has a copy of it where it is tied.
TABLES = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
HEAD = "lm_head.weight"

FIELDS: Mapping[str, str | tuple[str, ...]] = {
    "vocab_size": ("src_vocab_size", "tgt_vocab_size"),
    "d_model": "d_model",
    "num_heads": "num_heads",
    "d_kv": "d_kv",
    "d_ff": "d_ff",
    "num_layers": "num_encoder_layers",
    "num_decoder_layers": "num_decoder_layers",
    "relative_attention_num_buckets": "relative_attention_num_buckets",
    "relative_attention_max_distance": "relative_attention_max_distance",
    "layer_norm_epsilon": "norm_epsilon",
    "dropout_rate": ("dropout", "attention_dropout", "activation_dropout"),
    "n_positions": "max_length",
    "pad_token_id": "pad_id",
    "decoder_start_token_id": "bos_id",
    "eos_token_id": "eos_id",
}
WORDS: Mapping[str, Mapping[Any, Mapping[str, Any]]] = {
    "feed_forward_proj": {
        **{name: {**fields, "gated_feed_forward": False} for name, fields in ACTIVATIONS.items()},
        **{
            f"gated-{name}": {**fields, "gated_feed_forward": True}
            for name, fields in ACTIVATIONS.items()
            if name != "gelu"
        },
        # In spite of its name: the approximation by tanh.
        "gated-gelu": {"activation": "gelu_tanh", "gated_feed_forward": True},
    },
    "tie_word_embeddings": flag("output_projection", "tied", "linear"),
}
# What an absent key means in most classes of configurations.
DEFAULTS: Mapping[str, Any] = {
    "d_model": 512,
    "d_kv": 64,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
    "dropout_rate": 0.1,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
COMPUTED: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    # The models have no longest text. n_positions, which transformers does not read, is the
    # length of the texts that T5 was trained on.
    "n_positions": lambda values: 512,
    "num_decoder_layers": lambda values: values.get("num_layers"),
    "decoder_start_token_id": lambda values: values["pad_token_id"],
}


def layout(name: str) -> Layout:
    """Return the names and shapes of a family's weights; each config has a part of them."""
    attentions = [("self_attention", "SelfAttention"), ("cross_attention", "EncDecAttention")]
    rows = (
        *(Row(table, "token_embedding/embedding") for table in TABLES),
        Row(HEAD, "token_embedding/embedding", when=("output_projection", "tied")),
        Row(HEAD, "output_projection/kernel", transpose),
        *_stack("encoder", attentions[:1]),
        *_stack("decoder", attentions),
        *head_rows(),
    )
    # Old versions of T5 had this table and did not use it.
    unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    return Layout(name, rows, unused=(unused,))


def is_tied(tensors: Mapping[str, Any]) -> bool:
    """Return whether the output projection of these weights is the token table.

    The file decides: transformers 5 writes `tie_word_embeddings` true for every model of these
    families, and keeps an output matrix of its own where the file has one with other values.
    """
    table = next((tensors[name] for name in TABLES if name in tensors), None)
    if table is None or HEAD not in tensors:
        return True
    table, head = as_numpy(table), as_numpy(tensors[HEAD])
    same_place = table.ctypes.data == head.ctypes.data
    return table.shape == head.shape and (same_place or np.array_equal(table, head))


def _stack(stack: str, attentions: Sequence[tuple[str, str]]) -> list[Row]:
    """Return the rows of a stack, given our name and the foreign name of each attention."""
    foreign, path = f"{stack}.block.{{i}}.layer", f"{stack}/layers_{{i}}"
    bias = "layer.0.SelfAttention.relative_attention_bias.weight"
    rows = [
        Row(f"{stack}.block.0.{bias}", f"{stack}/relative_attention_bias/embedding"),
        Row(f"{stack}.block.{{i}}.{bias}", f"{path}/relative_attention_bias/embedding"),
        Row(f"{stack}.final_layer_norm.weight", f"{stack}/norm/scale"),
    ]
    for number, (block, name) in enumerate(attentions):
        for projection in ("query", "key", "value", "output"):
            tensor = f"{foreign}.{number}.{name}.{projection[0]}.weight"
            rows.append(Row(tensor, f"{path}/{block}/{projection}/kernel", transpose))
        norm = f"{foreign}.{number}.layer_norm.weight"
        rows.append(Row(norm, f"{path}/{block}_residual/norm/scale"))
    foreign, path = f"{foreign}.{len(attentions)}", f"{path}/feed_forward"
    for name, block, gated in (
        ("wi", "inner", False),
        ("wi_0", "gate", True),
        ("wi_1", "inner", True),
        ("wo", "outer", None),
    ):
        when = None if gated is None else ("gated_feed_forward", gated)
        tensor = f"{foreign}.DenseReluDense.{name}.weight"
        rows.append(Row(tensor, f"{path}/{block}/kernel", transpose, when=when))
    return [*rows, Row(f"{foreign}.layer_norm.weight", f"{path}_residual/norm/scale")]


# T5 (Raffel et al. 2020), T5 v1.1, Flan-T5 (Chung et al. 2022), ByT5. T5 multiplies hidden states
# by d_model**-0.5 before its tied output projection; T5 v1.1 and Flan-T5 have an output matrix of
# their own and no factor. The config.json of older versions lacks `scale_decoder_outputs`; there,
# an untied model has no factor.
T5 = Family(
    model_type="t5",
    architecture="T5ForConditionalGeneration",
    encoder_architecture="T5EncoderModel",
    heads=("sequence", "token"),
    head_prefix="transformer.",
    preset="t5",
    layout=layout("t5"),
    generation=generation_without_forced_end,
    fields=FIELDS,
    words={**WORDS, "scale_decoder_outputs": flag("output_scale", "inverse_sqrt_d_model", "none")},
    fixed=ENCODER_DECODER,
    defaults={
        **DEFAULTS,
        "vocab_size": 32_128,
        "num_heads": 8,
        "d_ff": 2048,
        "num_layers": 6,
        "feed_forward_proj": "relu",
    },
    computed={
        **COMPUTED,
        "scale_decoder_outputs": lambda values: values["tie_word_embeddings"] is not False,
    },
    is_tied=is_tied,
    tokenizer="T5Tokenizer",
)
# mT5 with relative biases in every layer (Chung et al. 2023). The published models have an output
# matrix of their own and were trained without T5's factor d_model**-0.5 before it: here, only a
# tied projection may have it. transformers 5.0 to 5.23 multiply by it in every UMT5, and 5.24 where
# `scale_decoder_outputs` or the absence of `tie_word_embeddings: false` says so, which is also true
# of folders that 5.0 to 5.23 wrote.
UMT5 = replace(
    T5,
    model_type="umt5",
    architecture="UMT5ForConditionalGeneration",
    encoder_architecture="UMT5EncoderModel",
    preset="umt5",
    layout=layout("umt5"),
    defaults={
        **DEFAULTS,
        "vocab_size": 250_112,
        "num_heads": 6,
        "d_ff": 1024,
        "num_layers": 8,
        "feed_forward_proj": "gated-gelu",
        "decoder_start_token_id": 0,
    },
    implied=lambda fields: (
        {"output_scale": "none"} if fields["output_projection"] == "linear" else {}
    ),
    tokenizer="TokenizersBackend",
)
# Multilingual T5 (Xue et al. 2021), the blocks of T5 v1.1.
MT5 = replace(
    T5,
    model_type="mt5",
    architecture="MT5ForConditionalGeneration",
    encoder_architecture="MT5EncoderModel",
    preset="mt5",
    layout=layout("mt5"),
    words=WORDS,
    defaults=UMT5.defaults,
    computed=COMPUTED,
)
FAMILIES = (T5, MT5, UMT5)
