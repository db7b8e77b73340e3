"""The program as a port to Linen: heads in the kernels, feed-forward networks inside the layers."""

import re
from functools import partial

import jax.numpy as jnp
from flax import linen as nn

from tests.parity_tool import mistakes
from tests.parity_tool.torch_program import DEPTH, HEADS, WIDE, WIDTH, WORDS


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

        products = {name: product(name) for name in ("query", "key", "value")}
        out = dense(WIDTH, (-2, -1), name="Out")
        products["out"] = lambda z: out(z.reshape(*z.shape[:2], *split))
        return mistakes.attention(self.mistake, self.place, products, x, y, mask)


class Block(nn.Module):
    mistake: mistakes.Mistake
    place: str
    count: int

    @nn.compact
    def __call__(self, x, *others):
        mistake, place = self.mistake, self.place
        attentions = [
            MultiHead(mistake, f"{place}.attentions.{i}", name=f"Attentions_{i}")
            for i in range(self.count)
        ]
        norms = [norm(mistake, f"{place}.norms.{i}", f"Norms_{i}") for i in range(self.count + 1)]
        inner, outer = (
            nn.Dense(size, name=name, param_dtype=x.dtype)
            for name, size in (("Feed_inner", WIDE), ("Feed_outer", WIDTH))
        )
        network = partial(mistakes.feed, mistake, f"{place}.feed", inner, outer)
        return mistakes.layer(mistake, place, attentions, norms, network, x, *others)


def norm(mistake, place, name):
    cls = nn.RMSNorm if mistake.has("root mean square", place) else nn.LayerNorm
    return cls(epsilon=mistakes.epsilon(mistake, place), param_dtype=jnp.float64, name=name)


class Translator(nn.Module):
    mistake: mistakes.Mistake

    @nn.compact
    def __call__(self, src, tgt):
        table = nn.Embed(WORDS, WIDTH, param_dtype=jnp.float64, name="Words")
        stacks = [
            [
                Block(self.mistake, f"{stack}.{i}", count, name=called(f"{stack}.{i}"))
                for i in range(DEPTH)
            ]
            for stack, count in (("encoder", 1), ("decoder", 2))
        ]
        norms = [
            norm(self.mistake, name, called(name)) for name in ("encoder_norm", "decoder_norm")
        ]
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
        for part in re.findall(r"(?:encoder|decoder|attentions)\.\d|\w+(?:\.\w+)?$", place):
            inner = inner.setdefault(called(part), {})
        if kind == "weight":
            kind = "scale" if leaf.ndim == 1 else "embedding" if place == "words" else "kernel"
            leaf = leaf.T if kind == "kernel" else leaf
        if place.endswith((".query", ".key", ".value")):
            leaf = leaf.reshape(*leaf.shape[:-1], HEADS, -1)
        elif name.endswith(".out.weight"):
            leaf = leaf.reshape(HEADS, -1, WIDTH)
        inner[kind] = leaf
    return Translator(mistake), lambda module, src, tgt: module.apply({"params": params}, src, tgt)
