"""The program as a port to Linen: heads in the kernels, feed-forward networks inside the layers."""

import re
from functools import partial

import jax.numpy as jnp
from flax import linen as nn

from tests.parity_tool import mistakes
from tests.parity_tool.torch_program import DEPTH, WIDE, WORDS
from tests.porting.models import HEADS, WIDTH


def called(place):
    """Return what this copy calls a part: no name is that of the torch program."""
    return place.capitalize().replace(".", "_")


class MultiHead(nn.Module):
    mistake: mistakes.Mistake
    place: str

    @nn.compact
    def __call__(self, x, y, mask):
        split, dense = (HEADS, WIDTH // HEADS), partial(nn.DenseGeneral, param_dtype=x.dtype)

        def product(name):
            layer = dense(split, name=called(name))
            return lambda z: layer(z).reshape(*z.shape[:2], WIDTH)

        products = {name: product(name) for name in ("ask", "offer", "carry")}
        out = dense(WIDTH, (-2, -1), name="Join")
        products["join"] = lambda z: out(z.reshape(*z.shape[:2], *split))
        return mistakes.attention(self.mistake, self.place, products, x, y, mask)


class Block(nn.Module):
    mistake: mistakes.Mistake
    place: str
    count: int

    @nn.compact
    def __call__(self, x, *others):
        mistake, place = self.mistake, self.place
        attentions = [
            MultiHead(mistake, f"{place}.mixers.{i}", name=f"Mixers_{i}") for i in range(self.count)
        ]
        norms = [norm(mistake, f"{place}.norms.{i}", f"Norms_{i}") for i in range(self.count + 1)]
        widen, narrow = (
            nn.Dense(size, name=name, param_dtype=x.dtype)
            for name, size in (("Network_widen", WIDE), ("Network_narrow", WIDTH))
        )
        network = partial(mistakes.network, mistake, f"{place}.network", widen, narrow)
        return mistakes.layer(mistake, place, attentions, norms, network, x, *others)


def norm(mistake, place, name):
    cls = nn.RMSNorm if mistake.has("root mean square", place) else nn.LayerNorm
    return cls(epsilon=mistakes.epsilon(mistake, place), param_dtype=jnp.float64, name=name)


class Translator(nn.Module):
    mistake: mistakes.Mistake

    @nn.compact
    def __call__(self, src, tgt):
        table = nn.Embed(WORDS, WIDTH, param_dtype=jnp.float64, name="Words_in")
        stacks = [
            [
                Block(self.mistake, f"{stack}.{i}", count, name=called(f"{stack}.{i}"))
                for i in range(DEPTH)
            ]
            for stack, count in (("readers", 1), ("writers", 2))
        ]
        norms = [norm(self.mistake, name, called(name)) for name in ("ends.0", "ends.1")]
        head = nn.Dense(WORDS, param_dtype=jnp.float64, name="Head")

        def enter(ids):
            return mistakes.embed(self.mistake, table(ids))

        return mistakes.translate(self.mistake, src, tgt, enter, stacks, norms, head)


def build(mistake, state):
    """Return the module, and a function that calls it, with the weights of the torch program."""
    params = {}
    for name, leaf in mistake.weights(state).items():
        place, _, kind = name.rpartition(".")
        inner = params
        for part in re.findall(r"(?:readers|writers|mixers)\.\d|\w+(?:\.\w+)?$", place):
            inner = inner.setdefault(called(part), {})
        if kind == "weight":
            kind = "scale" if leaf.ndim == 1 else "embedding" if place == "words_in" else "kernel"
            leaf = leaf.T if kind == "kernel" else leaf
        if place.endswith((".ask", ".offer", ".carry")):
            leaf = leaf.reshape(*leaf.shape[:-1], HEADS, -1)
        elif name.endswith(".join.weight"):
            leaf = leaf.reshape(HEADS, -1, WIDTH)
        inner[kind] = leaf
    return Translator(mistake), lambda module, src, tgt: module.apply({"params": params}, src, tgt)
