"""How many numbers the parameters of a config have, by arithmetic: nothing is built for it."""

from jax_transformer.config import TransformerConfig


def parameter_count(config: TransformerConfig) -> int:
    """Return the number of elements of all parameters; a shared table counts once.

    It costs the same for every config, so it may be asked before anything is allocated.
    """
    d_model, sides = config.d_model, ("source", "target")
    layers = config.num_encoder_layers + config.num_decoder_layers
    tables = {
        "separate": config.src_vocab_size + config.tgt_vocab_size,
        "shared": config.tgt_vocab_size,
        "none": 0,
    }[config.token_embeddings]
    if config.positions == "learned":
        tables += len(sides) * (config.max_length + config.position_offset)
    relative = 0
    if config.has_shared_relative_bias:
        relative = len(sides)
    elif config.has_relative_bias_per_layer:
        relative = layers
    vocab = config.tgt_vocab_size
    output = {
        "linear": _linear(d_model, vocab, config.output_bias),
        "tied": config.output_bias * vocab,
        "none": 0,
    }[config.output_projection]
    single_norms = config.final_norm + config.decoder_has_final_norm
    single_norms += len(sides) * config.embedding_norm
    return (
        tables * d_model
        + relative * config.relative_attention_num_buckets * config.num_heads
        + config.num_encoder_layers * _encoder_layer(config)
        + config.num_decoder_layers * _decoder_layer(config)
        + single_norms * _norm(config)
        + output
    )


def _encoder_layer(config: TransformerConfig) -> int:
    return _attention(config) + _feed_forward(config) + 2 * _norm(config)


def _decoder_layer(config: TransformerConfig) -> int:
    norms = 3 + config.memory_norm
    return 2 * _attention(config) + _feed_forward(config) + norms * _norm(config)


def _attention(config: TransformerConfig) -> int:
    heads = config.num_heads * config.head_dim
    shared = config.head_projection == "shared"
    sizes = (config.head_dim, config.head_dim) if shared else (config.d_model, heads)
    output = _linear(heads, config.d_model, config.attention_output_bias)
    return 3 * _linear(*sizes, config.qkv_bias) + output


def _feed_forward(config: TransformerConfig) -> int:
    inner = _linear(config.d_model, config.d_ff, config.feed_forward_bias)
    outer = _linear(config.d_ff, config.d_model, config.feed_forward_bias)
    return (1 + config.gated_feed_forward) * inner + outer


def _norm(config: TransformerConfig) -> int:
    return config.d_model * (1 + config.norm_bias)


def _linear(inputs: int, outputs: int, bias: bool) -> int:
    return (inputs + bias) * outputs
