"""The program as a port to Linen: heads in the kernels, feed-forward networks inside the layers."""

import jax.numpy as jnp
from flax import linen as nn

from tests.parity_tool import mistakes
from tests.parity_tool.torch_program import DEPTH, HEADS, PAD, WIDE, WIDTH, WORDS


class MultiHead(nn.Module):
    mistake: mistakes.Mistake
    place: str

    @nn.compact
    def __call__(self, x, y, mask):
        q, k, v = (
            nn.DenseGeneral((HEADS, WIDTH // HEADS), name=name, param_dtype=x.dtype)(
                mistakes.rounded(self.mistake, f"{self.place}.{name}", z)
            )
            for name, z in (("query", x), ("key", y), ("value", y))
        )
        q, k, v = (z.reshape(*z.shape[:2], WIDTH) for z in (q, k, v))
        heads = mistakes.attend(self.mistake, self.place, q, k, v, mask)
        heads = heads.reshape(*heads.shape[:2], HEADS, -1)
        return nn.DenseGeneral(WIDTH, (-2, -1), name="out", param_dtype=x.dtype)(heads)


class Block(nn.Module):
    mistake: mistakes.Mistake
    place: str
    crossing: bool = False

    @nn.compact
    def __call__(self, x, mask, memory=None, memory_mask=None):
        y = norm(self.mistake, f"{self.place}.norms.0")(x)
        x = x + MultiHead(self.mistake, f"{self.place}.attentions.0")(y, y, mask)
        if memory is not None:
            y = norm(self.mistake, f"{self.place}.norms.1")(x)
            x = x + MultiHead(self.mistake, f"{self.place}.attentions.1")(y, memory, memory_mask)
        y = norm(self.mistake, f"{self.place}.norms.{1 + self.crossing}")(x)
        y = mistakes.rounded(self.mistake, f"{self.place}.feed.inner", y)
        y = nn.Dense(WIDE, param_dtype=x.dtype)(y)
        y = mistakes.activate(self.mistake, f"{self.place}.feed", y)
        y = nn.Dense(WIDTH, param_dtype=x.dtype)(y)
        return y if self.mistake.has("no residual", self.place) else x + y


def norm(mistake, place):
    cls = nn.RMSNorm if mistake.has("root mean square", place) else nn.LayerNorm
    return cls(epsilon=mistakes.epsilon(mistake, place), param_dtype=jnp.float64)


class Translator(nn.Module):
    mistake: mistakes.Mistake

    @nn.compact
    def __call__(self, src, tgt):
        seen = (src != PAD)[:, None, None]
        earlier = jnp.tril(jnp.ones((tgt.shape[1], tgt.shape[1]), bool))[None, None]
        table = nn.Embed(WORDS, WIDTH, param_dtype=jnp.float64)
        x, y = (
            table(ids) * mistakes.embedding_scale(self.mistake)
            + mistakes.positions(self.mistake, ids.shape[1])
            for ids in (src, tgt)
        )
        for i in range(DEPTH):
            x = Block(self.mistake, f"encoder.{i}")(x, seen)
        if self.mistake.kind != "no norm":
            x = norm(self.mistake, "encoder_norm")(x)
        for i in range(DEPTH):
            y = Block(self.mistake, f"decoder.{i}", True)(y, earlier, x, seen)
        y = norm(self.mistake, "decoder_norm")(y)
        return nn.Dense(WORDS, param_dtype=y.dtype)(y)


def build(mistake, state):
    """Return the module, and a function that calls it, with the weights of the torch program."""
    state = mistake.weights(state)

    def dense(name):
        return {"kernel": state[f"{name}.weight"].T, "bias": state[f"{name}.bias"]}

    def norms(name):
        scale = {"scale": state[f"{name}.weight"]}
        rms = mistake.has("root mean square", name)
        return scale if rms else scale | {"bias": state[f"{name}.bias"]}

    def attention(name):
        parts = {part: dense(f"{name}.{part}") for part in ("query", "key", "value", "out")}
        for part in ("query", "key", "value"):
            size = HEADS, WIDTH // HEADS
            parts[part] = {
                "kernel": parts[part]["kernel"].reshape(WIDTH, *size),
                "bias": parts[part]["bias"].reshape(size),
            }
        parts["out"]["kernel"] = parts["out"]["kernel"].reshape(HEADS, -1, WIDTH)
        return parts

    def named(kind, values):
        return {f"{kind}_{i}": value for i, value in enumerate(values)}

    params, blocks = {}, []
    for stack, count in (("encoder", 1), ("decoder", 2)):
        for i in range(DEPTH):
            name = f"{stack}.{i}"
            block = named("Dense", [dense(f"{name}.feed.{part}") for part in ("inner", "outer")])
            block |= named("MultiHead", [attention(f"{name}.attentions.{j}") for j in range(count)])
            places = [f"{name}.norms.{j}" for j in range(count + 1)]
            for kind in (True, False):
                same = [p for p in places if mistake.has("root mean square", p) == kind]
                block |= named("RMSNorm" if kind else "LayerNorm", map(norms, same))
            blocks.append(block)
    last = ["decoder_norm"] if mistake.kind == "no norm" else ["encoder_norm", "decoder_norm"]
    params = named("Block", blocks) | named("LayerNorm", map(norms, last))
    params |= {"Embed_0": {"embedding": state["words.weight"]}, "Dense_0": dense("head")}
    return Translator(mistake), lambda module, src, tgt: module.apply({"params": params}, src, tgt)
