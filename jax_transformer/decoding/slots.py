"""A search that never waits: sources leave their slots when they end, others take their places.

The compiled programs are one for each length of a group of sources, which encodes it, and one that
puts a group into slots and takes steps. Letters in shapes: C slots, G sources of a group,
N hypotheses of a source, K returned hypotheses, L target positions, S source length.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from jax_transformer.config import TransformerConfig
from jax_transformer.decoding.cache import Cache
from jax_transformer.decoding.generation_config import GenerationConfig
from jax_transformer.decoding.hypotheses import Hypotheses, State
from jax_transformer.decoding.rules import Rules
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


class Group(NamedTuple):
    """Sources that enter the slots together.

    Attributes:
        members: Caller's id of the source in each of the first rows; further rows are filler.
        src: Source ids [G, S].
        rules: Of these sources, as `make_rules` returns them.
    """

    members: Sequence[int]
    src: Int32[np.ndarray, "G S"]
    rules: Rules


class Ended(NamedTuple):
    """The result of a source: its K hypotheses without the axis of the batch.

    Attributes:
        member: Caller's id of the source.
        failed_at: The step at which the logits were not finite, or -1.
    """

    member: int
    hypotheses: Hypotheses
    failed_at: int


class Slots(NamedTuple):
    """The arrays of a search whose sources began at different steps."""

    state: State
    row_rules: dict[str, Array]  # what `Rules.of_rows` names, of the source in each slot


@dataclasses.dataclass(kw_only=True)
class SlotSearch:
    """A search in slots, which sources enter and leave; at first nothing runs.

    A source finds what `generate` finds. Its keys lie in the cache from the column on where it
    entered, so sums over them are in another order, and scores may differ in their last bits.

    Attributes:
        params: Parameters of each model.
        configs: Config of each model.
        generation: Options of the search; each group has rules of its own.
        num_slots: Number C of slots.
        group_size: Number G of rows of each group.
        source_length: Length S of the memory in a slot, at least that of each group.
        target_length: Number L of positions of a slot, at least the limit of each source.
        execution: How the models are executed.
        waiting: Caller's ids of the sources that have not entered; the caller takes groups of them.
        members: Caller's id of the source in each of the C slots, or -1.
    """

    params: tuple[Params, ...]
    configs: tuple[TransformerConfig, ...]
    generation: GenerationConfig
    num_slots: int
    group_size: int
    source_length: int
    target_length: int
    execution: SearchExecution
    waiting: list[int] = dataclasses.field(default_factory=list)
    members: Int32[np.ndarray, " C"] = dataclasses.field(init=False)
    # These come with the first group: the parameters as the steps read them, the slots, what is
    # common to the rules of all groups, and the group that entered last, encoded.
    _arranged: tuple[Params, ...] = ()
    _slots: Slots | None = None
    _rules: Rules | None = None
    _group: Slots | None = None

    def __post_init__(self) -> None:
        self.members = np.full(self.num_slots, -1, np.int32)

    @property
    def num_free(self) -> int:
        """Number of slots in which nothing runs."""
        return int(np.sum(self.members < 0))

    @property
    def runs(self) -> bool:
        """Whether a source is in a slot."""
        return self.num_free < self.num_slots

    def advance(self, group: Group | None, most_steps: int = NO_LIMIT) -> list[Ended]:
        """Let a group enter, take steps until the next one can, and return what has ended.

        Args:
            group: As many members as there are free slots, at most; None is no group.
            most_steps: Stop after this many steps.
        """
        is_first = group is not None and self._slots is None
        is_last = not self.waiting and most_steps == NO_LIMIT
        if is_first and is_last and self.group_size == self.num_slots:
            # All sources that there are fill the slots: one search, as that of `generate`.
            hypotheses, failed_at = search(
                self.params,
                self.configs,
                group.src,
                group.rules,
                target_length=self.target_length,
                beam_size=self.generation.beam_size,
                execution=self.execution,
            )
            hypotheses, failed_at = jax.device_get((hypotheses, failed_at))
            return _ended(group.members, hypotheses, failed_at)
        if group is None and not self.runs:
            return []
        places = np.full(self.group_size, self.num_slots)
        if group is not None:
            self._encode(group)
            free = np.flatnonzero(self.members < 0)[: len(group.members)]
            self.members[free] = group.members
            places[: len(free)] = free  # what is outside of the slots is not written
        next_size = min(len(self.waiting), self.group_size)
        self._slots, *found = _advance(
            self._arranged,
            self.configs,
            self._slots,
            self._group,
            places.astype(np.int32),
            self._rules,
            most_running=np.int32(self.num_slots - next_size if next_size else 0),
            most_steps=np.int32(most_steps),
            execution=self.execution,
        )
        ended, hypotheses, failed_at = jax.device_get(found)
        members = np.where(ended, self.members, -1)
        self.members[ended] = -1
        return _ended(members.tolist(), hypotheses, failed_at)

    def _encode(self, group: Group) -> None:
        """Encode a group; the first one makes the slots."""
        self._group = _enter(
            self.params,
            self.configs,
            group.src,
            group.rules,
            source_length=self.source_length,
            target_length=self.target_length,
            beam_size=self.generation.beam_size,
            execution=self.execution,
        )
        if self._slots is not None:
            return
        num_rows = self.num_slots * self.generation.beam_size
        self._arranged = tuple(
            _arrange(tree, config, self.execution, num_rows)
            for tree, config in zip(self.params, self.configs, strict=True)
        )
        self._slots = _empty(self._group, self.num_slots)
        self._rules = group.rules


def _ended(
    members: Sequence[int], hypotheses: Hypotheses, failed_at: Int32[np.ndarray, " C"]
) -> list[Ended]:
    """Return the results of members; -1 is none."""
    return [
        Ended(member, Hypotheses(*(leaf[row].copy() for leaf in hypotheses)), int(failed_at[row]))
        for row, member in enumerate(members)
        if member >= 0
    ]


_arrange = jax.jit(arrange_for_steps, static_argnames=("config", "execution", "num_rows"))


@partial(
    jax.jit,
    static_argnames=("configs", "source_length", "target_length", "beam_size", "execution"),
)
def _enter(
    params: tuple[Params, ...],
    configs: tuple[TransformerConfig, ...],
    src: Int32[Array, "G S"],
    rules: Rules,
    source_length: int,
    target_length: int,
    beam_size: int,
    execution: SearchExecution,
) -> Slots:
    """Return a group before its first token."""
    row_rules = rules.of_rows()
    if "source" in row_rules:  # filled by what equals no token
        added, none = ((0, 0), (0, source_length - src.shape[1])), configs[0].tgt_vocab_size
        row_rules["source"] = jnp.pad(row_rules["source"], added, constant_values=none)
    state = first_state(
        params,
        configs,
        src,
        rules,
        target_length,
        beam_size,
        execution,
        memory_length=source_length,
    )
    return Slots(state, row_rules)


@partial(jax.jit, static_argnames="num_slots")
def _empty(group: Slots, num_slots: int) -> Slots:
    """Return slots in which nothing runs, of the shapes of a group."""
    state, row_rules = jax.tree.map(
        lambda x: jnp.broadcast_to(x[:1], (num_slots, *x.shape[1:])) if x.ndim else x, group
    )
    return Slots(state._replace(ended=jnp.ones(num_slots, bool)), row_rules)


@partial(jax.jit, static_argnames=("configs", "execution"), donate_argnames="slots")
def _advance(
    params: tuple[Params, ...],
    configs: tuple[TransformerConfig, ...],
    slots: Slots,
    group: Slots,
    places: Int32[Array, " G"],
    rules: Rules,
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

    state, row_rules = jax.tree.map(put, slots, group)
    caches = tuple(_entered(cache, places) for cache in state.caches)
    state, rules = state._replace(caches=caches), rules.replace(**row_rules)
    state = take_steps(params, configs, state, rules, (most_running, most_steps), execution)
    found = best_hypotheses(state, rules)
    return Slots(state, row_rules), state.ended, found, state.failed_at


def _entered(cache: Cache, places: Int32[Array, " G"]) -> Cache:
    """Return the cache whose rows in these places begin here, with its position below L.

    The position counts modulo the ring, else it would wrap after 2**31 steps. Rows that ended long
    ago keep a beginning that is no more than L steps back.
    """
    length = cache.ancestors.shape[2]
    position = cache.position % length
    begin = jnp.maximum(cache.begin - (cache.position - position), position - length)
    begin = begin.at[places].set(position, mode="drop")
    return cache._replace(position=position, begin=begin)
