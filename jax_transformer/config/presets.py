"""The described implementations by name: the fields in which each differs from the defaults.

The defaults of `TransformerConfig` are what most of them share: separate embeddings scaled by
sqrt(d_model), interleaved sinusoids, biases everywhere, ReLU, dropout 0.1.
A new preset is one entry here; the tests over presets find it by its name.
"""

from typing import Any


def _vocabulary(size: int) -> dict[str, int]:
    return {"src_vocab_size": size, "tgt_vocab_size": size}


def _layers(encoder: int, decoder: int) -> dict[str, int]:
    return {"num_encoder_layers": encoder, "num_decoder_layers": decoder}


def _ids(pad: int, bos: int, eos: int) -> dict[str, int]:
    return {"pad_id": pad, "bos_id": bos, "eos_id": eos}


_STD_PRE_NORM = {"norm_placement": "pre", "norm": "std_norm"}
_FINAL_PRE_NORM = {"norm_placement": "pre", "final_norm": True}
_NO_INNER_DROPOUT = {"attention_dropout": 0.0, "activation_dropout": 0.0}
_BIASES = "output_bias qkv_bias attention_output_bias feed_forward_bias norm_bias".split()
_NO_BIASES = dict.fromkeys(_BIASES, False)
# What the descendants of BART share, in the sizes of the large models.
_BART_LARGE = {
    "d_model": 1024,
    "num_heads": 16,
    "d_ff": 4096,
    **_layers(12, 12),
    "max_length": 1024,
    "token_embeddings": "shared",
    "output_projection": "tied",
    "initialization": "normal",
}
_T5 = {
    "token_embeddings": "shared",
    "embedding_scale": "none",
    "positions": "relative",
    "attention_scale": "none",
    "norm": "rms_norm",
    "norm_epsilon": 1e-6,
    **_NO_BIASES,
    "final_dropout": True,
    "initialization": "t5",
    **_FINAL_PRE_NORM,
    **_ids(pad=0, bos=0, eos=1),
}
_T5_V1_1 = _T5 | {"gated_feed_forward": True, "activation": "gelu_tanh", "d_kv": 64}
_MT5 = _T5_V1_1 | {"num_heads": 6, "d_ff": 1024, **_layers(8, 8)}
# The blocks of Gemma 2 and 3 (Gemma Team 2024, 2025).
_GEMMA = {
    "d_kv": 256,
    "positions": "rotary",
    "output_projection": "tied",
    "attention_scale": 256.0,
    "gated_feed_forward": True,
    "activation": "gelu_tanh",
    "norm": "zero_centered_rms_norm",
    "norm_epsilon": 1e-6,
    **_NO_BIASES,
    "norm_placement": "sandwich",
    "final_norm": True,
    "final_dropout": True,
    "dropout": 0.0,
    "initialization": "normal",
    **_ids(pad=0, bos=2, eos=1),
}

