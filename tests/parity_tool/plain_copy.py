"""The program as a plain function that names its values: mistakes are as in the other copies."""

from functools import partial

import jax.numpy as jnp
import numpy as np

from tests.parity_tool import mistakes
from tests.parity_tool.torch_program import DEPTH


def values(mistake, state, src, tgt):
    """Return by names of its own what each part is given and returns."""
    state, found = mistake.weights(state), {}

    def keep(value):
        found[f"{len(found)}"] = value
        return value

    def dense(name, x):
        return keep(x @ state[f"{name}.weight"].T + state[f"{name}.bias"])

    def norm(name, x):
        x = x - x.mean(-1, keepdims=True)
        x = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + mistakes.epsilon(mistake, name))
        return keep(x * state[f"{name}.weight"] + state[f"{name}.bias"])

    def attend(name, x, y, mask):
        q, k, v = (dense(f"{name}.{p}", z) for p, z in (("ask", x), ("offer", y), ("carry", y)))
        return dense(f"{name}.join", keep(mistakes.attend(mistake, name, q, k, v, mask)))

    def layer(name, x, mask, memory=None, memory_mask=None):
        if mistake.has("norm last", f"{name}.norms.0"):
            x = keep(norm(f"{name}.norms.0", x + attend(f"{name}.mixers.0", x, x, mask)))
        else:
            y = norm(f"{name}.norms.0", x)
            x = keep(x + attend(f"{name}.mixers.0", y, y, mask))
        if memory is not None:
            y = norm(f"{name}.norms.1", x)
            x = keep(x + attend(f"{name}.mixers.1", y, memory, memory_mask))
        y = norm(f"{name}.norms.{1 if memory is None else 2}", x)
        y = mistakes.activate(mistake, f"{name}.network", dense(f"{name}.network.widen", y))
        y = dense(f"{name}.network.narrow", keep(y))
        if mistake.has("dropout", name):
            y = y * np.random.default_rng(0).binomial(1, 0.9, y.shape) / 0.9
        return keep(x + y)

    def enter(ids):
        return keep(mistakes.embed(mistake, keep(jnp.asarray(state["words_in.weight"])[ids])))

    stacks = [
        [partial(layer, f"{stack}.{i}") for i in range(DEPTH)] for stack in ("readers", "writers")
    ]
    if mistake.kind == "swapped":
        stacks[0].reverse()
    norms = [partial(norm, f"ends.{number}") for number in (0, 1)]
    head = partial(dense, "head")
    found["logits"] = mistakes.translate(mistake, src, tgt, enter, stacks, norms, head)
    return found
