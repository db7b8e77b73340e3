"""The search: a compiled loop whose steps extend the hypotheses of every source by one token.

Letters in shapes: B batch, N hypotheses of a source, K returned hypotheses, L target positions,
S source length, D d_model, V target vocabulary.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jax_transformer.config import TransformerConfig
from jax_transformer.decoding.beam import extend_beam
from jax_transformer.decoding.cache import new_cache, next_step
from jax_transformer.decoding.greedy import extend_by_token
from jax_transformer.decoding.hypotheses import Hypotheses, State, start_state
from jax_transformer.decoding.rules import Rules, length_divisor
from jax_transformer.kernels.execution import SearchExecution
from jax_transformer.kernels.panels import arrange_for_steps, hold_in_step
from jax_transformer.model.self_over_memory import pad_source
from jax_transformer.model.transformer import Params, Source, SourceMask, bind

NO_LIMIT = 2**31 - 1  # of the number of steps: a target ends at its own


@partial(jax.jit, static_argnames=("configs", "target_length", "beam_size", "execution"))
def search(
    params: tuple[Params, ...],
    configs: tuple[TransformerConfig, ...],
    src: Source,
    rules: Rules,
    target_length: int,
    beam_size: int,
    execution: SearchExecution,
    src_mask: SourceMask | None = None,
    memory: Float[Array, "B S D"] | None = None,
) -> tuple[Hypotheses, Int32[Array, " B"]]:
    """Run the search of `generate` on checked inputs.

    Args:
        target_length: Number L of positions; symbolic in a program for any (`jax.export`).

    Returns:
        The hypotheses, and for each row the step whose logits were not finite, or -1.
    """
    state = first_state(
        params,
        configs,
        src,
        rules,
        target_length,
        beam_size,
        execution,
        src_mask=src_mask,
        memory=memory,
    )
    num_rows = src.shape[0] * beam_size
    # The barrier keeps XLA from making the copies again in every step of the loop.
    arranged = tuple(
        jax.lax.optimization_barrier(arrange_for_steps(tree, config, execution, num_rows))
        for tree, config in zip(params, configs, strict=True)
    )
    state = take_steps(arranged, configs, state, rules, (0, NO_LIMIT), execution)
    return best_hypotheses(state, rules), state.failed_at


def first_state(
    params: tuple[Params, ...],
    configs: tuple[TransformerConfig, ...],
    src: Source,
    rules: Rules,
    target_length: int,
    beam_size: int,
    execution: SearchExecution,
    src_mask: SourceMask | None = None,
    memory: Float[Array, "B S D"] | None = None,
    memory_length: int = 0,
) -> State:
    """Return the state before the first token: the sources encoded, the caches empty.

    Args:
        memory_length: Least length of the memory in the caches; a shorter one is padded.
    """
    caches = []
    for tree, config in zip(params, configs, strict=True):
        ids, mask = pad_source(config, src, src_mask, target_length)
        encoded = memory
        if memory is None:
            encoded = bind(tree, config, execution).encode(ids, mask)
        if memory_length > encoded.shape[1]:
            added = (0, memory_length - encoded.shape[1])
            encoded = jnp.pad(encoded, ((0, 0), added, (0, 0)))
            mask = jnp.pad(mask, ((0, 0), (0, 0), (0, 0), added))
        caches.append(new_cache(tree, config, encoded, target_length, mask, beam_size, execution))
    return start_state(tuple(caches), configs[0].pad_id, rules)


def take_steps(
    params: tuple[Params, ...],
    configs: tuple[TransformerConfig, ...],
    state: State,
    rules: Rules,
    bounds: tuple[int | Int32[Array, ""], int | Int32[Array, ""]],
    execution: SearchExecution,
) -> State:
    """Return the state after some steps.

    Args:
        params: Of each model, from `arrange_for_steps`.
        bounds: The steps end when at most so many sources have not ended, or after so many steps.
    """
    models = list(zip(params, configs, strict=True))
    most_running, most_steps = bounds

    def goes_on(carry: tuple[State, Int32[Array, ""]]) -> Bool[Array, ""]:
        state, steps = carry
        return (jnp.sum(~state.ended) > most_running) & (steps < most_steps)

    def extended(carry: tuple[State, Int32[Array, ""]]) -> tuple[State, Int32[Array, ""]]:
        state, steps = carry
        return take_step(state, rules, models, execution), steps + 1

    return jax.lax.while_loop(goes_on, extended, (state, jnp.int32(0)))[0]


def take_step(
    state: State,
    rules: Rules,
    models: Sequence[tuple[Params, TransformerConfig]],
    execution: SearchExecution,
) -> State:
    """Return the state in which each open hypothesis is one token longer.

    Several models choose by the mean of their log-probabilities in the place of logits, with the
    log-normalizer 0. A log-normalizer is not finite where a logit of a model is NaN or infinite.
    """
    step = state.step[:, None, None]
    tokens = jnp.take_along_axis(state.sequences, step, axis=2, mode="clip")[..., 0]
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
    state = state._replace(caches=tuple(caches))
    if state.scores.shape[1] == 1:
        pad_id = models[0][1].pad_id
        state = extend_by_token(state, mean, normalizer, rules, pad_id, execution.argmax)
    else:
        state = extend_beam(state, mean, normalizer, rules, execution.top_k)
    return state._replace(step=state.step + 1)


def best_hypotheses(state: State, rules: Rules) -> Hypotheses:
    """Return the K best hypotheses of each source whose target has ended."""
    tokens, scores, lengths = (leaf[:, : rules.num_hypotheses] for leaf in state.finished)
    if state.scores.shape[1] == 1:  # beam search compares divided scores, and has divided them
        counted = lengths - rules.prefix_lengths[:, None]
        scores = scores / length_divisor(counted, rules)
    scores = jnp.where(state.failed_at[:, None] < 0, scores, jnp.nan).astype(jnp.float32)
    return Hypotheses(tokens, scores, lengths)
