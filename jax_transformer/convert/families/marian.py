"""Models of Marian in its own files: names of weights, and the options of special:model.yml.

Marian (Junczys-Dowmunt et al. 2018) numbers layers from 1 and joins names by underscores; here
the names have dots and count from 0: `decoder_l1_self_Wq` is `decoder.0.self_Wq`.
"""

from collections.abc import Iterator

from jax_transformer.convert.families.family import Family, flag
from jax_transformer.convert.table import Layout, Operation, Row, transpose

MODEL_TYPE = "marian_npz"  # not "marian": the same models converted for transformers
# Options that follow from the tables and the vocabulary; `marian_folder` adds them.
SIZE, EOS = "vocabulary-size", "end-of-sentence-id"
_ROW = Operation(shape=(1, -1))
_PLACES = {"query": "q", "key": "k", "value": "v", "output": "o"}


def _norm(foreign: str, path: str, suffix: str = "") -> Iterator[Row]:
    """Yield the rows of a norm, whose names also say its kind."""
    layer_norm = ("norm", "layer_norm")
    yield Row(f"{foreign}_ln_scale{suffix}", f"{path}/scale", _ROW, when=layer_norm)
    yield Row(f"{foreign}_ln_bias{suffix}", f"{path}/bias", _ROW)
    yield Row(f"{foreign}_rms_scale{suffix}", f"{path}/scale", _ROW, when=("norm", "rms_norm"))


def _layers() -> Iterator[Row]:
    """Yield the rows of the layers of both stacks."""
    foreign, path = "{stack}.{i}", "{stack}/layers_{i}"
    yield Row(f"{foreign}.rnn_W", f"{path}/recurrence/input/kernel")
    yield Row(f"{foreign}.rnn_Wf", f"{path}/recurrence/forget/kernel")
    yield Row(f"{foreign}.rnn_bf", f"{path}/recurrence/forget/bias", _ROW)
    yield from _norm(f"{foreign}.rnn_ffn", f"{path}/recurrence_residual/norm")
    for name, attention in (("self", "self_attention"), ("context", "cross_attention")):
        for projection, letter in _PLACES.items():
            yield Row(f"{foreign}.{name}_W{letter}", f"{path}/{attention}/{projection}/kernel")
            yield Row(f"{foreign}.{name}_b{letter}", f"{path}/{attention}/{projection}/bias", _ROW)
        yield from _norm(f"{foreign}.{name}_Wo", f"{path}/{attention}_residual/norm")
    for number, product in enumerate(("inner", "outer"), start=1):
        yield Row(f"{foreign}.ffn_W{number}", f"{path}/feed_forward/{product}/kernel")
        yield Row(f"{foreign}.ffn_b{number}", f"{path}/feed_forward/{product}/bias", _ROW)
    yield from _norm(f"{foreign}.ffn_ffn", f"{path}/feed_forward_residual/norm")


_LAYOUT = Layout(
    MODEL_TYPE,
    (
        Row("Wemb", "token_embedding/embedding"),
        Row("encoder.Wemb", "source_embedding/embedding"),
        Row("decoder.Wemb", "target_embedding/embedding"),
        Row("decoder.ff_logit_out_Wt", "output_projection/kernel", transpose),
        Row("decoder.ff_logit_out_b", "output_projection/bias", _ROW),
        *_layers(),
        *_norm("encoder.emb", "source_embedding_norm", "_pre"),
        *_norm("decoder.emb", "target_embedding_norm", "_pre"),
        *_norm("{stack}.top", "{stack}/norm"),
    ),
)


