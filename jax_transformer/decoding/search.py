"""The search: a compiled loop whose steps extend the hypotheses of every source by one token.

Letters in shapes: B batch, N hypotheses of a source, K returned hypotheses, L target positions,
S source length, D d_model, V target vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim
from jaxtyping import Array, Bool, Float, Int32

from jax_transformer.config import TransformerConfig
from jax_transformer.decoding.beam import extend_beam
from jax_transformer.decoding.cache import new_cache, next_step
from jax_transformer.decoding.greedy import extend_by_token
from jax_transformer.decoding.hypotheses import Hypotheses, Selection, State, start_state
from jax_transformer.decoding.rules import Rules
from jax_transformer.kernels.execution import SearchExecution
from jax_transformer.kernels.panels import arrange_for_steps, hold_in_step
from jax_transformer.model.self_over_memory import pad_source
from jax_transformer.model.transformer import Params, SourceMask, bind

SMALLEST_BATCH = 8  # smaller batches are not worth a compilation

AnyState = TypeVar("AnyState", bound=Any)
Extend = Callable[
    [State, Float[Array, "B N V"], Float[Array, "B N"], Rules], State
]  # by logits and their log-normalizer


@partial(jax.jit, static_argnames=("configs", "target_length", "beam_size", "execution"))
def search(
    params: tuple[Params, ...],
    configs: tuple[TransformerConfig, ...],
    src: Int32[Array, "B S"],
    src_mask: SourceMask | None,
    memory: Float[Array, "B S D"] | None,
    selection: Selection,
    target_length: int,
    beam_size: int,
    execution: SearchExecution,
) -> tuple[Hypotheses, Int32[Array, " B"]]:
    """Return what `generate` does for data that it has checked, and the step of each failed row.

    Args:
        target_length: Number L of positions; symbolic in a program for any (`jax.export`).
    """
    batch, models, caches = src.shape[0], [], []
    for tree, config in zip(params, configs, strict=True):
        ids, mask = pad_source(config, src, src_mask, target_length)
        encoded = memory
        if memory is None:
            encoded = bind(tree, config, execution).encode(ids, mask)
        given = encoded, target_length, mask, beam_size, execution
        caches.append(new_cache(tree, config, *given))
        models.append((arrange_for_steps(tree, config, execution, batch * beam_size), config))
    if beam_size == 1:
        extend = partial(extend_by_token, selection=selection, pad_id=configs[0].pad_id)
    else:
        extend = partial(extend_beam, selection=selection, top_k=execution.top_k)
    step = partial(take_step, models=models, extend=extend, execution=execution)
    # What is drawn depends on the index of a row, so rows keep their places where tokens are drawn.
    leave = execution.smaller_batches and selection.sampling is None
    sizes = batch_sizes(batch) if leave else [batch]
    start = start_state(tuple(caches), configs[0].pad_id, selection)
    end = extend_all(step, start, selection.rules, sizes)
    tokens, scores, lengths = (leaf[:, : selection.num_hypotheses] for leaf in end.finished)
    if beam_size == 1:  # beam search compares divided scores, and has divided them
        counted = lengths - selection.rules.prefix_lengths[:, None]
        scores = scores / selection.length_penalty(counted)
    scores = jnp.where(end.failed_at[:, None] < 0, scores, jnp.nan).astype(jnp.float32)
    return Hypotheses(tokens, scores, lengths), end.failed_at


def take_step(
    state: State,
    rules: Rules,
    models: Sequence[tuple[Params, TransformerConfig]],
    extend: Extend,
    execution: SearchExecution,
) -> State:
    """Return the state in which each open hypothesis is one token longer.

    Several models choose by the mean of their log-probabilities in the place of logits, with the
    log-normalizer 0. A log-normalizer is not finite where a logit of a model is NaN or infinite.
    """
    tokens = jax.lax.dynamic_index_in_dim(state.sequences, state.step, axis=2, keepdims=False)
    logits, normalizers, caches = [], [], []
    for (params, config), cache in zip(models, state.caches, strict=True):
        params = hold_in_step(params, tokens)
        of_model, cache = next_step(params, config, cache, tokens, execution)
        wide = of_model.astype(jnp.promote_types(of_model.dtype, jnp.float32))
        largest = jnp.max(wide, axis=-1)
        sums = jnp.sum(jnp.exp(wide - largest[..., None]), axis=-1)
        logits.append(wide)
        normalizers.append(largest + jnp.log(sums))
        caches.append(cache)
    mean, normalizer = logits[0], normalizers[0]
    if len(models) > 1:
        mean = (sum(logits) - sum(normalizers)[..., None]) / len(models)
        normalizer = 0 * sum(normalizers)
    state = extend(state._replace(caches=tuple(caches)), mean, normalizer, rules)
    return state._replace(step=state.step + 1)


def batch_sizes(batch: int) -> list[int]:
    """Return the numbers of sources of the batches of a search, for `extend_all`.

    Each size is a loop that is compiled. With a half and an eighth, the lines of Multi30k have
    1.14 to 1.21 times the rows and steps that they need, and 1.6 to 1.8 times in one batch.
    """
    if is_symbolic_dim(batch):
        return [batch]
    smaller = (batch // share for share in (2, 8))
    return [batch, *(size for size in smaller if size >= SMALLEST_BATCH)]


def extend_all(
    step: Callable[[AnyState, Rules], AnyState],
    state: AnyState,
    rules: Rules,
    batch_sizes: Sequence[int],
) -> AnyState:
    """Return the state in which the target of each source has ended.

    The sources that go on leave the batch for a smaller one when it can hold them.

    Args:
        step: One step of the search.
        state: A pytree with the fields `step`, `sequences` and `ended`; each of its leaves has a
            row for each source, or is one for all.
        batch_sizes: Numbers of sources: of the state, and of the smaller batches.
    """
    size, *smaller = batch_sizes
    most_left = smaller[0] if smaller else 0

    def goes_on(state: AnyState) -> Bool[Array, ""]:
        full = state.step + 1 >= state.sequences.shape[-1]
        return ~full & (jnp.sum(~state.ended) > most_left)

    state = jax.lax.while_loop(goes_on, partial(step, rules=rules), state)
    if not smaller:
        return state
    rows = jnp.argsort(state.ended, stable=True)[:most_left]  # those that go on are the first

    def has_rows(leaf: Array) -> bool:
        return leaf.ndim > 0 and leaf.shape[0] == size

    part = jax.tree.map(lambda leaf: leaf[rows] if has_rows(leaf) else leaf, state)
    part = extend_all(step, part, rules.of_rows(rows), smaller)
    return jax.tree.map(
        lambda leaf, new: leaf.at[rows].set(new) if has_rows(leaf) else new, state, part
    )
