"""The ancestors of a beam: what a search keeps when a hypothesis continues another one."""

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from docs.draw.dates import translator
from docs.draw.style import FAINT, INK, JAX, MIDDLE, PAPER, bare, save
from jax_transformer import decode_step, encode, init_cache, pad, select_hypotheses

LINE, BEAM, STEPS = "2021", 4, 6


def search() -> tuple[list[list[str]], np.ndarray, np.ndarray]:
    """Run a beam search by hand; return tokens and parents [steps][beam], and the ancestors."""
    config, params, tokenizer, _ = translator().model
    src = jnp.asarray(pad(tokenizer.encode_source([LINE]), config.pad_id))
    cache = init_cache(params, config, encode(params, config, src), STEPS, beam_size=BEAM)
    last = jnp.full((1, BEAM), config.bos_id)
    scores = jnp.array([[0.0] + [-jnp.inf] * (BEAM - 1)])
    tokens, parents = [], []
    for _ in range(STEPS):
        logits, cache = decode_step(params, config, cache, last)
        totals = scores[..., None] + jax.nn.log_softmax(logits)
        scores, best = jax.lax.top_k(totals.reshape(1, -1), BEAM)
        parent, last = best // totals.shape[-1], best % totals.shape[-1]
        cache = select_hypotheses(cache, parent)
        parents.append(np.asarray(parent[0]))
        tokens.append([tokenizer.decode([int(token)]) or "EOS" for token in last[0]])
    return tokens, np.array(parents), np.asarray(cache.ancestors[0])


def draw() -> None:
    """Draw a slot for each position and hypothesis, and the line of ancestors of the best one."""
    tokens, parents, ancestors = search()
    figure = Figure(figsize=(5.6, 3), layout="constrained")
    axes = figure.subplots()
    best = [0]
    for row in parents[:0:-1]:
        best.insert(0, int(row[best[0]]))
    for step in range(STEPS):
        for slot in range(BEAM):
            chosen = best[step] == slot
            if step:
                start = parents[step][slot]
                (line,) = axes.plot([step - 1, step], [-start, -slot], zorder=1 + chosen)
                line.set(color=JAX if chosen else FAINT, linewidth=3 if chosen else 1.5)
            axes.text(
                step,
                -slot,
                tokens[step][slot],
                ha="center",
                va="center",
                fontsize=9,
                color=PAPER if chosen else INK,
                bbox={"boxstyle": "round", "fc": JAX if chosen else PAPER, "ec": MIDDLE},
                zorder=3,
            )
    bare(axes)
    axes.set_xticks(range(STEPS), [f"step {step + 1}" for step in range(STEPS)])
    axes.set_yticks([-slot for slot in range(BEAM)], [f"slot {slot}" for slot in range(BEAM)])
    axes.tick_params(length=0)
    axes.set(xlim=(-0.5, STEPS - 0.5), ylim=(-BEAM + 0.4, 0.6))
    # Position 0 is BOS; the last token has no slot, because nothing was computed from it.
    row = ", ".join(map(str, ancestors[0][1:]))
    axes.set_xlabel(f"ancestors of the best hypothesis, steps 1 to {STEPS - 1}: slots {row}")
    save(figure, "beam")
