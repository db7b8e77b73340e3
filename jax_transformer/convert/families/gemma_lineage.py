"""What T5Gemma and T5Gemma 2 share: names of weights, config.json with an object for each stack."""

import operator
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from jax_transformer.convert.families.family import (
    ACTIVATIONS,
    Family,
    generation_without_forced_end,
)
from jax_transformer.convert.table import Layout, Row, transpose
from jax_transformer.errors import InputError, shorten
from jax_transformer.model.tree import STACKS

FULL, SLIDING = "full_attention", "sliding_attention"
# Keys of both objects: with one number, and with one for each stack.
SHARED = {
    "head_dim": "d_kv",
    "max_position_embeddings": "max_length",
    "pad_token_id": "pad_id",
    "query_pre_attn_scalar": "attention_scale",
    "rms_norm_eps": "norm_epsilon",
    "sliding_window": "sliding_window",
}
SIZES = {
    "hidden_size": ("encoder_d_model", "d_model"),
    "num_attention_heads": ("encoder_num_heads", "num_heads"),
    "num_key_value_heads": ("encoder_num_kv_heads", "num_kv_heads"),
    "intermediate_size": ("encoder_d_ff", "d_ff"),
    "num_hidden_layers": ("num_encoder_layers", "num_decoder_layers"),
    "vocab_size": ("src_vocab_size", "tgt_vocab_size"),
}
PATTERN, END = "sliding_window_pattern", "first_eos_token_id"  # made of lists
CAP = "decoder.final_logit_softcapping"


def family(
    model_type: str,
    architecture: str,
    objects: tuple[str, str],
    layout: Layout,
    *,
    pattern: int,
    rope: str,
    shared: Mapping[str, str],
    constants: Mapping[str, Any],
    **others: Any,
) -> Family:
    """Return a family.

    Args:
        objects: Keys of the objects of the encoder and of the decoder.
        pattern: The usual `sliding_window_pattern`.
        rope: Key, in both objects, of the rotary parameters of the layers without a window.
        shared: Keys of both objects and their fields, beside `SHARED`.
        constants: Keys that are written and not read.
    """
    theta, kind, factor = f"{rope}.rope_theta", f"{rope}.rope_type", f"{rope}.factor"
    shared = {**SHARED, **shared, theta: "rotary_theta", factor: "rotary_scaling"}
    fields: dict[str, Any] = {
        "dropout_rate": ("dropout", "activation_dropout"),
        "attention_dropout": "attention_dropout",
        "decoder.bos_token_id": "bos_id",
        CAP: "logit_softcap",
        END: "eos_id",
        PATTERN: "sliding_window_pattern",
    }
    words: dict[str, Any] = {}
    computed: dict[str, Any] = {}
    for number, name in enumerate(objects):
        fields |= {f"{name}.{key}": field for key, field in shared.items()}
        fields |= {f"{name}.{key}": both[number] for key, both in SIZES.items()}
        # Older versions have no `rope_parameters`.
        computed[f"{name}.{theta}"] = operator.methodcaller("get", f"{name}.rope_theta")
        words[f"{name}.hidden_activation"] = ACTIVATIONS
        words[f"{name}.{kind}"] = {"linear": {}, "default": {"rotary_scaling": 1.0}}

    def layers_of_a_pattern(values: Mapping[str, Any]) -> int | None:
        types = [values.get(f"{name}.layer_types") for name in objects]
        return _pattern(
            types, [values.get(f"{name}.num_hidden_layers") for name in objects], pattern
        )

    def first_end(values: Mapping[str, Any]) -> Any:
        ends = values.get("decoder.eos_token_id")
        return ends[0] if isinstance(ends, list) and ends else ends

    return Family(
        model_type,
        architecture,
        model_type,
        layout,
        generation_without_forced_end,
        fields,
        words=words | others.pop("words", {}),
        nullable=(CAP, PATTERN, *(f"{name}.attn_logit_softcapping" for name in objects)),
        fixed={
            "is_encoder_decoder": (True,),
            **{f"{name}.attention_bias": (False,) for name in objects},
            **{f"{name}.rope_scaling": (None,) for name in objects},
            **others.pop("fixed", {}),
        },
        defaults={"dropout_rate": 0.0, "attention_dropout": 0.0, "tie_word_embeddings": True}
        | {
            f"{name}.{key}": one
            for name in objects
            for key, one in ((kind, "default"), (factor, 1.0))
        },
        computed=computed | {PATTERN: layers_of_a_pattern, END: first_end},
        written=partial(_written, objects=objects, factor=factor, constants=constants),
        implied=_encoder_sizes,
        tokenizer="GemmaTokenizer",
        **others,
    )


