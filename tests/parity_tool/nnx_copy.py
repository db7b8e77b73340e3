"""The program as a port to NNX: one fused layer list, sequence first in the decoder's stream."""

import jax.numpy as jnp
from flax import nnx

from tests.parity_tool import mistakes
from tests.parity_tool.torch_program import DEPTH, PAD, WIDTH, WORDS

FLOAT = {"param_dtype": jnp.float64, "rngs": nnx.Rngs(0)}


class Heads(nnx.Module):
    def __init__(self, mistake, state, place):
        self.mistake, self.place = mistake, place
        self.to_q, self.to_k, self.to_v, self.back = (
            dense(state, f"{place}.{name}") for name in ("query", "key", "value", "out")
        )

    def __call__(self, x, y, mask):
        x, y = jnp.swapaxes(x, 0, 1), jnp.swapaxes(y, 0, 1)
        q, k, v = (
            layer(mistakes.rounded(self.mistake, f"{self.place}.{name}", z))
            for name, layer, z in (
                ("query", self.to_q, x),
                ("key", self.to_k, y),
                ("value", self.to_v, y),
            )
        )
        heads = mistakes.attend(self.mistake, self.place, q, k, v, mask)
        return jnp.swapaxes(self.back(heads), 0, 1)


class Mlp(nnx.Module):
    def __init__(self, mistake, state, place):
        self.mistake, self.place = mistake, place
        self.up, self.down = (dense(state, f"{place}.{part}") for part in ("inner", "outer"))

    def __call__(self, x):
        x = self.up(mistakes.rounded(self.mistake, f"{self.place}.inner", x))
        return self.down(mistakes.activate(self.mistake, self.place, x))


class Layer(nnx.Module):
    def __init__(self, mistake, state, place, count):
        self.mistake, self.place = mistake, place
        self.heads = nnx.List(
            [Heads(mistake, state, f"{place}.attentions.{i}") for i in range(count)]
        )
        self.norms = nnx.List(
            [norm(mistake, state, f"{place}.norms.{i}") for i in range(count + 1)]
        )
        self.mlp = Mlp(mistake, state, f"{place}.feed")

    def __call__(self, x, mask, memory=None, memory_mask=None):
        y = self.norms[0](x)
        x = x + self.heads[0](y, y, mask)
        if memory is not None:
            x = x + self.heads[1](self.norms[1](x), memory, memory_mask)
        y = self.mlp(self.norms[-1](x))
        return y if self.mistake.has("no residual", self.place) else x + y


def dense(state, name):
    weight = state[f"{name}.weight"].T
    layer = nnx.Linear(*weight.shape, **FLOAT)
    layer.kernel, layer.bias = (
        nnx.Param(jnp.array(weight)),
        nnx.Param(jnp.array(state[f"{name}.bias"])),
    )
    return layer


def norm(mistake, state, name):
    rms = mistake.has("root mean square", name)
    layer = (nnx.RMSNorm if rms else nnx.LayerNorm)(
        WIDTH, epsilon=mistakes.epsilon(mistake, name), **FLOAT
    )
    layer.scale = nnx.Param(jnp.array(state[f"{name}.weight"]))
    if not rms:
        layer.bias = nnx.Param(jnp.array(state[f"{name}.bias"]))
    return layer


class Translator(nnx.Module):
    """Streams are [L, B, D] between the layers."""

    def __init__(self, mistake, state):
        self.mistake = mistake
        self.table = nnx.Embed(WORDS, WIDTH, **FLOAT)
        self.table.embedding = nnx.Param(jnp.array(state["words.weight"]))
        self.readers, self.writers = (
            nnx.List([Layer(mistake, state, f"{stack}.{i}", count) for i in range(DEPTH)])
            for stack, count in (("encoder", 1), ("decoder", 2))
        )
        self.last = nnx.List([norm(mistake, state, f"{s}_norm") for s in ("encoder", "decoder")])
        self.logits = dense(state, "head")

    def __call__(self, src, tgt):
        seen = (src != PAD)[:, None, None]
        earlier = jnp.tril(jnp.ones((tgt.shape[1], tgt.shape[1]), bool))[None, None]
        x, y = (
            self.table(ids).swapaxes(0, 1) * mistakes.embedding_scale(self.mistake)
            + mistakes.positions(self.mistake, ids.shape[1])[:, None]
            for ids in (src, tgt)
        )
        for layer in self.readers:
            x = layer(x, seen)
        if self.mistake.kind != "no norm":
            x = self.last[0](x)
        for layer in self.writers:
            y = layer(y, earlier, x, seen)
        return self.logits(self.last[1](y)).swapaxes(0, 1)


def build(mistake, state):
    """Return the module, and a function that calls it, with the weights of the torch program."""
    model = Translator(mistake, mistake.weights(state))
    return model, lambda module, src, tgt: module(jnp.array(src), jnp.array(tgt))
