# %% [markdown]
# # Go on from torch's Adam, and home
#
# This page continues in JAX a training that torch began. Nothing is lost, because Adam's moments
# and its step count are converted together with the weights. A layout only renames, transposes and
# stacks, so it converts a moment like a weight.
#
# ## 50 steps in torch
#
# The task is to copy a sequence backwards. Dropout is off, so that both frameworks compute the same
# losses.

# %%
import copy
import math

import numpy as np
import torch
from torch import nn


class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.source = nn.Embedding(50, 32, padding_idx=0)
        self.target = nn.Embedding(50, 32, padding_idx=0)
        self.transformer = nn.Transformer(32, 4, 2, 2, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 50)

    def forward(self, src, tgt):
        causal = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1])
        src, tgt = self.source(src) * math.sqrt(32), self.target(tgt) * math.sqrt(32)
        return self.head(self.transformer(src, tgt, tgt_mask=causal))


def make_batches(seed, count):
    random = np.random.default_rng(seed)
    for _ in range(count):
        src = random.integers(3, 50, (64, 6)).astype(np.int32)
        answers = src[:, ::-1].copy()
        yield src, np.concatenate([np.ones((64, 1), np.int32), answers[:, :-1]], 1), answers


def train(module, optimizer, batches):
    losses = []
    for src, tgt_in, tgt_out in (map(torch.from_numpy, batch) for batch in batches):
        logits = module(src.long(), tgt_in.long())
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tgt_out.flatten().long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


torch.manual_seed(0)
mine = Mine()
optimizer = torch.optim.Adam(mine.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-9)
losses = train(mine, optimizer, make_batches(0, 50))
print(f"loss {losses[0]:.3f} before, {losses[-1]:.3f} after 50 steps in torch")

# %% [markdown]
# ## 50 steps in JAX
#
# A module does not show what its `forward` does. Name what differs from the defaults, for example
# `torch_nn_model(mine, embedding_scale="none", pad_id=1, bos_id=2, eos_id=3)`, and compare the
# first loss with torch's: a wrong field causes no error.
#
# Torch's optimizer identifies its parameters only by numbers. Their names are those of
# `named_parameters()`, in the order in which the optimizer was given them. Rate, betas and epsilon
# are settings: name the same ones.

# %%
import jax
import optax

from jax_transformer import Batch, convert, make_train_step

config, layout = convert.torch_nn_model(mine)
params = convert.from_torch(mine.state_dict(), config, layout)
names = [name for name, _ in mine.named_parameters()]

ours = optax.adam(1e-3, b1=0.9, b2=0.98, eps=1e-9)
fresh = ours.init(params)
state = convert.adam_from_torch(optimizer.state_dict(), names, fresh, config, layout)
step = jax.jit(make_train_step(config, ours))


def train_on(params, state, batches):
    losses = []
    for batch in batches:
        params, state, loss = step(params, state, Batch(*batch))
        losses.append(float(loss))
    return params, state, losses


stayed = copy.deepcopy((mine, optimizer))  # the same training, had it stayed in torch
expected = train(*stayed, make_batches(1, 50))
forgotten = train_on(params, fresh, make_batches(1, 50))[2]
params, state, losses = train_on(params, state, make_batches(1, 50))


def largest(one, other):  # relative to the losses
    return np.abs(np.divide(one, other) - 1).max()


first = largest(losses[:5], expected[:5])
print(f"from a training that stayed in torch, the losses differ by {first:.1e} in 5 steps")
print(f"and by {largest(losses, expected):.1e} in 50;")
print(f"without the moments, by {largest(forgotten, expected):.1e}")
assert largest(losses[:1], expected[:1]) <= 3e-7
assert largest(losses, expected) < 1e-3 < largest(forgotten, expected)

# %% [markdown]
# ## And home

# %%
home = Mine()
home.load_state_dict(convert.to_torch(params, config, layout), strict=True)
optimizer = torch.optim.Adam(home.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-9)
state_dict = optimizer.state_dict()  # its settings
optimizer.load_state_dict(convert.adam_to_torch(state, names, state_dict, config, layout))
_, _, expected = train_on(params, state, make_batches(2, 5))
losses = train(home, optimizer, make_batches(2, 5))
print(f"from a training that stayed in JAX, by {largest(losses, expected):.1e}")
assert largest(losses[:1], expected[:1]) <= 3e-7

# %% [markdown]
# The differences after many steps are rounding, which Adam enlarges where a gradient is nearly 0.
#
# ## Where to go on
#
# - [Port your torch model](../tutorials/port_your_torch_model.py): the config, the layout and the
#   comparison of every block.
# - A learning rate that changes is a schedule of optax with a count of its own: shift it by the
#   steps that torch has made, `lambda count: schedule(count + 50)`.