def stack_rows() -> list[Row]:
    """Return the rows of both stacks; a config has a part of them."""
    rows = []
    for stack in STACKS:
        foreign, path = f"model.{stack}.layers.{{i}}.", f"{stack}/layers_{{i}}"
        rows.append(Row(f"model.{stack}.norm.weight", f"{stack}/norm/scale"))
        blocks = {"self_attention": "self_attn", "feed_forward": "feedforward"}
        if stack == "decoder":
            blocks["cross_attention"] = "cross_attn"
        for block, name in blocks.items():
            for side, norm in (("pre", "norm"), ("post", "output_norm")):
                scale = f"{path}/{block}_residual/{norm}/scale"
                rows.append(Row(f"{foreign}{side}_{name}_layernorm.weight", scale))
            parts = {f"{name}.{part[0]}": part for part in ("query", "key", "value", "output")}
            if block == "feed_forward":
                parts = {"mlp.gate": "gate", "mlp.up": "inner", "mlp.down": "outer"}
            for tensor, part in parts.items():
                kernel = f"{path}/{block}/{part}/kernel"
                rows.append(Row(f"{foreign}{tensor}_proj.weight", kernel, transpose))
        for part in ("query", "key"):
            scale = f"{path}/self_attention/{part}_norm/scale"
            rows.append(Row(f"{foreign}self_attn.{part[0]}_norm.weight", scale))
    return rows


def _written(
    keys: dict[str, Any], objects: tuple[str, str], factor: str, constants: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keys to write in the place of those that this library has made of several."""
    last, end, scale = keys.pop(PATTERN), keys.pop(END), keys["decoder.query_pre_attn_scalar"]
    special = {"eos_token_id": end, "bos_token_id": keys["decoder.bos_token_id"]}
    for name in objects:
        count = keys[f"{name}.num_hidden_layers"]
        own = {**special, "layer_types": _layer_types(last, count)}
        # A whole number in transformers; another one is refused when this is read.
        own["query_pre_attn_scalar"] = 1 if isinstance(scale, str) else max(1, int(scale))
        own["final_logit_softcapping"] = keys[CAP]
        keys |= {f"{name}.{key}": value for key, value in own.items()}
        if keys[f"{name}.{factor}"] == 1:
            del keys[f"{name}.{factor}"]
    top = {key: keys[f"decoder.{key}"] for key in ("pad_token_id", "vocab_size")}
    return keys | special | top | constants


def _encoder_sizes(fields: Mapping[str, Any]) -> dict[str, None]:
    """Return the sizes of the encoder that need no field: those that are the decoder's."""
    sizes = [name for name, _ in SIZES.values() if name.startswith("encoder_")]
    return {name: None for name in sizes if fields[name] == fields[name.removeprefix("encoder_")]}


def _layer_types(pattern: int | None, count: int) -> list[str]:
    return [FULL if pattern and (i + 1) % pattern == 0 else SLIDING for i in range(count)]


def _pattern(stacks: Sequence[Any], counts: Sequence[Any], usual: int) -> int | None:
    """Return of how many layers the last has no window; None if every layer has one."""
    lists = [types if isinstance(types, list) else [] for types in stacks]
    for pattern in (usual, None, *(types.index(FULL) + 1 for types in lists if FULL in types)):
        if all(
            given is None or (len(types) == count and types == _layer_types(pattern, len(types)))
            for given, types, count in zip(stacks, lists, counts, strict=True)
        ):
            return pattern
    raise InputError(
        f"config.json: layer_types={shorten(stacks)} must have as many entries as there are "
        f"layers: in both stacks, every n-th is {FULL!r}, the others {SLIDING!r}"
    )
