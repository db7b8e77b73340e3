"""What ports get wrong, by the name of a mistake, and where it must be found.

A mistake is "KIND at PLACE". The copies ask `Mistake.has(KIND, PLACE)` where they compute; mistakes
of weights change the torch program's weights before a copy reads them.
"""

import jax
import jax.numpy as jnp
import numpy as np

from tests.parity_tool.torch_program import PAD
from tests.porting.models import HEADS, WIDTH

# Of each mistake, what its explanation must say ("" is that none is given), and its places: each is
# the innermost block of the torch program that holds it; "" is the program itself.
PLACES = {
    "epsilon": ("norm of epsilon 1e-06", "readers.1.norms.0 ends.1"),
    "root mean square": ("root mean square norm", "writers.0.norms.1"),
    "gelu by tanh": ("gelu by tanh", "writers.0.network"),
    "relu": ("a has relu", "readers.0.network"),
    "no scale": ("scale 1, ", "readers.1.mixers.0"),
    "scale by width": ("scale 1/sqrt(width)", "writers.1.mixers.1"),
    "no mask": ("no mask", "writers.0.mixers.1 writers.0.mixers.0 readers.0.mixers.0"),
    "interleaved heads": ("interleaved", "readers.0.mixers.0 writers.1.mixers.0"),
    "not transposed back": ("joined without a transpose", "writers.0.mixers.0"),
    "transposed": (
        "transposed kernel",
        "readers.0.mixers.0.ask writers.1.mixers.1.join writers.0.mixers.0.carry",
    ),
    "no bias": (
        "the same vector more in every row: a bias",
        "writers.1.mixers.0.carry readers.1.network.widen head",
    ),
    "bfloat16": ("cast to bfloat16", "writers.1.network.widen readers.0.mixers.0.offer"),
    "no residual": ("1 times an input more", "writers.1"),
    "no norm": ("only b has this", "ends.0"),
    "no embedding scale": ("times an input more", ""),
    "halves of sinusoids": ("", ""),
    "positions from 1": ("", ""),
}
IN_A_BLOCK = [
    f"{kind} at {place}" for kind, (_, places) in PLACES.items() for place in places.split(" ")
]
# The mistakes of a plain function, and what each explanation must say; "" is that none is given.
OF_A_FUNCTION = {
    "epsilon at readers.1.norms.0": "a has a layer norm of epsilon 1e-06",
    "no scale at writers.1.mixers.1": "a has attention of 4 heads, scale 1, ",
    "no mask at writers.0.mixers.0": "scale 1/sqrt(head size), no mask",
    "norm last at readers.0.norms.0": "",
    "relu at readers.0.network": "b has gelu by erf, and a has relu",
    "positions from 1 at ": "",
    "transposed at writers.0.mixers.0.carry": "a has a product with the transposed kernel",
    "no bias at readers.1.network.widen": "bias",
    "swapped at readers.0.norms.0": "",
    "no mask at readers.0.mixers.0": "scale 1/sqrt(head size), no mask",  # of padding
    "dropout at writers.1": "",
    "halves rotated at writers.1.mixers.0": "",
}


class Mistake:
    def __init__(self, text="", rotary=False):
        self.rotary = rotary
        self.kind, _, self.place = text.partition(" at ")

    def has(self, kind, place):
        return (kind, place) == (self.kind, self.place)

    def weights(self, state):
        """Return a state_dict as arrays of numpy, with the mistakes that are of weights."""
        state = {name: tensor.numpy() for name, tensor in state.items()}
        weight, bias = f"{self.place}.weight", f"{self.place}.bias"
        if self.kind == "transposed":
            state[weight] = state[weight].T
        if self.kind == "no bias":
            state[bias] = np.zeros_like(state[bias])
        return state


