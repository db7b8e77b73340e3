"""Small models for tests: every axis another size, random numbers in every leaf."""

import contextlib
import functools

import jax
import jaxtyping
import numpy as np

from jax_transformer import TransformerConfig, init_params
from jax_transformer.tokenizers import train_byte_pair
from jax_transformer.translation.model_folder import TrainedModel

# Prime where an axis is free to be; d_model = 3 heads x 14 must be even for the sinusoids.
SIZES = {
    "d_model": 42,
    "num_heads": 3,
    "d_ff": 53,
    "num_encoder_layers": 2,
    "num_decoder_layers": 3,
    "max_length": 29,
    "dropout": 0.0,
}
BATCH, SOURCE_LENGTH, TARGET_LENGTH = 5, 13, 11
# Values that no preset has; the models are the paper's with them.
OTHERS = {
    "pre_norm_decoder": {"decoder_norm_placement": "pre", "decoder_final_norm": True}
    | {"attention_scale": "d_model", "norm": "biased_std_norm"},
    "pre_norm_encoder": {"norm_placement": "pre", "decoder_norm_placement": "post"}
    | {"final_norm": True, "decoder_final_norm": False, "attention_scale": "d_model"}
    | {"norm": "unbiased_layer_norm"},
    # Every field of T5Gemma, with an encoder of other sizes; in lengths above the windows.
    "windows": {
        **{"token_embeddings": "separate", "d_kv": 10, "num_heads": 6, "num_kv_heads": 2},
        **{"d_v": 7},  # which T5Gemma has not
        **{"encoder_d_model": 30, "encoder_num_heads": 4, "encoder_num_kv_heads": 4},
        **{"encoder_d_ff": 19, "positions": "rotary", "rotary_theta": 50.0, "rotary_scaling": 2.0},
        **{"rotary_fraction": 0.65, "sliding_window": 4, "sliding_window_pattern": 2},
        **{"sliding_window_theta": 9.0, "attention_scale": 7.0, "attention_softcap": 1.5},
        **{"logit_softcap": 2.0, "norm": "zero_centered_rms_norm", "norm_bias": False},
        **{"norm_placement": "sandwich", "final_norm": True, "memory_norm": True},
    },
    # And those of T5Gemma 2.
    "merged": {
        **{"decoder_attention": "merged", "num_heads": 4, "d_kv": 6, "num_kv_heads": 2},
        **{"query_key_norm": True, "positions": "rotary", "sliding_window": 5},
        **{"encoder_window": "split", "encoder_num_kv_heads": 1, "norm_placement": "pre"},
    },
    # The decoder of Marian's small models, with a memory of another width.
    "ssru": {
        **{"decoder_attention": "ssru_then_cross", "token_embeddings": "separate"},
        **{"encoder_d_model": 30, "encoder_num_heads": 6, "memory_norm": True},
    },
}


def small_config(preset, **overrides):
    """Return a small model of a preset, or of a name in `OTHERS`."""
    if preset in OTHERS:
        preset, overrides = "vaswani2017", OTHERS[preset] | overrides
    defaults = TransformerConfig.preset(preset)
    shared = defaults.token_embeddings == "shared"
    fields = {"src_vocab_size": 41 if shared else 37, "tgt_vocab_size": 41} | SIZES
    if defaults.bos_id == defaults.pad_id:  # padding is the last id, and begins every target
        fields |= {"pad_id": 40, "bos_id": 40}
    if defaults.num_kv_heads is not None:
        fields["num_kv_heads"] = 1
    if defaults.d_kv is not None:  # heads narrower than the residual stream
        fields["d_kv"] = 6 if defaults.positions == "rotary" else 5
    if defaults.sliding_window is not None:  # texts are longer
        fields |= {"sliding_window": 3, "sliding_window_pattern": 2}
    if defaults.source_features is not None:
        fields |= {"source_features": 8, "encoder_max_length": 17, "pad_id": 0, "bos_id": 1}
        fields |= {"src_vocab_size": 41, "eos_id": 2}
    if defaults.positions == "relative":  # distances in every kind of bucket
        fields |= {"relative_attention_num_buckets": 10, "relative_attention_max_distance": 9}
    return TransformerConfig.preset(preset, **(fields | overrides))


