"""A search that never waits: sources leave their slots when they end, others take their places.

The compiled programs are one for each length of a group of sources, which encodes it, and one that
puts a group into slots and takes steps. Letters in shapes: C slots, G sources of a group,
N hypotheses of a source, K returned hypotheses, L target positions, S source length.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from jax_transformer.config import TransformerConfig
from jax_transformer.decoding.hypotheses import Hypotheses, Selection, State
from jax_transformer.decoding.search import (
    NO_LIMIT,
    best_hypotheses,
    first_state,
    search,
    take_steps,
)
from jax_transformer.kernels.execution import SearchExecution
from jax_transformer.kernels.panels import arrange_for_steps
from jax_transformer.model.transformer import Params


class Slots(NamedTuple):
    """A search whose sources began at different steps, and what each has of its own."""

    state: State
    rows: dict[str, Array]


class Group(NamedTuple):
    """Sources that enter the slots together; the number of its rows is that of all groups.

    Attributes:
        members: The caller's number of each source, for the first rows; the others are left.
        src: Source ids [G, S].
        selection: How their tokens are selected, as `make_selection` returns it.
    """

    members: Sequence[int]
    src: Int32[np.ndarray, "G S"]
    selection: Selection


class Ended(NamedTuple):
    """The result of a source: its number, and its K hypotheses without the axis of the batch.

    Attributes:
        failed_at: The step at which the logits were not finite, or -1.
    """

    member: int
    hypotheses: Hypotheses
    failed_at: int


class Running(NamedTuple):
    """A search in slots between two calls of `advance`; `empty_slots` makes it.

    Attributes:
        params: Parameters of each model.
        configs: Config of each model.
        source_length: Length S of the memory in a slot, at least that of each group.
        target_length: Number L of positions of a slot, at least the limit of each source.
        beam_size: Number N of hypotheses of a source.
        execution: How the models are executed.
        owners: The member in each of the C slots, or -1.
        entered: The group that entered last, encoded; None before the first one.
        arranged: The parameters as the steps read them.
        slots: What the slots hold.
        selection: How tokens are selected; what is common to the groups.
    """

    params: tuple[Params, ...]
    configs: tuple[TransformerConfig, ...]
    source_length: int
    target_length: int
    beam_size: int
    execution: SearchExecution
    owners: Int32[np.ndarray, " C"]
    entered: Slots | None = None
    arranged: tuple[Params, ...] = ()
    slots: Slots | None = None
    selection: Selection | None = None


def empty_slots(
    params: tuple[Params, ...],
    configs: tuple[TransformerConfig, ...],
    num_slots: int,
    source_length: int,
    target_length: int,
    beam_size: int,
    execution: SearchExecution,
) -> Running:
    """Return a search in C slots in which nothing runs; the arguments are those of `Running`."""
    sizes = source_length, target_length, beam_size, execution
    return Running(params, configs, *sizes, np.full(num_slots, -1, np.int32))


def search_in_slots(running: Running, groups: Iterable[Group]) -> Iterator[Ended]:
    """Yield the result of each source as soon as its slot is free for another.

    A single group that fills all slots is one search, as that of `generate`.

    A source finds what `generate` finds. Its keys lie in the cache from the column on where it
    entered, so sums over them are in another order, and scores may differ in their last bits.

    Args:
        running: From `empty_slots`.
        groups: One is read ahead; each has the same number of rows.
    """
    num_slots = len(running.owners)
    for group, following in pairwise(chain(groups, (None,))):
        if running.slots is None and following is None and len(group.src) == num_slots:
            sizes = running.target_length, running.beam_size, running.execution
            given = running.configs, group.src, None, None, group.selection, *sizes
            yield from _ended(group.members, *jax.device_get(search(running.params, *given)))
            return
        room = num_slots if following is None else len(following.members)
        running, ended = advance(running, group, room)
        yield from ended


def advance(
    running: Running, group: Group | None, room: int, most_steps: int = NO_LIMIT
) -> tuple[Running, list[Ended]]:
    """Let a group enter, take steps, and return the search and which sources have ended.

    Args:
        running: Its buffers are used again: it cannot be advanced a second time.
        group: As many members as there are free slots, at most; None is no group.
        room: The steps end when so many slots are free,
        most_steps: or after so many steps.
    """
    owners = running.owners.copy()
    if group is not None:
        running = _with_group(running, group)
        free = np.flatnonzero(owners < 0)[: len(group.members)]
        owners[free] = group.members
    elif running.slots is None:
        return running, []
    places = np.full(len(running.entered.state.ended), len(owners), np.int32)
    if group is not None:  # what is outside is not written
        places[: len(free)] = free
    bounds = np.int32(len(owners) - room), np.int32(most_steps)
    given = running.slots, running.entered, places, running.selection, *bounds
    slots, *found = _advance(running.arranged, running.configs, *given, running.execution)
    ended, hypotheses, failed_at = jax.device_get(found)
    members = np.where(ended, owners, -1)
    running = running._replace(slots=slots, owners=np.where(ended, -1, owners))
    return running, [*_ended(members.tolist(), hypotheses, failed_at)]


def free_slots(running: Running) -> int:
    """Return the number of slots in which nothing runs."""
    return int(np.sum(running.owners < 0))


def _with_group(running: Running, group: Group) -> Running:
    """Return a search with the group encoded, and with slots."""
    sizes = running.source_length, running.target_length, running.beam_size, running.execution
    given = running.params, running.configs, group.src, group.selection, *sizes
    running = running._replace(entered=_enter(*given))
    if running.slots is not None:
        return running
    rows = len(running.owners) * running.beam_size
    arranged = tuple(
        _arrange(tree, config, running.execution, rows)
        for tree, config in zip(running.params, running.configs, strict=True)
    )
    slots = _empty(running.entered, len(running.owners))
    return running._replace(arranged=arranged, slots=slots, selection=group.selection)


def _ended(
    members: Sequence[int], hypotheses: Hypotheses, failed_at: Int32[np.ndarray, " C"]
) -> Iterator[Ended]:
    """Yield the results of members; -1 is none."""
    for row, member in enumerate(members):
        if member >= 0:
            found = Hypotheses(*(leaf[row].copy() for leaf in hypotheses))
            yield Ended(int(member), found, int(failed_at[row]))


@partial(jax.jit, static_argnames=("config", "execution", "num_rows"))
def _arrange(
    params: Params, config: TransformerConfig, execution: SearchExecution, num_rows: int
) -> Params:
    return arrange_for_steps(params, config, execution, num_rows)


@partial(
    jax.jit,
    static_argnames=("configs", "source_length", "target_length", "beam_size", "execution"),
)
def _enter(
    params: tuple[Params, ...],
    configs: tuple[TransformerConfig, ...],
    src: Int32[Array, "G S"],
    selection: Selection,
    source_length: int,
    target_length: int,
    beam_size: int,
    execution: SearchExecution,
) -> Slots:
    """Return a group before its first token."""
    sizes = target_length, beam_size, execution, source_length
    rows = selection.rows()
    if "source" in rows:  # filled by what equals no token
        added = (0, 0), (0, source_length - src.shape[1])
        rows["source"] = jnp.pad(rows["source"], added, constant_values=configs[0].tgt_vocab_size)
    return Slots(first_state(params, configs, src, None, None, selection, *sizes), rows)


@partial(jax.jit, static_argnames="num_slots")
def _empty(group: Slots, num_slots: int) -> Slots:
    """Return slots in which nothing runs, of the shapes of a group."""
    state, rows = jax.tree.map(
        lambda x: jnp.broadcast_to(x[:1], (num_slots, *x.shape[1:])) if x.ndim else x, group
    )
    return Slots(state._replace(ended=jnp.ones(num_slots, bool)), rows)


@partial(jax.jit, static_argnames=("configs", "execution"), donate_argnames="slots")
def _advance(
    params: tuple[Params, ...],
    configs: tuple[TransformerConfig, ...],
    slots: Slots,
    group: Slots,
    places: Int32[Array, " G"],
    selection: Selection,
    most_running: Int32[Array, ""],
    most_steps: Int32[Array, ""],
    execution: SearchExecution,
) -> tuple[Slots, Bool[Array, " C"], Hypotheses, Int32[Array, " C"]]:
    """Put a group into its places, and take steps until at most some slots run, or so many.

    Returns:
        The slots, which of them have ended, what they found, and where they failed.
    """

    def put(old: Array, new: Array) -> Array:
        return old.at[places].set(new, mode="drop") if old.ndim else old

    state, rows = jax.tree.map(put, slots, group)
    caches = tuple(
        cache._replace(begin=cache.begin.at[places].set(cache.position, mode="drop"))
        for cache in state.caches
    )
    state, selection = state._replace(caches=caches), selection.with_rows(rows)
    bounds = most_running, most_steps
    state = take_steps(params, configs, state, selection, bounds, execution)
    found = best_hypotheses(state, selection)
    return Slots(state, rows), state.ended, found, state.failed_at
