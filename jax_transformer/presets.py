"""The described implementations by name: the fields in which each differs from the defaults.

The defaults of `TransformerConfig` are what most of them share: separate embeddings scaled by
sqrt(d_model), interleaved sinusoids, biases everywhere, ReLU, dropout 0.1.
A new preset is one entry here; the tests over presets find it by its name.
"""

from typing import Any

_PRE_NORM = {"norm_placement": "pre", "norm": "std_norm"}

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
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
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
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "dropout_placement": "norm",
        "initialization": "torch_default",
    },
    # Components printed beside a torch.nn.Transformer; what they leave open follows that module.
    "bias_free_qkv": {
        "embedding_dropout": "none",
        "qkv_bias": False,
        "final_norm": True,
        "attention_dropout": 0.0,
        "initialization": "torch_default",
    },
    "pre_norm": _PRE_NORM | {"norm_epsilon": 1e-6, "final_norm": True},
    "pre_norm_memory_norm": _PRE_NORM
    | {
        "max_length": 100,
        "qkv_bias": False,
        "attention_output_bias": False,
        "memory_norm": True,
    },
    # Its printed output is log_softmax of the logits; this library returns the logits.
    "pre_norm_log_softmax": _PRE_NORM
    | {"norm_epsilon": 1e-6, "final_norm": True, "initialization": "torch_default"},
    # Marian, in the sizes and with the ids of the opus-mt models: BOS is the pad id.
    "marian": {
        "src_vocab_size": 58_101,
        "tgt_vocab_size": 58_101,
        "token_embeddings": "shared",
        "positions": "sinusoidal_halves",
        "output_projection": "tied",
        "activation": "silu",
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "initialization": "normal",
        "pad_id": 58_100,
        "bos_id": 58_100,
        "eos_id": 0,
    },
    # Pegasus (Zhang et al. 2020), in the sizes and with the ids of pegasus-large: BOS is padding.
    "pegasus": {
        "src_vocab_size": 96_103,
        "tgt_vocab_size": 96_103,
        "d_model": 1024,
        "num_heads": 16,
        "d_ff": 4096,
        "num_encoder_layers": 16,
        "num_decoder_layers": 16,
        "max_length": 1024,
        "token_embeddings": "shared",
        "positions": "sinusoidal_halves",
        "output_projection": "tied",
        "norm_placement": "pre",
        "final_norm": True,
        "initialization": "normal",
        "pad_id": 0,
        "bos_id": 0,
        "eos_id": 1,
    },
}
