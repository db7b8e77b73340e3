"""BART, Marian, Pegasus, M2M100 and others: names of weights, and config.json of each family."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.buffers import PositionTable
from jax_transformer.convert.families.family import (
    ACTIVATIONS,
    ENCODER_DECODER,
    Family,
    flag,
    generation,
    generation_without_forced_end,
    head_rows,
)
from jax_transformer.convert.layouts.torch_nn import layer_rows, norm, table_rows
from jax_transformer.convert.table import Buffer, Layout, Operation, Row
from jax_transformer.errors import InputError
from jax_transformer.model.tree import STACKS

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")
FIELDS: Mapping[str, str | tuple[str, ...]] = {
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
WORDS: Mapping[str, Mapping[Any, Mapping[str, Any]]] = {
    "activation_function": ACTIVATIONS,
    "scale_embedding": flag("embedding_scale", "sqrt_d_model", "none"),
}
FIXED: Mapping[str, tuple[Any, ...]] = ENCODER_DECODER | {"tie_word_embeddings": (True,)}


def sizes(layers: int, heads: int, d_ff: int) -> dict[str, int]:
    """Return the keys of config.json for stacks of equal sizes."""
    keys = {"layers": layers, "attention_heads": heads, "ffn_dim": d_ff}
    return {f"{stack}_{key}": size for stack in STACKS for key, size in keys.items()}


# What an absent key means in most classes of configurations.
DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 50_265,
    "d_model": 1024,
    **sizes(12, 16, 4096),
    "max_position_embeddings": 1024,
    "activation_function": "gelu",
    "scale_embedding": False,
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "pad_token_id": 1,
    "eos_token_id": 2,
}


def full_name(name: str) -> str:
    """Return the name that a tensor of BartModel has in BartForConditionalGeneration."""
    return f"model.{name}" if name.startswith(("shared.", "encoder.", "decoder.")) else name


def layout(
    name: str,
    position_table: Callable[[TransformerConfig], np.ndarray] | None = None,
    position_leaf: str = "weight",
) -> Layout:
    """Return the names and shapes of a family's weights; a config has a part of them.

    As in transformers, an absent bias of the output means zeros.
    """
    rows = (
        # A table that encoder, decoder and output share has its own name and three copies. With two
        # tables, the output is tied to the decoder's table.
        Row("model.shared.weight", "token_embedding/embedding"),
        # The bias of the output, the last of these rows, has another name.
        *table_rows("model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head")[:-1],
        *stack_rows("model."),
        Row("final_logits_bias", "output_projection/bias", Operation(shape=(1, -1)), zeros=True),
        *head_rows(),
    )
    buffers = ()
    if position_table is not None:
        names = (f"model.{stack}.embed_positions.{position_leaf}" for stack in STACKS)
        buffers = tuple(Buffer(name, position_table) for name in names)
    # Files converted from fairseq have a number there, the version of its format.
    return Layout(name, rows, buffers, unused=tuple(f"model.{stack}.version" for stack in STACKS))


def stack_rows(prefix: str) -> list[Row]:
    """Return the rows of the stacks by the names of fairseq, which transformers kept."""
    attentions = {
        "self_attention": ("self_attn", "self_attn_layer_norm"),
        "cross_attention": ("encoder_attn", "encoder_attn_layer_norm"),
    }
    layers, feed_forward = f"{prefix}{{stack}}.layers", ("fc1", "fc2", "final_layer_norm")
    return [
        Row(f"{prefix}encoder.embed_positions.weight", "source_positions/embedding"),
        Row(f"{prefix}decoder.embed_positions.weight", "target_positions/embedding"),
        *norm(f"{prefix}encoder.layernorm_embedding", "source_embedding_norm"),
        *norm(f"{prefix}decoder.layernorm_embedding", "target_embedding_norm"),
        *layer_rows(layers, "{stack}", attentions, PROJECTIONS, feed_forward),
        *norm(f"{prefix}{{stack}}.layer_norm", "{stack}/norm"),
    ]


class _PositionTable(PositionTable):
    """The table [max_length + 2, d_model] as older files of M2M100 hold it: padding has zeros."""

    def __call__(self, config: TransformerConfig) -> np.ndarray:
        table = super().__call__(config)
        table[config.pad_id : config.pad_id + 1] = 0.0
        return table

    def rows(self, config: TransformerConfig) -> int:
        return config.max_length + 2  # in transformers, whatever the id of padding is


def _position_offset(fields: Mapping[str, Any]) -> dict[str, int]:
    """Return the row of the first token, after that of padding: padding is not counted."""
    pad_id = fields["pad_id"]
    if fields["bos_id"] == pad_id:
        raise InputError(
            f"config.json: decoder_start_token_id={pad_id} must differ from pad_token_id: the "
            "positions of this family do not count padding"
        )
    return {"position_offset": max(0, pad_id) + 1}  # the config refuses a negative id itself


SINUSOIDS = PositionTable(("length", "d_model"))
ROWS_OF_PADDING = _PositionTable(("length", "d_model"))
# Without a start id, mBART and PLBart generate from BOS. In training, transformers moves the last
# token of a target to its front: the whole target is then CODE, text, EOS, CODE, whose first token
# is the config's `bos_id`.
START_FROM_BOS = {"decoder_start_token_id": lambda values: values.get("bos_token_id")}
# Denoised text, summaries (Lewis et al. 2020).
BART = Family(
    model_type="bart",
    architecture="BartForConditionalGeneration",
    heads=("sequence",),
    preset="bart",
    layout=layout("bart"),
    generation=generation,
    fields={"vocab_size": ("src_vocab_size", "tgt_vocab_size"), **FIELDS},
    words=WORDS,
    fixed=FIXED,
    # Layerdrop skips whole layers in training, by chance.
    training_only={"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
    defaults=DEFAULTS | {"decoder_start_token_id": 2},
    full_name=full_name,
    tokenizer="RobertaTokenizer",
)
# Supervised text generation (Tang et al. 2023), without prompts.
MVP = replace(
    BART,
    model_type="mvp",
    architecture="MvpForConditionalGeneration",
    layout=layout("mvp"),
    fixed={**FIXED, "use_prompt": (False,)},  # prompts are further keys and values of attentions
    defaults=DEFAULTS | {"vocab_size": 50_267, "decoder_start_token_id": 2},
)
# --8<-- [start:mbart]
# Translation, 25 languages (Liu et al. 2020), and mBART-50.
MBART = replace(
    BART,
    model_type="mbart",
    architecture="MBartForConditionalGeneration",
    head_start="last_token",
    preset="mbart",
    layout=layout("mbart"),
    defaults=DEFAULTS | {"bos_token_id": 0},
    computed=START_FROM_BOS,
    tokenizer="MBartTokenizer",
)
# --8<-- [end:mbart]
# Programs and their descriptions (Ahmad et al. 2021).
PLBART = replace(
    BART,
    model_type="plbart",
    architecture="PLBartForConditionalGeneration",
    head_start="last_token",
    layout=layout("plbart"),
    defaults={
        **DEFAULTS,
        "vocab_size": 50_005,
        "d_model": 768,
        **sizes(6, 12, 3072),
        "scale_embedding": True,
        "attention_dropout": 0.1,
        "bos_token_id": 0,
    },
    computed=START_FROM_BOS,
    tokenizer=None,
)
# Dialogue (Roller et al. 2021).
BLENDERBOT = replace(
    BART,
    model_type="blenderbot",
    architecture="BlenderbotForConditionalGeneration",
    heads=(),
    preset="blenderbot",
    layout=layout("blenderbot"),
    defaults={
        **DEFAULTS,
        "vocab_size": 8008,
        "d_model": 2560,
        **sizes(2, 32, 10_240),
        "decoder_layers": 24,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "decoder_start_token_id": 1,
    },
    tokenizer="BlenderbotTokenizer",
)
# Summaries (Zhang et al. 2020).
PEGASUS = replace(
    BART,
    model_type="pegasus",
    architecture="PegasusForConditionalGeneration",
    heads=(),
    preset="pegasus",
    layout=layout("pegasus", SINUSOIDS),
    saves_buffers=True,
    uses_stored_positions=True,
    defaults=DEFAULTS | {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1},
    tokenizer="PegasusTokenizer",
)
# The models of Marian, for example opus-mt (Junczys-Dowmunt et al. 2018).
MARIAN = replace(
    BART,
    model_type="marian",
    architecture="MarianMTModel",
    heads=(),
    preset="marian",
    layout=layout("marian", SINUSOIDS),
    # The decoder starts from padding, but must never generate it.
    generation=lambda config: {"bad_words_ids": [[config.pad_id]], **generation(config)},
    fields={
        "vocab_size": "src_vocab_size",
        "decoder_vocab_size": "tgt_vocab_size",
        **FIELDS,
    },
    words={
        **WORDS,
        "share_encoder_decoder_embeddings": flag("token_embeddings", "shared", "separate"),
    },
    defaults={
        **DEFAULTS,
        "vocab_size": 58_101,
        "share_encoder_decoder_embeddings": True,
        **dict.fromkeys(("pad_token_id", "decoder_start_token_id"), 58_100),
        "eos_token_id": 0,
    },
    computed={"decoder_vocab_size": lambda values: values.get("vocab_size")},
    uses_stored_positions=True,
    tokenizer="MarianTokenizer",
)
# M2M100 (Fan et al. 2021) and the dense NLLB (2022) models.
M2M100 = replace(
    BART,
    model_type="m2m_100",
    architecture="M2M100ForConditionalGeneration",
    heads=(),
    preset="m2m100",
    layout=layout("m2m_100", ROWS_OF_PADDING, "weights"),
    generation=generation_without_forced_end,
    defaults={
        **DEFAULTS,
        "vocab_size": 128_112,
        "activation_function": "relu",
        "scale_embedding": True,
        "attention_dropout": 0.1,
        "decoder_start_token_id": 2,
        "encoder_layerdrop": 0.05,
        "decoder_layerdrop": 0.05,
    },
    implied=_position_offset,
    tokenizer="M2M100Tokenizer",
)
# IndicTrans2, languages of India (Gala et al. 2023). Its class is code that comes with the
# published weights: the layers of M2M100 with a norm of the embeddings, a table for each side, and
# other names in config.json.
_WIDTHS = dict.fromkeys(("encoder_embed_dim", "decoder_embed_dim"), "d_model")
_LENGTHS = dict.fromkeys(("max_source_positions", "max_target_positions"), "max_length")
INDICTRANS = replace(
    M2M100,
    model_type="IndicTrans",
    architecture="IndicTransForConditionalGeneration",
    layout=layout("IndicTrans", ROWS_OF_PADDING, "weights"),
    fields={
        "encoder_vocab_size": "src_vocab_size",
        "decoder_vocab_size": "tgt_vocab_size",
        **_WIDTHS,
        **_LENGTHS,
        **{key: name for key, name in FIELDS.items() if name not in ("d_model", "max_length")},
    },
    words={
        **WORDS,
        "layernorm_embedding": flag("embedding_norm", True, False),
        # As the published models; without this key the class norms after each addition.
        "encoder_normalize_before": {True: {}},
        "decoder_normalize_before": {True: {}},
        "share_decoder_input_output_embed": {
            True: {"token_embeddings": "separate", "output_projection": "tied"},
            False: {"token_embeddings": "separate", "output_projection": "linear"},
        },
    },
    fixed=ENCODER_DECODER,
    defaults={
        **DEFAULTS,
        **dict.fromkeys(_WIDTHS, 512),
        **dict.fromkeys(_LENGTHS, 210),
        **sizes(6, 8, 2048),
        "activation_function": "relu",
        "scale_embedding": True,
        **dict.fromkeys(("encoder_normalize_before", "decoder_normalize_before"), False),
        **dict.fromkeys(("layernorm_embedding", "share_decoder_input_output_embed"), False),
        "decoder_start_token_id": 2,
    },
    tokenizer=None,
)
FAMILIES = (MARIAN, PEGASUS, BART, MBART, PLBART, MVP, BLENDERBOT, M2M100, INDICTRANS)
