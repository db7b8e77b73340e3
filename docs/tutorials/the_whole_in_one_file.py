# %% [markdown]
# # The whole in one file
#
# Text, tokenizer, model, loss, training and search: the Transformer of Vaswani et al. (2017) as
# plain functions of arrays, without modules. It learns to write dates in German. At the end this
# library trains the same model from the same numbers, and the losses are equal.
#
# Letters in shapes: B batch, S source length, T target length, L either, D d_model, H heads,
# K width of a head, V vocabulary.

# %%
import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import optax

# %% [markdown]
# ## Text
#
# Pairs of lines: a date in English and the same date in German.

# %%
ENGLISH = "january february march april may june july august september october november december"
GERMAN = "januar februar märz april mai juni juli august september oktober november dezember"
MONTHS = list(zip(ENGLISH.split(), GERMAN.split()))
PAIRS = [
    (f"{month} {day}, {year}", f"{day}. {monat} {year}")
    for (month, monat), day, year in itertools.product(MONTHS, range(1, 29), range(1950, 2030))
]
random.Random(0).shuffle(PAIRS)
TRAINING, HELD_OUT = PAIRS[:20_000], PAIRS[20_000:20_200]

# %% [markdown]
# ## Tokenizer
#
# A token is a character. Three ids are special: padding, the beginning and the end of a target.

# %%
PAD, BEGIN, END = range(3)
CHARACTERS = sorted(set("".join(itertools.chain(*PAIRS))))
IDS = {character: number for number, character in enumerate(CHARACTERS, 3)}
VOCABULARY = 3 + len(CHARACTERS)


def encode_text(line):
    """Return the ids of a line, END last."""
    return [*(IDS[character] for character in line), END]


def decode_text(ids):
    """Return the line of ids, up to END."""
    line = itertools.takewhile(lambda number: number != END, ids)
    return "".join(CHARACTERS[number - 3] for number in line if number >= 3)


def batch_of(pairs, length=24):
    """Return sources, decoder inputs and decoder outputs as ids [B, length]."""
    sources, targets = zip(
        *((encode_text(source), encode_text(target)) for source, target in pairs)
    )
    inputs = [[BEGIN, *target[:-1]] for target in targets]
    rows = (sources, inputs, targets)
    return tuple(np.array([ids + [PAD] * (length - len(ids)) for ids in part]) for part in rows)


# %% [markdown]
# ## Parameters
#
# They are a nested dict of arrays. A matrix is drawn uniformly with the variance of Glorot and
# Bengio (2010); biases are 0, and scales of norms are 1.

# %%
D, H, INNER, LAYERS = 64, 4, 128, 2


def init_matrix(key, inputs, outputs):
    """Return a matrix [inputs, outputs]."""
    limit = (6 / (inputs + outputs)) ** 0.5
    return jax.random.uniform(key, (inputs, outputs), minval=-limit, maxval=limit)


def init_layer(key, attentions):
    """Return the parameters of a layer that has these attentions."""
    keys = iter(jax.random.split(key, 4 * len(attentions) + 2))
    layer, norm = {}, {"norm": {"scale": jnp.ones(D), "bias": jnp.zeros(D)}}
    for name in attentions:
        parts = ("query", "key", "value", "output")
        layer[name] = {part: {"kernel": init_matrix(next(keys), D, D)} for part in parts}
        layer[f"{name}_residual"] = norm
    layer["feed_forward"] = {
        "inner": {"kernel": init_matrix(next(keys), D, INNER), "bias": jnp.zeros(INNER)},
        "outer": {"kernel": init_matrix(next(keys), INNER, D), "bias": jnp.zeros(D)},
    }
    return layer | {"feed_forward_residual": norm}


def init_stack(key, attentions):
    """Return the parameters of a stack of layers."""
    keys = jax.random.split(key, LAYERS)
    return {f"layers_{i}": init_layer(key, attentions) for i, key in enumerate(keys)}


def init_model(key):
    """Return all parameters; source, target and the last product share one table [V, D]."""
    keys = jax.random.split(key, 3)
    return {
        "token_embedding": {"embedding": D**-0.5 * jax.random.normal(keys[0], (VOCABULARY, D))},
        "encoder": init_stack(keys[1], ("self_attention",)),
        "decoder": init_stack(keys[2], ("self_attention", "cross_attention")),
    }


# %% [markdown]
# ## Model
#
# Section 3 of the paper, one function for each equation or paragraph.


# %%
def linear(params, x):
    """Return x W + b for vectors [..., inputs]."""
    return x @ params["kernel"] + params.get("bias", 0)


def norm(params, x):
    """Return rows with mean 0 and variance 1, scaled and shifted (Ba et al. 2016)."""
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred**2).mean(-1, keepdims=True)
    return centred / jnp.sqrt(variance + 1e-6) * params["scale"] + params["bias"]


def positions(length):
    """Return the sinusoids [length, D] (section 3.5): a sine and a cosine of each frequency."""
    angles = np.arange(length)[:, None] / 10_000 ** (np.arange(0, D, 2) / D)
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(length, D)


def embed(params, ids):
    """Return the vectors [B, L, D] of ids [B, L], with their positions (section 3.4)."""
    return params["token_embedding"]["embedding"][ids] * D**0.5 + positions(ids.shape[1])


