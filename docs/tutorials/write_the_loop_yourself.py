# %% [markdown]
# # Write the loop yourself
#
# Everything that `train.py` does is made of pure functions: a tokenizer, a loss, a step, a
# placement on devices. Here they are one after the other, in a loop of your own, with a loss and an
# optimizer of your own. The model learns to translate English dates into German ones, and is saved
# as a folder that `jax-transformer translate` reads.
#
# This page asks JAX for two devices on one CPU, so that the last parts have something to share. On
# your machine leave the line out.

# %%
import jax

jax.config.update("jax_num_cpu_devices", 2)

# %% [markdown]
# ## Text becomes ids
#
# `train_byte_pair` learns a tokenizer for both sides from any lines.

# %%
import itertools
import random

from jax_transformer.tokenizers import train_byte_pair

english = "january february march april may june july august september october november december"
german = "januar februar märz april mai juni juli august september oktober november dezember"
months = list(zip(english.split(), german.split()))
pairs = [
    (f"{month} {day}, {year}", f"{day}. {monat} {year}")
    for (month, monat), day, year in itertools.product(months, range(1, 29), range(1950, 2030))
]
random.Random(0).shuffle(pairs)
pairs, held_out = pairs[:4000], pairs[4000:4200]
tokenizer = train_byte_pair(itertools.chain(*pairs), vocab_size=160)
print(tokenizer.encode_source(["july 16, 1969"]), tokenizer.src_vocab_size, "entries")

# %% [markdown]
# ## A model is a config and a tree of arrays

# %%
import numpy as np
import optax

import jax_transformer as jt

config = jt.TransformerConfig.preset(
    "pre_norm",
    d_model=64,
    num_heads=4,
    d_ff=128,
    num_encoder_layers=1,
    num_decoder_layers=1,
    src_vocab_size=tokenizer.src_vocab_size,
    tgt_vocab_size=tokenizer.tgt_vocab_size,
    max_length=32,
    dropout=0.1,
)
params = jt.init_params(jax.random.key(0), config)
print(f"{sum(leaf.size for leaf in jax.tree.leaves(params)):,} parameters")
print(jax.tree.map(np.shape, params["encoder"]["layers_0"]["self_attention"]))

# %% [markdown]
# ## Rows of ids become a batch
#
# `encode_source` and `encode_target` end each row with EOS. The decoder reads BOS and the target,
# and predicts the target and EOS. `pad` makes arrays; `jax.jit` compiles again for each length, so
# a loop uses few lengths.

# %%


def batch_of(pairs, length=16):
    """Return pairs of lines as arrays [pairs, length]."""
    sources, targets = zip(*pairs)
    targets = tokenizer.encode_target(targets)
    behind_bos = [[config.bos_id, *ids[:-1]] for ids in targets]
    rows = (tokenizer.encode_source(sources), behind_bos, targets)
    return jt.Batch(*(jt.pad(ids, config.pad_id, length) for ids in rows))


batch = batch_of(pairs[:2])
print(batch.src)
print(batch.tgt_out)

# %% [markdown]
# ## A loss of your own
#
# `cross_entropy` is a sum and a count: divide once, over all targets that belong together. Here
# the loss has one more term, which keeps the normalizer of the logits near 1. A key switches
# dropout on; validation has none.

# %%


def loss_of(params, batch, key):
    """Return the loss of a batch in nats a token, with a second term for the normalizer."""
    logits = jt.apply(params, config, batch.src, batch.tgt_in, dropout_key=key)
    total, count = jt.cross_entropy(logits, batch.tgt_out, config.pad_id, label_smoothing=0.1)
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    counted = batch.tgt_out != config.pad_id
    return (total + 1e-4 * (normalizer**2).sum(where=counted)) / count


@jax.jit
def validation_loss(params, batch):
    """Return the cross-entropy alone, in nats a token."""
    logits = jt.apply(params, config, batch.src, batch.tgt_in)
    total, count = jt.cross_entropy(logits, batch.tgt_out, config.pad_id)
    return total / count


validation = batch_of(held_out)
before = validation_loss(params, validation)
print(f"{before:.2f} nats a token; ln 160 = {np.log(160):.2f}")

# %% [markdown]
# ## The schedule, the optimizer and the step
#
# All of them are optax's. The step is a pure function: parameters and state go in and come out.

# %%
schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, warmup_steps=40, decay_steps=300)
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98))


@jax.jit
def step(params, state, batch, key):
    """Return the parameters and the state after a batch, and the loss before it."""
    loss, gradients = jax.value_and_grad(loss_of)(params, batch, key)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


