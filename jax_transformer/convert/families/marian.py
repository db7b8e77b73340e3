"""MarianMTModel of Hugging Face: the layout of its weights and the words of its config.json."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.layouts.torch_nn import linear, norm
from jax_transformer.convert.table import Buffer, Layout, Operation, Row
from jax_transformer.errors import InputError
from jax_transformer.functional import sinusoidal_positions

# Names, in config.json, of what the config counts and rates.
_FIELDS = {
    "vocab_size": "src_vocab_size",
    "decoder_vocab_size": "tgt_vocab_size",
    "d_model": "d_model",
    "encoder_attention_heads": "num_heads",
    "decoder_attention_heads": "num_heads",
    "encoder_ffn_dim": "d_ff",
    "decoder_ffn_dim": "d_ff",
    "encoder_layers": "num_encoder_layers",
    "decoder_layers": "num_decoder_layers",
    "max_position_embeddings": "max_length",
    "dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "activation_dropout": "activation_dropout",
    "pad_token_id": "pad_id",
    "decoder_start_token_id": "bos_id",
    "eos_token_id": "eos_id",
}
# The one value that the model can honour of keys that change it; what an absent key means.
_ONLY = {
    "model_type": "marian",
    "is_encoder_decoder": True,
    "is_decoder": False,
    "tie_word_embeddings": True,
    "static_position_embeddings": True,
    "normalize_before": False,
    "normalize_embedding": False,
    "add_final_layer_norm": False,
    "encoder_layerdrop": 0,
    "decoder_layerdrop": 0,
}
_ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}


def _layers(stack: str, attentions: Mapping[str, str]) -> list[Row]:
    """Return the rows of a stack's layers, given its attentions by their paths."""
    foreign, path = f"model.{stack}.layers.{{i}}", f"{stack}/layers_{{i}}"
    rows = [
        *linear(f"{foreign}.fc1", f"{path}/feed_forward/inner"),
        *linear(f"{foreign}.fc2", f"{path}/feed_forward/outer"),
        *norm(f"{foreign}.final_layer_norm", f"{path}/feed_forward_residual/norm"),
    ]
    for own, name in attentions.items():
        rows += norm(f"{foreign}.{name}_layer_norm", f"{path}/{own}_residual/norm")
        for projection in ("query", "key", "value"):
            rows += linear(f"{foreign}.{name}.{projection[0]}_proj", f"{path}/{own}/{projection}")
        rows += linear(f"{foreign}.{name}.out_proj", f"{path}/{own}/output")
    return rows


def _position_table(config: TransformerConfig) -> np.ndarray:
    return sinusoidal_positions(config.max_length, config.d_model, config.positions)


LAYOUT = Layout(
    "marian",
    (
        # A table that encoder, decoder and output share has a name of its own and three copies.
        Row("model.shared.weight", "token_embedding/embedding"),
        Row("model.encoder.embed_tokens.weight", "token_embedding/embedding"),
        Row("model.decoder.embed_tokens.weight", "token_embedding/embedding"),
        Row("lm_head.weight", "token_embedding/embedding"),
        # With two tables, the output is tied to the decoder's.
        Row("model.encoder.embed_tokens.weight", "source_embedding/embedding"),
        Row("model.decoder.embed_tokens.weight", "target_embedding/embedding"),
        Row("lm_head.weight", "target_embedding/embedding"),
        *_layers("encoder", {"self_attention": "self_attn"}),
        *_layers("decoder", {"self_attention": "self_attn", "cross_attention": "encoder_attn"}),
        Row("final_logits_bias", "output_projection/bias", Operation(shape=(1, -1))),
    ),
    (
        Buffer("model.encoder.embed_positions.weight", _position_table),
        Buffer("model.decoder.embed_positions.weight", _position_table),
    ),
)


def config_from_json(values: Mapping[str, Any]) -> TransformerConfig:
    """Return the config of a MarianMTModel.

    Args:
        values: What its config.json holds. Keys that say nothing about the weights and their
            use in the model (those of generation, training and bookkeeping) are not read.

    Raises:
        InputError: A key is missing, or has a value that the model cannot honour.
    """
    for key, only in _ONLY.items():
        if values.get(key, only) != only:
            raise InputError(f"config.json: {key}={values[key]!r} must be {only!r}")
    values = {"share_encoder_decoder_embeddings": True, **values}
    if values.get("decoder_vocab_size") is None:  # older than the key
        values["decoder_vocab_size"] = values.get("vocab_size")
    fields: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for key, field in _FIELDS.items():
        value = _rate(values, key) if field.endswith("dropout") else _count(values, key)
        if fields.setdefault(field, value) != value:
            raise InputError(
                f"config.json: {key}={value!r} must equal {sources[field]}={fields[field]!r}"
            )
        sources.setdefault(field, key)
    fields["embedding_scale"] = "sqrt_d_model" if _flag(values, "scale_embedding") else "none"
    shared = _flag(values, "share_encoder_decoder_embeddings")
    fields["token_embeddings"] = "shared" if shared else "separate"
    activation = _get(values, "activation_function")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise InputError(
            f"config.json: activation_function={activation!r} must be one of "
            f"{', '.join(_ACTIVATIONS)}"
        )
    fields["activation"] = _ACTIVATIONS[activation]
    try:
        return TransformerConfig.preset("marian", **fields)
    except InputError as error:
        raise InputError(f"config.json: {error}") from error


def config_to_json(config: TransformerConfig) -> dict[str, Any]:
    """Return what config.json says of a config: the inverse of `config_from_json`.

    Raises:
        InputError: A MarianMTModel cannot be of this config; names the fields.
    """
    config = dataclasses.replace(
        config,
        attention_dropout=config.attention_dropout_rate,
        activation_dropout=config.activation_dropout_rate,
    )
    activations = {own: name for name, own in _ACTIVATIONS.items()}
    values = {
        "architectures": ["MarianMTModel"],
        "model_type": "marian",
        "is_encoder_decoder": True,
        **{key: getattr(config, field) for key, field in _FIELDS.items()},
        "activation_function": activations[config.activation],
        "scale_embedding": config.embedding_scale == "sqrt_d_model",
        "share_encoder_decoder_embeddings": config.token_embeddings == "shared",
        "tie_word_embeddings": True,
        "forced_eos_token_id": config.eos_id,
    }
    possible = config_from_json(values).to_dict()
    differing = [
        f"{name}={value!r} must be {possible[name]!r}"
        for name, value in config.to_dict().items()
        if name != "initialization" and value != possible[name]
    ]
    if differing:
        raise InputError(f"no MarianMTModel has this config: {'; '.join(differing)}")
    return values


def _get(values: Mapping[str, Any], key: str) -> Any:
    if key not in values:
        raise InputError(f"config.json has no {key!r}; add it")
    return values[key]


def _count(values: Mapping[str, Any], key: str) -> int:
    value = _get(values, key)
    if type(value) is not int:
        raise InputError(f"config.json: {key}={value!r} must be a whole number")
    return value


def _rate(values: Mapping[str, Any], key: str) -> float:
    value = _get(values, key)
    if type(value) not in (int, float) or not 0 <= value <= 1:
        raise InputError(f"config.json: {key}={value!r} must be a rate from 0 to 1")
    return float(value)


def _flag(values: Mapping[str, Any], key: str) -> bool:
    flag = _get(values, key)
    if type(flag) is not bool:
        raise InputError(f"config.json: {key}={flag!r} must be true or false")
    return flag