PRESETS: dict[str, dict[str, Any]] = {
    # Vaswani et al. 2017, "Attention Is All You Need", base model; epsilon and initialization
    # are those of tensor2tensor, which the paper leaves out.
    "vaswani2017": {
        "token_embeddings": "shared",
        "output_projection": "tied",
        "output_bias": False,
        "qkv_bias": False,
        "attention_output_bias": False,
        "norm_epsilon": 1e-6,
        **_NO_INNER_DROPOUT,
        "initialization": "vaswani2017",
    },
    # torch.nn.Transformer: the body alone, vectors in, hidden states out. The printed model
    # of width 1536 is preset("torch_nn", d_model=1536).
    "torch_nn": {
        "token_embeddings": "none",
        "embedding_scale": "none",
        "positions": "none",
        "embedding_dropout": "none",
        "output_projection": "none",
        "output_bias": False,
        "final_norm": True,
        "initialization": "xavier_uniform_fused",
    },
    # One small projection for all heads, and the decoder layer that attends to the memory
    # twice. The printed encoder takes no padding mask: hand all-True masks to reproduce it.
    "shared_heads": {
        "positions": "sinusoidal_per_column",
        "embedding_dropout": "decoder",
        "head_projection": "shared",
        "qkv_bias": False,
        "decoder_attention": "self_over_memory",
        "dropout": 0.2,
        **_NO_INNER_DROPOUT,
        "dropout_placement": "norm",
        "initialization": "torch_default",
    },
    # Components printed with a torch.nn.Transformer; what they leave open follows that module.
    "bias_free_qkv": {
        "embedding_dropout": "none",
        "qkv_bias": False,
        "final_norm": True,
        "attention_dropout": 0.0,
        "initialization": "torch_default",
    },
    "pre_norm": _STD_PRE_NORM | {"norm_epsilon": 1e-6, "final_norm": True},
    "pre_norm_memory_norm": _STD_PRE_NORM
    | {"max_length": 100, "qkv_bias": False, "attention_output_bias": False, "memory_norm": True},
    # Its printed output is log_softmax of the logits; this library returns the logits.
    "pre_norm_log_softmax": _STD_PRE_NORM
    | {"norm_epsilon": 1e-6, "final_norm": True, "initialization": "torch_default"},
    # Marian, in the sizes and with the ids of the opus-mt models: BOS is the pad id.
    "marian": {
        **_vocabulary(58_101),
        "token_embeddings": "shared",
        "positions": "sinusoidal_halves",
        "output_projection": "tied",
        "activation": "silu",
        **_NO_INNER_DROPOUT,
        "initialization": "normal",
        **_ids(pad=58_100, bos=58_100, eos=0),
    },
    # Marian's own files (Junczys-Dowmunt et al. 2018), as the teachers of OPUS-MT and Firefox; the
    # models above were converted to transformers, which has other sinusoids and another start.
    "marian_npz": {
        **_vocabulary(32_001),
        "token_embeddings": "shared",
        "start_embedding": "zero",
        "positions": "sinusoidal_tensor2tensor",
        "output_projection": "tied",
        "norm_epsilon": 1e-6,
        **_NO_INNER_DROPOUT,
        "initialization": "vaswani2017",  # embeddings have unit length
        **_ids(pad=32_000, bos=32_000, eos=0),
    },
    # Pegasus (Zhang et al. 2020), in the sizes and with the ids of pegasus-large: BOS is padding.
    "pegasus": _BART_LARGE
    | {
        **_vocabulary(96_103),
        **_layers(16, 16),
        "positions": "sinusoidal_halves",
        **_FINAL_PRE_NORM,
        **_ids(pad=0, bos=0, eos=1),
    },
    # BART (Lewis et al. 2020), as bart-large; targets begin with the id of EOS.
    "bart": _BART_LARGE
    | {
        **_vocabulary(50_265),
        "embedding_scale": "none",
        "positions": "learned",
        "position_offset": 2,
        "embedding_norm": True,
        "activation": "gelu",
        **_ids(pad=1, bos=2, eos=2),
    },
    # mBART (Liu et al. 2020), as mbart-large-50.
    "mbart": _BART_LARGE
    | {
        **_vocabulary(250_054),
        "positions": "learned",
        "position_offset": 2,
        "embedding_norm": True,
        "activation": "gelu",
        **_FINAL_PRE_NORM,
        **_NO_INNER_DROPOUT,
        **_ids(pad=1, bos=2, eos=2),
    },
    # M2M100 (Fan et al. 2021), as m2m100_418M; the dense models of NLLB have the same blocks.
    "m2m100": _BART_LARGE
    | {
        **_vocabulary(128_112),
        "positions": "sinusoidal_tensor2tensor",
        "position_offset": 2,
        "output_bias": False,
        **_FINAL_PRE_NORM,
        "activation_dropout": 0.0,
        **_ids(pad=1, bos=2, eos=2),
    },
    # Blenderbot (Roller et al. 2021), as blenderbot-3B.
    "blenderbot": _BART_LARGE
    | {
        **_vocabulary(8_008),
        "d_model": 2560,
        "num_heads": 32,
        "d_ff": 10_240,
        **_layers(2, 24),
        "max_length": 128,
        "positions": "learned",
        "activation": "gelu",
        **_FINAL_PRE_NORM,
        **_NO_INNER_DROPOUT,
        **_ids(pad=0, bos=1, eos=2),
    },
    # T5 (Raffel et al. 2020), as t5-small.
    "t5": _T5
    | _vocabulary(32_128)
    | {"d_kv": 64, "output_projection": "tied", "output_scale": "inverse_sqrt_d_model"},
    # T5 v1.1 and Flan-T5 (Shazeer 2020, Chung et al. 2022), as t5-v1_1-base.
    "t5_v1_1": _T5_V1_1
    | _vocabulary(32_128)
    | {"d_model": 768, "num_heads": 12, **_layers(12, 12)},
    # mT5 (Xue et al. 2021), as mt5-small.
    "mt5": _MT5 | _vocabulary(250_112),
    # UMT5 (Chung et al. 2023), as umt5-small.
    "umt5": _MT5 | _vocabulary(256_384) | {"relative_attention_bias": "per_layer"},
    # T5Gemma (Zhang et al. 2025), as t5gemma-2b-2b: the defaults of T5GemmaConfig in transformers.
    "t5gemma": _GEMMA
    | _vocabulary(256_000)
    | _layers(26, 26)
    | {
        "d_model": 2304,
        "num_kv_heads": 4,
        "d_ff": 9216,
        "max_length": 8192,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "logit_softcap": 30.0,
        "attention_softcap": 50.0,
    },
    # T5Gemma 2 (Zhang et al. 2025), as t5gemma-2-270m-270m: sizes of jax-ml/bonsai.
    "t5gemma2": _GEMMA
    | _vocabulary(262_144)
    | _layers(18, 18)
    | {
        "d_model": 640,
        "num_heads": 4,
        "num_kv_heads": 1,
        "max_length": 32_768,
        "token_embeddings": "shared",
        "rotary_theta": 1e6,
        "rotary_scaling": 8.0,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "sliding_window_theta": 1e4,
        "encoder_window": "split",
        "query_key_norm": True,
        "decoder_attention": "merged",
    },
    # A translation model of the blocks of today's language models (Touvron et al. 2023), sized as
    # the base model: RMS norms before the sublayers, rotary positions, gated SiLU (Shazeer 2020)
    # of two thirds of the width, four query heads for each head of keys (Ainslie et al. 2023).
    "modern": {
        "num_kv_heads": 2,
        "d_ff": 1408,
        "token_embeddings": "shared",
        "positions": "rotary",
        "output_projection": "tied",
        **_NO_BIASES,
        "gated_feed_forward": True,
        "activation": "silu",
        "norm": "rms_norm",
        "norm_epsilon": 1e-6,
        **_FINAL_PRE_NORM,
        **_NO_INNER_DROPOUT,
        "initialization": "vaswani2017",
    },
    # Whisper (Radford et al. 2022), as whisper-tiny. The encoder's sinusoids are a table of the
    # file, which transformers does not train; see `--freeze`.
    "whisper": {
        **_vocabulary(51_865),
        "source_features": 80,
        "d_model": 384,
        "num_heads": 6,
        "d_ff": 1536,
        "encoder_max_length": 1500,
        **_layers(4, 4),
        "max_length": 448,
        "embedding_scale": "none",
        "positions": "learned",
        "output_projection": "tied",
        "output_bias": False,
        "key_bias": False,
        "activation": "gelu",
        **_FINAL_PRE_NORM,
        "dropout": 0.0,
        "initialization": "normal",
        **_ids(pad=50_360, bos=50_258, eos=50_257),
    },
}
