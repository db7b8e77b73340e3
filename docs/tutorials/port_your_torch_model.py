# %% [markdown]
# # Port your torch model
#
# This page converts a model that you wrote around `torch.nn.Transformer`, with its weights, to JAX.
# It computes the same numbers there, is trained, and is loaded into the same torch class again.
#
# ## The model that you have

# %%
import math

import numpy as np
import torch
from torch import nn


class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.source = nn.Embedding(50, 32, padding_idx=0)
        self.target = nn.Embedding(50, 32, padding_idx=0)
        self.transformer = nn.Transformer(
            32, 4, 2, 2, 64, activation="gelu", norm_first=True, batch_first=True
        )
        self.head = nn.Linear(32, 50)

    def forward(self, src, tgt):
        hidden = self.transformer(
            self.source(src) * math.sqrt(32),
            self.target(tgt) * math.sqrt(32),
            tgt_mask=nn.Transformer.generate_square_subsequent_mask(tgt.shape[1]),
            src_key_padding_mask=src == 0,
            memory_key_padding_mask=src == 0,
        )
        return self.head(hidden)


torch.manual_seed(0)
mine = Mine().eval()

# %% [markdown]
# ## Its config and its names
#
# `convert.torch_nn_model` reads heads, widths, norms and activation from the module and finds the
# tables and the head around it, also a buffer of sinusoids or a table of learned positions. It
# cannot read what the module's `forward` does with them: here the embeddings are multiplied by the
# square root of the width, which is the default, and nothing is added for positions.

# %%
from jax_transformer import convert

config, layout = convert.torch_nn_model(mine)
params = convert.from_torch(mine.state_dict(), config, layout)
print(config.norm_placement, config.activation, config.positions, config.output_projection)

# %% [markdown]
# ## The same numbers

# %%
from jax_transformer import apply

random = np.random.default_rng(0)
src = random.integers(3, 50, (4, 7)).astype(np.int32)
tgt = random.integers(3, 50, (4, 5)).astype(np.int32)
src[1, 5:] = 0  # ragged: padding hides a part of one source
with torch.no_grad():
    theirs = mine(torch.from_numpy(src), torch.from_numpy(tgt)).numpy()
ours = np.asarray(apply(params, config, src, tgt))
error = np.abs(ours - theirs).max()
print(f"largest difference of the logits: {error:.1e}")
assert error < 1e-5

# %% [markdown]
# This is the rounding of float32. It grows with the length, and with 512 tokens it may be above
# 1e-5. A wrong formula shows in float64: after `jax.config.update("jax_enable_x64", True)` and
# `mine.double()`, two correct models differ by some 1e-14.
#
# If one learned table of positions serves both sides of your model, it becomes two parameters in
# JAX, which a training changes apart: `help(convert.torch_nn_model)` says what to do.
#
# ## What a wrong config looks like
#
# A wrong field may convert without an error and compute other numbers. `parity.compare` compares
# what the parts of both models computed on the same ids, and names the first block that differs.
# Here it is the feed-forward network of the first layer. The table has all blocks and their errors:

# %%
import dataclasses

from jax_transformer import parity, porting


def call(module):
    return {"logits": module(torch.from_numpy(src), torch.from_numpy(tgt))}


theirs = parity.record(mine, call)
assert parity.compare(porting.record_model(params, config, src, tgt), theirs).agrees

wrong = dataclasses.replace(config, activation="relu")
comparison = parity.compare(porting.record_model(params, wrong, src, tgt), theirs)
print("\n".join(comparison.remarks()))

# %% [markdown]
# ## Trained in JAX, handed back
#
# A training step for any optimizer of optax is a pure function. The model learns to copy its
# source backwards, and the trained weights load into the class that they came from.

# %%
import jax
import optax

from jax_transformer import Batch, make_train_step

src = random.integers(3, 50, (64, 6)).astype(np.int32)
answers = src[:, ::-1]
begins = np.full((64, 1), config.bos_id, np.int32)
batch = Batch(src, np.concatenate([begins, answers[:, :-1]], 1), answers)
optimizer = optax.adam(3e-3)
step = jax.jit(make_train_step(config, optimizer))
state, losses = optimizer.init(params), []
for _ in range(100):
    params, state, loss = step(params, state, batch)
    losses.append(float(loss))
print(f"loss {losses[0]:.2f} before, {losses[-1]:.2f} after, in nats a token")
assert losses[-1] < losses[0] / 2

home = Mine().eval()
home.load_state_dict(convert.to_torch(params, config, layout), strict=True)
with torch.no_grad():
    theirs = home(torch.from_numpy(src).long(), torch.from_numpy(batch.tgt_in).long()).numpy()
error = np.abs(np.asarray(apply(params, config, src, batch.tgt_in)) - theirs).max()
print(f"largest difference after training: {error:.1e}")
assert error < 1e-4

# %% [markdown]
# A buffer that the module computes, such as sinusoids, has no parameter: it is converted back as
# this library computes it, with another rounding of the same numbers. To keep your own bits, pass
# `buffers=mine.state_dict()` to `convert.to_torch`.
#
# ## Saved, and loaded again
#
# A model with its tokenizer is saved as a folder: `jax_transformer.save` writes it, and `load` and
# `jax-transformer translate` read it. A model of ids without a tokenizer can be saved as a file of
# its tensors:

# %%
convert.weight_files.write("mine.safetensors", convert.to_torch(params, config, layout))
again = convert.from_torch(convert.weight_files.read("mine.safetensors"), config, layout)
assert jax.tree.all(jax.tree.map(np.array_equal, params, again))

# %% [markdown]
# `convert.write_layout("mine.toml", layout, config)` keeps the layout and the config beside it, and
# `convert.read_layout` returns both.
#
# ## Where to go on
#
# - A model without `torch.nn.Transformer` needs a layout: [layouts of your own](../layouts.md).
# - A file of weights whose program you can run, and whose names nobody described: [unknown
#   weights](../porting.md).
# - Checkpoints of fairseq, JoeyNMT, OpenNMT-py and The Annotated Transformer: [other training
#   programs](../trainers.md).
