"""A small model that has learned something: its targets vary, and end at different steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_transformer import TransformerConfig, apply, init_params

SYMBOLS, LONGEST = 15, 15


def sequences(count, seed=0, longest=LONGEST):
    """Return (src, tgt): ragged sequences of symbols, and the same backwards; both end in 2."""
    random = np.random.default_rng(seed)
    src, tgt = np.zeros((2, count, longest + 1), np.int32)
    for row in range(count):
        symbols = random.integers(3, 3 + SYMBOLS, random.integers(1, longest + 1))
        src[row, : len(symbols) + 1] = [*symbols, 2]
        tgt[row, : len(symbols) + 1] = [*symbols[::-1], 2]
    return src, tgt


def train_to_reverse(config, steps, batch=16, seed=0):
    """Return parameters that learned for a while to reverse sequences."""
    src, tgt = (
        jnp.asarray(side).reshape(steps, batch, -1) for side in sequences(steps * batch, seed)
    )
    optimizer = optax.adam(optax.linear_onecycle_schedule(steps, 5e-3))
    params = jax.jit(init_params, static_argnums=1)(jax.random.key(seed), config)

    def loss(params, src, tgt):
        begun = jnp.concatenate([jnp.full_like(tgt[:, :1], config.bos_id), tgt[:, :-1]], 1)
        logits = apply(params, config, src, begun)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tgt)
        return jnp.sum(losses, where=tgt != config.pad_id) / jnp.sum(tgt != config.pad_id)

    def step(carry, batch):
        params, state = carry
        value, gradient = jax.value_and_grad(loss)(params, *batch)
        updates, state = optimizer.update(gradient, state)
        return (optax.apply_updates(params, updates), state), value

    train = jax.jit(lambda carry, batches: jax.lax.scan(step, carry, batches))
    (params, _), losses = train((params, optimizer.init(params)), (src, tgt))
    assert losses[-1] < losses[0] / 2
    return params


@pytest.fixture(scope="session")
def reversal_model():
    """Return (config, params) of a model that reverses sequences, with errors."""
    config = TransformerConfig(
        src_vocab_size=3 + SYMBOLS,
        tgt_vocab_size=3 + SYMBOLS,
        d_model=32,
        num_heads=2,
        d_ff=64,
        num_encoder_layers=1,
        num_decoder_layers=1,
        max_length=40,
        token_embeddings="shared",
        output_projection="tied",
        output_bias=False,
        dropout=0.0,
    )
    return config, train_to_reverse(config, steps=200)