# %% [markdown]
# With the cross-entropy alone, `jt.make_train_step(config, optimizer, label_smoothing=0.1)` returns
# such a step, and `num_microbatches=4` adds up the gradients of four parts of the batch: they are
# divided once by the number of all targets. `optax.MultiSteps` takes the mean of the parts' means
# instead, which is a different step if the parts have unequal numbers of targets.
#
# ## One device or many
#
# A mesh names how the devices share the work: `data` splits the rows of a batch, `fsdp` the rows
# and the parameters, `tensor` the heads. Under `jax.set_mesh`, `apply` splits the rows of a batch
# by itself, in a step of your own too, and the gradients are those of the whole batch. The dropout
# masks are those of one device (on TPUs they depend on the mesh). The same loop runs on one device
# with `make_mesh(None)`. Place a state that already exists like the parameters:
# `parameter_shardings` accepts any tree.

# %%
mesh = jt.make_mesh("fsdp=2")
params = jax.device_put(params, jt.parameter_shardings(mesh, params, config))
state = optimizer.init(params)  # lies where the parameters lie
kernel = params["encoder"]["layers_0"]["feed_forward"]["inner"]["kernel"]
print(
    dict(mesh.shape),
    kernel.shape,
    "of which a device holds",
    kernel.addressable_shards[0].data.shape,
)

# %% alt="The loss of training and of validation falls in 300 steps"
import matplotlib.pyplot as plt

losses, validations = [], {}
with jax.set_mesh(mesh):
    for number in range(300):
        drawn = random.Random(number).sample(pairs, 64)
        key = jax.random.fold_in(jax.random.key(1), number)
        params, state, loss = step(params, state, batch_of(drawn), key)
        losses.append(float(loss))
        if number % 50 == 49:
            validations[number + 1] = float(validation_loss(params, validation))
assert validations[300] < before / 4

figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
axes.plot(losses, color="0.6", label="training, smoothed targets")
axes.plot(validations.keys(), validations.values(), "ko--", label="validation")
axes.set(xlabel="step", ylabel="loss, nats a token", ylim=0)
axes.legend()
plt.show()

# %% [markdown]
# ## What it has learnt
#
# A search is one compiled function, too. The parameters are taken to one device for it.

# %%
params = jax.device_put(params, jax.devices()[0])
best = jt.generate(params, config, validation.src, max_new_tokens=16)
texts = [
    tokenizer.decode(ids[:length])
    for ids, length in zip(np.asarray(best.tokens[:, 0]), np.asarray(best.lengths[:, 0]))
]
right = np.mean([text == target for text, (_, target) in zip(texts, held_out)])
print(f"{held_out[0][0]} -> {texts[0]}; {right:.0%} of 200 new dates are right")
assert right > 0.8

# %% [markdown]
# ## A folder that all commands read
#
# `save` writes the config, the parameters and the tokenizer; `load` and `Translator` read them,
# `jax-transformer translate` and `export` too. A translation has at most twice the tokens of its
# line plus ten, unless `--max-new-tokens` sets another limit.

# %%
import subprocess
import sys

jt.save("dates", (config, params, tokenizer))
command = [sys.executable, "-m", "jax_transformer", "translate", "dates"]
lines = "july 16, 1969\nnovember 9, 1989\n"
print(subprocess.run(command, input=lines, stdout=subprocess.PIPE, text=True, check=True).stdout)

# %% [markdown]
# ## Parts of your own
#
# - **Own embeddings or positions**: a config with `token_embeddings="none"` and
#   `positions="none"` takes vectors [batch, length, d_model] in the place of ids.
# - **An own bias of the attention's scores** is the argument `position_bias` of a layer. The
#   layers are thin modules of Flax Linen, and take their part of the same tree:

# %%
from jax_transformer.model.layers import AttentionContext, EncoderLayer

x = jax.random.normal(jax.random.key(1), (2, 5, 64))
bias = jax.random.normal(jax.random.key(2), (1, 4, 5, 5))  # [1, heads, queries, keys]
layer = {"params": params["encoder"]["layers_0"]}
biased = EncoderLayer(config).apply(layer, x, AttentionContext(position_bias=bias))
assert not np.allclose(biased, EncoderLayer(config).apply(layer, x))

# %% [markdown]
# - **An own activation** is not possible: the field `activation` names relu, gelu, gelu_tanh or
#   silu.
#
# ## Where to go on
#
# - [The reference of these functions](../reference/training.md), with shapes and errors.
# - [From one device to many hosts](../how_to/many_devices.md).
# - [NNX and Equinox](../how_to/nnx_and_equinox.md): the functions need no module.