def split_heads(x):
    """Return [B, H, L, K] for [B, L, D]."""
    return x.reshape(*x.shape[:2], H, D // H).swapaxes(1, 2)


def attention(params, queries, keys, mask):
    """Return what queries gather [B, T, D] (section 3.2); in a mask [B, 1, T, S] True = attend."""
    q, k, v = (
        split_heads(linear(params[name], x))
        for name, x in (("query", queries), ("key", keys), ("value", keys))
    )
    scores = jnp.einsum("bhtk,bhsk->bhts", q, k) / (D // H) ** 0.5
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
    gathered = jnp.einsum("bhts,bhsk->bhtk", weights, v)
    return linear(params["output"], gathered.swapaxes(1, 2).reshape(queries.shape))


def feed_forward(params, x):
    """Return max(0, x W1 + b1) W2 + b2 (equation 2)."""
    return linear(params["outer"], jax.nn.relu(linear(params["inner"], x)))


def encoder(params, src):
    """Return the memory [B, S, D] of source ids [B, S] (section 3.1)."""
    x, mask = embed(params, src), (src != PAD)[:, None, None, :]
    for layer in params["encoder"].values():
        gathered = attention(layer["self_attention"], x, x, mask)
        x = norm(layer["self_attention_residual"]["norm"], x + gathered)
        x = norm(layer["feed_forward_residual"]["norm"], x + feed_forward(layer["feed_forward"], x))
    return x


def decoder(params, tgt, memory, src):
    """Return the logits [B, T, V] of the token after each target token (section 3.1)."""
    x, src_mask = embed(params, tgt), (src != PAD)[:, None, None, :]
    causal = np.tril(np.ones((tgt.shape[1], tgt.shape[1]), bool))
    tgt_mask = causal & (tgt != PAD)[:, None, None, :]
    for layer in params["decoder"].values():
        gathered = attention(layer["self_attention"], x, x, tgt_mask)
        x = norm(layer["self_attention_residual"]["norm"], x + gathered)
        gathered = attention(layer["cross_attention"], x, memory, src_mask)
        x = norm(layer["cross_attention_residual"]["norm"], x + gathered)
        x = norm(layer["feed_forward_residual"]["norm"], x + feed_forward(layer["feed_forward"], x))
    return x @ params["token_embedding"]["embedding"].T


# %% [markdown]
# ## Loss
#
# The cross-entropy is the logarithm of the sum of exponentials minus the logit of the right
# token. It is summed over the tokens and divided once by their number, without padding.


# %%
def loss_of(params, batch):
    """Return the mean cross-entropy of a batch in nats a token."""
    src, tgt_in, tgt_out = batch
    logits = decoder(params, tgt_in, encoder(params, src), src)
    right = jnp.take_along_axis(logits, tgt_out[..., None], axis=-1)[..., 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - right
    return losses.sum(where=tgt_out != PAD) / (tgt_out != PAD).sum()


# %% [markdown]
# ## Loop
#
# Adam with the schedule of equation 3: the rate rises for some steps, then falls with the inverse
# square root.

# %%
WARM_UP = 200
optimizer = optax.adam(
    lambda step: D**-0.5 * jnp.minimum((step + 1) ** -0.5, (step + 1) * WARM_UP**-1.5),
    b2=0.98,
    eps=1e-9,
)


@jax.jit
def train_step(params, state, batch):
    """Return the parameters and the state after a batch, and the loss before it."""
    loss, gradients = jax.value_and_grad(loss_of)(params, batch)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


def train(params, step, steps):
    """Return the parameters after a number of steps, and the losses."""
    state, losses = optimizer.init(params), []
    for number in range(steps):
        batch = batch_of(random.Random(number).sample(TRAINING, 64))
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    return params, losses


first = init_model(jax.random.key(0))
params, losses = train(first, train_step, steps=500)
print("loss of the steps 0, 100, ...:", *(f"{loss:.3f}" for loss in losses[::100]))

# %% [markdown]
# ## Search
#
# Greedy search takes the most likely token again and again. This one computes the whole target at
# each step; the library keeps the keys and values of earlier tokens.


# %%
@jax.jit
def next_tokens(params, tgt, memory, src, position):
    """Return the most likely token [B] after a position."""
    return decoder(params, tgt, memory, src)[:, position].argmax(-1)


def translate(params, lines, length=24):
    """Return the greedy translation of each line."""
    src, _, _ = batch_of([(line, "") for line in lines])
    tgt = np.full((len(lines), length + 1), PAD)
    tgt[:, 0], memory = BEGIN, encoder(params, src)
    for position in range(length):
        tgt[:, position + 1] = next_tokens(params, tgt[:, :-1], memory, src, position)
    return [decode_text(ids[1:]) for ids in tgt.tolist()]


lines, expected = zip(*HELD_OUT)
right = np.mean([text == target for text, target in zip(translate(params, lines), expected)])
print(f"{lines[0]} -> {translate(params, lines[:1])[0]}; {right:.0%} of 200 new dates are right")

# %% [markdown]
# ## The same in the library
#
# The tree of parameters has the same names, so the library takes the same dict. In float64 the
# first 100 losses are equal to rounding.

# %%
import jax_transformer as jt

sizes = {"d_model": D, "num_heads": H, "d_ff": INNER, "dropout": 0.0}
sizes |= dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), LAYERS)
sizes |= dict.fromkeys(("src_vocab_size", "tgt_vocab_size"), VOCABULARY)
config = jt.TransformerConfig.preset("vaswani2017", **sizes)
step_of_library = jax.jit(jt.make_train_step(config, optimizer))


def library_step(params, state, batch):
    """Return what `train_step` does, computed by the library."""
    return step_of_library(params, state, jt.Batch(*batch), None)


with jax.enable_x64(True):
    wide = jax.tree.map(lambda leaf: leaf.astype(np.float64), first)
    ours, of_library = (train(wide, step, 100)[1] for step in (train_step, library_step))
difference = np.abs(np.subtract(ours, of_library)).max()
print(f"largest difference of 100 losses: {difference:.1e}")
assert difference < 1e-10
