"""The program as a port to NNX: one fused layer list, sequence first in every stream."""

from functools import partial

import jax.numpy as jnp
from flax import nnx

from tests.parity_tool import mistakes
from tests.parity_tool.torch_program import DEPTH, WORDS
from tests.porting.models import WIDTH

FLOAT = {"param_dtype": jnp.float64, "rngs": nnx.Rngs(0)}


class Heads(nnx.Module):
    def __init__(self, mistake, state, place):
        names = ("ask", "offer", "carry", "join")
        self.products = nnx.Dict({name: dense(state, f"{place}.{name}") for name in names})
        self.attention = partial(mistakes.attention, mistake, place)

    def __call__(self, x, y, mask):
        x, y = x.swapaxes(0, 1), y.swapaxes(0, 1)
        return self.attention(self.products, x, y, mask).swapaxes(0, 1)


class Mlp(nnx.Module):
    def __init__(self, mistake, state, place):
        self.up, self.down = (dense(state, f"{place}.{part}") for part in ("widen", "narrow"))
        self.network = partial(mistakes.network, mistake, place)

    def __call__(self, x):
        return self.network(self.up, self.down, x)


class Layer(nnx.Module):
    def __init__(self, mistake, state, place, count):
        heads = [Heads(mistake, state, f"{place}.mixers.{i}") for i in range(count)]
        norms = [norm(mistake, state, f"{place}.norms.{i}") for i in range(count + 1)]
        self.heads, self.norms = nnx.List(heads), nnx.List(norms)
        self.mlp = Mlp(mistake, state, f"{place}.network")
        self.layer = partial(mistakes.layer, mistake, place)

    def __call__(self, *given):
        return self.layer(self.heads, self.norms, self.mlp, *given)


def dense(state, name):
    weight = state[f"{name}.weight"].T
    layer = nnx.Linear(*weight.shape, **FLOAT)
    layer.kernel = nnx.Param(jnp.array(weight))
    layer.bias = nnx.Param(jnp.array(state[f"{name}.bias"]))
    return layer


def norm(mistake, state, name):
    rms = mistake.has("root mean square", name)
    cls = nnx.RMSNorm if rms else nnx.LayerNorm
    layer = cls(WIDTH, epsilon=mistakes.epsilon(mistake, name), **FLOAT)
    layer.scale = nnx.Param(jnp.array(state[f"{name}.weight"]))
    if not rms:
        layer.bias = nnx.Param(jnp.array(state[f"{name}.bias"]))
    return layer


class Translator(nnx.Module):
    """Streams are [L, B, D] between the layers."""

    def __init__(self, mistake, state):
        self.mistake = mistake
        self.table = nnx.Embed(WORDS, WIDTH, **FLOAT)
        self.table.embedding = nnx.Param(jnp.array(state["words_in.weight"]))
        self.readers, self.writers = (
            nnx.List([Layer(mistake, state, f"{stack}.{i}", count) for i in range(DEPTH)])
            for stack, count in (("readers", 1), ("writers", 2))
        )
        self.last = nnx.List([norm(mistake, state, f"ends.{n}") for n in (0, 1)])
        self.logits = dense(state, "head")

    def __call__(self, src, tgt):
        def enter(ids):
            return mistakes.embed(self.mistake, self.table(ids)).swapaxes(0, 1)

        stacks = self.readers, self.writers
        logits = mistakes.translate(self.mistake, src, tgt, enter, stacks, self.last, self.logits)
        return logits.swapaxes(0, 1)


def build(mistake, state):
    """Return the module, and a function that calls it, with the weights of the torch program."""
    model = Translator(mistake, mistake.weights(state))
    return model, lambda module, src, tgt: module(jnp.array(src), jnp.array(tgt))
