"""The program as a port to Equinox: modules of one vector or one row, under `jax.vmap`."""

import equinox
import jax
import jax.numpy as jnp

from tests.parity_tool import mistakes
from tests.parity_tool.torch_program import DEPTH, PAD, WIDTH

KEY = jax.random.key(0)


class Attend(equinox.Module):
    projections: dict
    mistake: mistakes.Mistake = equinox.field(static=True)
    place: str = equinox.field(static=True)

    def __call__(self, x, y, mask):
        q, k, v = (
            jax.vmap(self.projections[name])(
                mistakes.rounded(self.mistake, f"{self.place}.{name}", z)
            )
            for name, z in (("query", x), ("key", y), ("value", y))
        )
        heads = mistakes.attend(self.mistake, self.place, q, k, v, mask)
        return jax.vmap(self.projections["out"])(heads)


class Network(equinox.Module):
    parts: tuple
    mistake: mistakes.Mistake = equinox.field(static=True)
    place: str = equinox.field(static=True)

    def __call__(self, x):  # one vector
        x = self.parts[0](mistakes.rounded(self.mistake, f"{self.place}.inner", x))
        return self.parts[1](mistakes.activate(self.mistake, self.place, x))


class Layer(equinox.Module):
    attends: list
    norms: list
    network: Network
    place: str = equinox.field(static=True)

    def __call__(self, x, mask, memory=None, memory_mask=None):
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attends[0](y, y, mask)
        if memory is not None:
            x = x + self.attends[1](jax.vmap(self.norms[1])(x), memory, memory_mask)
        y = jax.vmap(self.network)(jax.vmap(self.norms[-1])(x))
        return y if self.network.mistake.has("no residual", self.place) else x + y


class Translator(equinox.Module):
    table: equinox.nn.Embedding
    stacks: list
    norms: list
    head: equinox.nn.Linear
    mistake: mistakes.Mistake = equinox.field(static=True)

    def __call__(self, src, tgt):  # one row
        seen, earlier = (src != PAD)[None], jnp.tril(jnp.ones((len(tgt), len(tgt)), bool))
        x, y = (
            jax.vmap(self.table)(ids) * mistakes.embedding_scale(self.mistake)
            + mistakes.positions(self.mistake, len(ids))
            for ids in (src, tgt)
        )
        for layer in self.stacks[0]:
            x = layer(x, seen)
        if self.mistake.kind != "no norm":
            x = jax.vmap(self.norms[0])(x)
        for layer in self.stacks[1]:
            y = layer(y, earlier, x, seen)
        return jax.vmap(self.head)(jax.vmap(self.norms[1])(y))


def build(mistake, state):
    """Return the module, and a function that calls it, with the weights of the torch program."""
    state = mistake.weights(state)

    def dense(name):
        weight, bias = jnp.array(state[f"{name}.weight"]), jnp.array(state[f"{name}.bias"])
        layer = equinox.nn.Linear(*weight.shape[::-1], key=KEY)
        return equinox.tree_at(lambda one: (one.weight, one.bias), layer, (weight, bias))

    def norm(name):
        rms, epsilon = mistake.has("root mean square", name), mistakes.epsilon(mistake, name)
        layer = (equinox.nn.RMSNorm if rms else equinox.nn.LayerNorm)(
            WIDTH, eps=epsilon, use_bias=not rms
        )
        layer = equinox.tree_at(lambda one: one.weight, layer, jnp.array(state[f"{name}.weight"]))
        if rms:
            return layer
        return equinox.tree_at(lambda one: one.bias, layer, jnp.array(state[f"{name}.bias"]))

    def layer(name, count):
        attends = [
            Attend({part: dense(f"{place}.{part}") for part in PARTS}, mistake, place)
            for place in (f"{name}.attentions.{i}" for i in range(count))
        ]
        norms = [norm(f"{name}.norms.{i}") for i in range(count + 1)]
        parts = tuple(dense(f"{name}.feed.{part}") for part in ("inner", "outer"))
        return Layer(attends, norms, Network(parts, mistake, f"{name}.feed"), name)

    stacks = [
        [layer(f"{stack}.{i}", count) for i in range(DEPTH)]
        for stack, count in (("encoder", 1), ("decoder", 2))
    ]
    table = equinox.nn.Embedding(weight=jnp.array(state["words.weight"]))
    norms = [norm("encoder_norm"), norm("decoder_norm")]
    model = Translator(table, stacks, norms, dense("head"), mistake)
    return model, lambda module, src, tgt: jax.vmap(module)(jnp.array(src), jnp.array(tgt))


PARTS = ("query", "key", "value", "out")