_LAYER_NORM = {"norm": "layer_norm", "norm_bias": True}
_RMS_NORM = {"norm": "rms_norm", "norm_bias": False}
_LAST = {"dropout_placement": "norm"}  # dropout after the norm
MARIAN_NPZ = Family(
    model_type=MODEL_TYPE,
    architecture="Marian transformer",
    preset=MODEL_TYPE,
    layout=_LAYOUT,
    generation=lambda config: {},
    file="special:model.yml",
    unrecorded=(
        *("initialization", "max_length"),
        *("dropout", "attention_dropout", "activation_dropout"),
    ),
    fields={
        "dim-emb": "d_model",
        "transformer-heads": "num_heads",
        "transformer-dim-ffn": "encoder_d_ff",
        "transformer-decoder-dim-ffn": "d_ff",
        "enc-depth": "num_encoder_layers",
        "dec-depth": "num_decoder_layers",
        SIZE: ("src_vocab_size", "tgt_vocab_size"),
        EOS: "eos_id",
    },
    # Of values that set the same fields the last is written.
    words={
        # An n here would norm queries alone: Marian's decoder reads the keys of earlier tokens
        # without this norm when it translates, and with it in training.
        "transformer-preprocess": {"d": {}, "": {}},
        "transformer-postprocess": {
            "an": _LAYER_NORM,
            "and": _LAYER_NORM | _LAST,
            "dan": _LAYER_NORM | {"dropout_placement": "sublayer"},
            "ar": _RMS_NORM,
            "ard": _RMS_NORM | _LAST,
            "dar": _RMS_NORM | {"dropout_placement": "sublayer"},
        },
        "transformer-postprocess-emb": {
            "": {"embedding_norm": False},
            "n": _LAYER_NORM | {"embedding_norm": True},
            "nd": _LAYER_NORM | {"embedding_norm": True},
            "d": {"embedding_norm": False},
        },
        "transformer-postprocess-top": {
            "": {"final_norm": False},
            "n": _LAYER_NORM | {"final_norm": True},
            "r": _RMS_NORM | {"final_norm": True},
        },
        "transformer-ffn-activation": {
            "relu": {"activation": "relu"},
            "gelu": {"activation": "gelu"},
            "swish": {"activation": "silu"},
        },
        "transformer-decoder-autoreg": {
            "self-attention": {"decoder_attention": "self_then_cross"},
            "rnn": {"decoder_attention": "ssru_then_cross"},
        },
        "transformer-disable-position-embeddings": {
            True: {"positions": "none", "embedding_scale": "none"},
            False: {"positions": "sinusoidal_tensor2tensor", "embedding_scale": "sqrt_d_model"},
        },
        "transformer-no-projection": {True: {}, False: {}},
        "output-omit-bias": {True: {}, False: {}},
        "tied-embeddings-src": flag("token_embeddings", "shared", "separate"),
        "tied-embeddings": flag("output_projection", "tied", "linear"),
    },
    fixed={
        "type": ("transformer",),
        "dec-cell": ("ssru",),  # of a recurrent decoder
        "layer-normalization": (False,),  # of its cell
        "transformer-rnn-projection": (False,),
        "transformer-ffn-depth": (2,),
        "transformer-decoder-ffn-depth": (0, 2),
        "transformer-tied-layers": ([],),
        "transformer-pool": (False,),
        "transformer-attention-mask": ("default",),
        "input-types": ([], ["sequence", "sequence"]),
        "right-left": (False,),
        "ulr": (False,),
        "lemma-dim-emb": (0,),
    },
    defaults={
        "transformer-postprocess-top": "",
        "transformer-postprocess-emb": "d",
        "transformer-decoder-autoreg": "self-attention",
        "transformer-disable-position-embeddings": False,
        "transformer-no-projection": False,
        "output-omit-bias": False,
    },
    computed={"transformer-decoder-dim-ffn": lambda values: values.get("transformer-dim-ffn")},
    # The last id is that of padding and of BOS.
    implied=lambda fields: dict.fromkeys(("pad_id", "bos_id"), fields["src_vocab_size"] - 1),
    tokenizer="MarianVocabulary",
)
FAMILIES = (MARIAN_NPZ,)