def attend(mistake, place, q, k, v, mask):
    """Return softmax(q k^T / sqrt(d)) v of one row's heads [L, D], or of rows [B, L, D]."""
    interleaved = mistake.has("interleaved heads", place)
    size = WIDTH // HEADS

    def split(z):
        if interleaved:
            return jnp.moveaxis(z.reshape(*z.shape[:-1], size, HEADS), -1, -3)
        return jnp.moveaxis(z.reshape(*z.shape[:-1], HEADS, size), -2, -3)

    q, k, v = map(split, (q, k, v))
    if mistake.rotary and ".1" not in place[-2:]:
        q, k = (turned(z, mistake.has("halves rotated", place)) for z in (q, k))
    scale = {"no scale": 1, "scale by width": WIDTH**-0.5}
    factor = scale.get(mistake.kind, size**-0.5) if mistake.place == place else size**-0.5
    scores = q @ k.mT * factor
    if not mistake.has("no mask", place):
        scores = jnp.where(mask, scores, -1e30)
    heads = jax.nn.softmax(scores) @ v  # [..., H, L, D / H]
    if mistake.has("not transposed back", place):
        return heads.reshape(*heads.shape[:-3], -1, WIDTH)
    heads = jnp.moveaxis(heads, -3, -1 if interleaved else -2)
    return heads.reshape(*heads.shape[:-2], WIDTH)


def turned(z, halves):
    """Return heads [..., L, d] rotated by position: neighbours, or by mistake both halves."""
    angle = jnp.arange(z.shape[-2], dtype=z.dtype)[:, None] * 0.5 ** jnp.arange(z.shape[-1] // 2)
    x, y = jnp.split(z, 2, -1) if halves else (z[..., ::2], z[..., 1::2])
    x, y = x * jnp.cos(angle) - y * jnp.sin(angle), x * jnp.sin(angle) + y * jnp.cos(angle)
    return jnp.concatenate([x, y], -1) if halves else jnp.stack([x, y], -1).reshape(z.shape)


def activate(mistake, place, x):
    if mistake.has("relu", place):
        return jax.nn.relu(x)
    return jax.nn.gelu(x, approximate=mistake.has("gelu by tanh", place))


def positions(mistake, length):
    first = int(mistake.kind == "positions from 1")
    angle = np.arange(first, first + length)[:, None] / 10000 ** (np.arange(0, WIDTH, 2) / WIDTH)
    parts = np.sin(angle), np.cos(angle)
    halves = mistake.kind == "halves of sinusoids"
    return np.concatenate(parts, -1) if halves else np.stack(parts, -1).reshape(length, WIDTH)


def epsilon(mistake, place):
    return 1e-6 if mistake.has("epsilon", place) else 1e-5


def rounded(mistake, place, x):
    """Return what a product reads: in half precision by mistake."""
    return x.astype(jnp.bfloat16).astype(x.dtype) if mistake.has("bfloat16", place) else x


def attention(mistake, place, products, x, y, mask):
    """Return what an attention returns, with its four products by their names."""
    q, k, v = (
        products[name](rounded(mistake, f"{place}.{name}", z))
        for name, z in (("ask", x), ("offer", y), ("carry", y))
    )
    return products["join"](attend(mistake, place, q, k, v, mask))


def network(mistake, place, widen, narrow, x):
    return narrow(activate(mistake, place, widen(rounded(mistake, f"{place}.widen", x))))


def layer(mistake, place, attentions, norms, network, x, mask, memory=None, memory_mask=None):
    y = norms[0](x)
    x = x + attentions[0](y, y, mask)
    if memory is not None:
        x = x + attentions[1](norms[1](x), memory, memory_mask)
    y = network(norms[-1](x))
    return y if mistake.has("no residual", place) else x + y


def embed(mistake, vectors):
    """Return what the first layer is given, of the vectors [..., L, D] of words."""
    scale = 1 if mistake.kind == "no embedding scale" else WIDTH**0.5
    return vectors * scale + positions(mistake, vectors.shape[-2]).astype(vectors.dtype)


def translate(mistake, src, tgt, enter, stacks, norms, head):
    """Return logits of ids [B, L], or of one row; `enter` returns what the first layer is given."""
    seen = (src != PAD)[..., None, None, :]
    earlier = jnp.tril(jnp.ones((tgt.shape[-1], tgt.shape[-1]), bool))
    x, y = enter(src), enter(tgt)
    for layer in stacks[0]:
        x = layer(x, seen)
    if mistake.kind != "no norm":
        x = norms[0](x)
    for layer in stacks[1]:
        y = layer(y, earlier, x, seen)
    return head(norms[1](y))
