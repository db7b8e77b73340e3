"""T5Gemma and T5Gemma 2: names of weights, and config.json with an object for each stack."""

import operator
from collections.abc import Mapping
from functools import partial
from typing import Any

from jax_transformer.convert.families.family import (
    ACTIVATIONS,
    Family,
    flag,
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
    pattern_of = partial(_pattern, objects=objects, usual=pattern)
    computed: dict[str, Any] = {PATTERN: pattern_of, END: _first_end}
    for number, name in enumerate(objects):
        fields |= {f"{name}.{key}": field for key, field in shared.items()}
        fields |= {f"{name}.{key}": both[number] for key, both in SIZES.items()}
        # Older versions have no `rope_parameters`.
        computed[f"{name}.{theta}"] = operator.methodcaller("get", f"{name}.rope_theta")
        words[f"{name}.hidden_activation"] = ACTIVATIONS
        words[f"{name}.{kind}"] = {"linear": {}, "default": {"rotary_scaling": 1.0}}

    return Family(
        model_type=model_type,
        architecture=architecture,
        preset=model_type,
        layout=layout,
        generation=generation_without_forced_end,
        fields=fields,
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
        computed=computed,
        written=partial(_written, objects=objects, factor=factor, constants=constants),
        tokenizer="GemmaTokenizer",
        **others,
    )


def stack_rows() -> list[Row]:
    """Return the rows of both stacks; a config has a part of them."""
    foreign, path = "model.{stack}.layers.{i}.", "{stack}/layers_{i}"
    rows = [Row("model.{stack}.norm.weight", "{stack}/norm/scale")]
    blocks = {
        "self_attention": "self_attn",
        "feed_forward": "feedforward",
        "cross_attention": "cross_attn",
    }
    for block, name in blocks.items():
        for side, norm in (("pre", "norm"), ("post", "output_norm")):
            scale = f"{path}/{block}_residual/{norm}/scale"
            rows.append(Row(f"{foreign}{side}_{name}_layernorm.weight", scale))
        projections = {f"{name}.{part[0]}": part for part in ("query", "key", "value", "output")}
        if block == "feed_forward":
            projections = {"mlp.gate": "gate", "mlp.up": "inner", "mlp.down": "outer"}
        for tensor, part in projections.items():
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
        of_stack = {**special, "layer_types": _layer_types(last, count)}
        # A whole number in transformers; another one is refused when this is read.
        of_stack["query_pre_attn_scalar"] = 1 if isinstance(scale, str) else max(1, int(scale))
        of_stack["final_logit_softcapping"] = keys[CAP]
        keys |= {f"{name}.{key}": value for key, value in of_stack.items()}
        if keys[f"{name}.{factor}"] == 1:
            del keys[f"{name}.{factor}"]
    top = {key: keys[f"decoder.{key}"] for key in ("pad_token_id", "vocab_size")}
    return keys | special | top | constants


def _layer_types(pattern: int | None, count: int) -> list[str]:
    return [FULL if pattern and (i + 1) % pattern == 0 else SLIDING for i in range(count)]


def _first_end(values: Mapping[str, Any]) -> Any:
    ends = values.get("decoder.eos_token_id")
    return ends[0] if isinstance(ends, list) and ends else ends


def _pattern(values: Mapping[str, Any], objects: tuple[str, str], usual: int) -> int | None:
    """Return of how many layers the last has no window; None if every layer has one."""
    stacks = [values.get(f"{name}.layer_types") for name in objects]
    counts = [values.get(f"{name}.num_hidden_layers") for name in objects]
    lists = [types if isinstance(types, list) else [] for types in stacks]
    for pattern in (usual, None, *(types.index(FULL) + 1 for types in lists if FULL in types)):
        if all(
            written is None or (len(types) == count and types == _layer_types(pattern, len(types)))
            for written, types, count in zip(stacks, lists, counts, strict=True)
        ):
            return pattern
    raise InputError(
        f"config.json: layer_types={shorten(stacks)} must have as many entries as there are "
        f"layers: in both stacks, every n-th is {FULL!r}, the others {SLIDING!r}"
    )


# T5Gemma (Zhang et al. 2025), the blocks of Gemma 2.
_HEAD, _TABLE = "lm_head.out_proj.weight", "target_embedding/embedding"
T5GEMMA = family(
    "t5gemma",
    "T5GemmaForConditionalGeneration",
    STACKS,
    Layout(
        "t5gemma",
        (
            Row("model.encoder.embed_tokens.weight", "source_embedding/embedding"),
            Row("model.decoder.embed_tokens.weight", _TABLE),
            Row(_HEAD, _TABLE, when=("output_projection", "tied")),
            Row(_HEAD, "output_projection/kernel", transpose),
            *stack_rows(),
        ),
    ),
    pattern=2,
    rope="rope_parameters",
    shared={"attn_logit_softcapping": "attention_softcap"},
    constants={f"{stack}.model_type": "t5_gemma_module" for stack in STACKS},
    words={"tie_word_embeddings": flag("output_projection", "tied", "linear")},
)
# T5Gemma 2 (Zhang et al. 2025), the blocks of Gemma 3; text alone.
_SLIDING = "rope_parameters.sliding_attention"
T5GEMMA2 = family(
    "t5gemma2",
    "T5Gemma2ForConditionalGeneration",
    ("encoder.text_config", "decoder"),
    Layout(
        "t5gemma2",
        (
            Row("model.encoder.embed_tokens.weight", "token_embedding/embedding"),
            Row("model.decoder.embed_tokens.weight", "token_embedding/embedding"),
            Row(_HEAD, "token_embedding/embedding"),
            *stack_rows(),
        ),
    ),
    pattern=6,
    rope="rope_parameters.full_attention",
    shared={f"{_SLIDING}.rope_theta": "sliding_window_theta"},
    constants={
        "encoder.model_type": "t5gemma2_encoder",
        "encoder.text_config.model_type": "t5gemma2_text",
        "decoder.model_type": "t5gemma2_decoder",
        # Without an origin: the smallest that reads images, and no token that ends one.
        "encoder.vision_config": {
            "model_type": "siglip_vision_model",
            **dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers"), 1),
            **dict.fromkeys(("num_attention_heads", "image_size", "patch_size"), 1),
        },
        "encoder.mm_tokens_per_image": 1,
        "encoder.eoi_token_index": -1,
    },
    fixed={
        "tie_word_embeddings": (True,),
        f"encoder.text_config.{_SLIDING}.rope_type": ("default",),
        f"decoder.{_SLIDING}.rope_type": ("default",),
    },
    # The name in a file of a tensor of the model in memory.
    full_name=lambda name: name.replace("model.encoder.text_model.", "model.encoder."),
    # What reads images, and the embedding of the token that ends one.
    other_parts=("*.vision_tower.*", "*.multi_modal_projector.*", "*.eoi_embedding"),
)
FAMILIES = (T5GEMMA, T5GEMMA2)
