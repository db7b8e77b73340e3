"""The program as a port to Equinox: modules of one vector or one row, under `jax.vmap`."""

import equinox
import jax
import jax.numpy as jnp

from tests.parity_tool import mistakes
from tests.parity_tool.torch_program import DEPTH
from tests.porting.models import WIDTH

KEY = jax.random.key(0)


class Part(equinox.Module):
    mistake: mistakes.Mistake = equinox.field(static=True)
    place: str = equinox.field(static=True)


class Attend(Part):
    projections: dict

    def __call__(self, x, y, mask):
        projections = {name: jax.vmap(layer) for name, layer in self.projections.items()}
        return mistakes.attention(self.mistake, self.place, projections, x, y, mask)


class Network(Part):
    parts: tuple

    def __call__(self, x):  # one vector
        return mistakes.network(self.mistake, self.place, *self.parts, x)


class Layer(Part):
    attends: list
    norms: list
    network: Network

    def __call__(self, *given):
        norms, network = [*map(jax.vmap, self.norms)], jax.vmap(self.network)
        return mistakes.layer(self.mistake, self.place, self.attends, norms, network, *given)


class Translator(Part):
    table: equinox.nn.Embedding
    stacks: list
    norms: list
    head: equinox.nn.Linear

    def __call__(self, src, tgt):  # one row
        def enter(ids):
            return mistakes.embed(self.mistake, jax.vmap(self.table)(ids))

        norms, head = [*map(jax.vmap, self.norms)], jax.vmap(self.head)
        return mistakes.translate(self.mistake, src, tgt, enter, self.stacks, norms, head)


def build(mistake, state):
    """Return the module, and a function that calls it, with the weights of the torch program."""
    state = {name: jnp.array(leaf) for name, leaf in mistake.weights(state).items()}

    def dense(name):
        weight, bias = state[f"{name}.weight"], state[f"{name}.bias"]
        layer = equinox.nn.Linear(*weight.shape[::-1], key=KEY)
        return equinox.tree_at(lambda one: (one.weight, one.bias), layer, (weight, bias))

    def norm(name):
        rms, epsilon = mistake.has("root mean square", name), mistakes.epsilon(mistake, name)
        cls = equinox.nn.RMSNorm if rms else equinox.nn.LayerNorm
        layer = cls(WIDTH, eps=epsilon, use_bias=not rms)
        layer = equinox.tree_at(lambda one: one.weight, layer, state[f"{name}.weight"])
        return layer if rms else equinox.tree_at(lambda one: one.bias, layer, state[f"{name}.bias"])

    def attend(place):
        names = ("ask", "offer", "carry", "join")
        return Attend(mistake, place, {name: dense(f"{place}.{name}") for name in names})

    def layer(name, count):
        attends = [attend(f"{name}.mixers.{i}") for i in range(count)]
        norms = [norm(f"{name}.norms.{i}") for i in range(count + 1)]
        parts = tuple(dense(f"{name}.network.{part}") for part in ("widen", "narrow"))
        return Layer(mistake, name, attends, norms, Network(mistake, f"{name}.network", parts))

    stacks = [
        [layer(f"{stack}.{i}", count) for i in range(DEPTH)]
        for stack, count in (("readers", 1), ("writers", 2))
    ]
    table = equinox.nn.Embedding(weight=state["words_in.weight"])
    norms = [norm("ends.0"), norm("ends.1")]
    model = Translator(mistake, "", table, stacks, norms, dense("head"))
    return model, lambda module, src, tgt: jax.vmap(module)(jnp.array(src), jnp.array(tgt))