def shallow_config(preset, **overrides):
    """Return a small model of one layer a side."""
    return small_config(preset, **{"num_encoder_layers": 1, "num_decoder_layers": 1} | overrides)


def one_layer(preset, vocab_size, **fields):
    """Return a model of one layer a side and as many ids on both."""
    sizes = dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), 1)
    sizes |= dict.fromkeys(("src_vocab_size", "tgt_vocab_size"), vocab_size)
    return TransformerConfig.preset(preset, **sizes, **fields)


def random_params(config, seed=0, dtype=np.float32):
    """Return parameters with no leaf at its starting value: biases and norm scales vary too.

    Matrices are drawn as wide as training begins: a T5 does not divide its scores, but draws its
    queries narrower, and its embeddings wider.
    """
    t5 = config.initialization == "t5"
    random = np.random.default_rng(seed)

    def draw(path, leaf):
        name = path[-1].key
        if name == "kernel":
            narrow = config.head_dim if t5 and path[-2].key == "query" else 1
            return random.normal(0, (leaf.shape[0] * narrow) ** -0.5, leaf.shape).astype(dtype)
        if name == "embedding":
            deviation = 1.0 if t5 else config.d_model**-0.5
            return random.normal(0, deviation, leaf.shape).astype(dtype)
        usual = name == "scale" and config.norm != "zero_centered_rms_norm"
        return random.normal(float(usual), 0.3, leaf.shape).astype(dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes(config))


@functools.cache
def shapes(config):
    return jax.eval_shape(lambda key: init_params(key, config), jax.random.key(0))


def random_tokens(config, seed=0, dtype=np.float32):
    """Return (src, tgt): ragged ids, one source row all padding; or vectors, where ids are none.

    Of sound, an odd number of frames makes as many positions.
    """
    random = np.random.default_rng(seed)
    same_length = config.decoder_attention == "self_over_memory"
    tokens = []
    for length, vocab_size in (
        (SOURCE_LENGTH, config.src_vocab_size),
        (SOURCE_LENGTH if same_length else TARGET_LENGTH, config.tgt_vocab_size),
    ):
        if config.token_embeddings == "none":
            tokens.append(random.normal(size=(BATCH, length, config.d_model)).astype(dtype))
            continue
        ids = random.integers(3, vocab_size, (BATCH, length)).astype(np.int32)
        for row in range(1, BATCH):
            ids[row, random.integers(1, length) :] = config.pad_id
        tokens.append(ids)
    src, tgt = tokens
    if config.token_embeddings != "none":
        src[-1] = config.pad_id
        tgt[:, 0] = config.bos_id
    if (width := config.source_features) is not None:
        src = random.normal(size=(BATCH, 2 * SOURCE_LENGTH - 1, width)).astype(dtype)
    return src, tgt


def tiny_model(lines, vocab_size, seed=0, **fields):
    """Return an untrained model of one layer a side, with a tokenizer made from these lines."""
    tokenizer = train_byte_pair(lines, vocab_size)
    sizes = {"d_model": 8, "num_heads": 2, "d_ff": 9}
    sizes |= {"num_encoder_layers": 1, "num_decoder_layers": 1}
    sizes |= dict.fromkeys(("src_vocab_size", "tgt_vocab_size"), tokenizer.src_vocab_size)
    config = TransformerConfig(**(sizes | fields))
    return TrainedModel(config, random_params(config, seed), tokenizer)


@contextlib.contextmanager
def unchecked():
    """Switch off the shape checks, which take most of the time of a small torch model."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
