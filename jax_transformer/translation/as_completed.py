"""Translations of texts that come one by one: each enters a search that is already running."""

from collections.abc import Iterable, Iterator

import jax
import numpy as np

from jax_transformer.decoding.generation import NonFiniteError
from jax_transformer.decoding.slots import Ended, Running, advance
from jax_transformer.errors import InputError
from jax_transformer.runtime.sharding import row_shards
from jax_transformer.text.text_files import is_blank
from jax_transformer.translation.source_batches import Pool, empty_pool, slot_length
from jax_transformer.translation.translate import (
    Place,
    TextSearch,
    Translation,
    blank_translations,
    encode_sources,
)

MOST_STEPS = 4  # after which texts that have come enter


def translate_as_completed(
    search: TextSearch, texts: Iterable[str | None], *, prefix: str = ""
) -> Iterator[tuple[int, list[Translation] | InputError]]:
    """Yield the number of each text, from 1, and its translations as soon as they are complete.

    Each length of slots has a search of its own, which takes in a text while others run.

    Args:
        texts: None says that no text is there at present: those that run then take a few steps.
        prefix: Put before every text that is not blank.

    Yields:
        The error in place of translations of a text that is too long or no source of this model.
    """
    config, shards = search.models[0].config, row_shards(search.mesh)
    most_tokens = search.lines.max_tokens * shards // search.generation.beam_size
    pools: dict[int, Pool] = {}  # with the members that wait, by the length of their slots
    running: dict[int, Running] = {}
    sources: dict[int, list[int]] = {}  # of the texts that are not complete
    for number, text in _numbered(texts, sources):
        full = None  # the length of slots for which a group is complete
        if text is not None:
            line = "" if is_blank(text) else prefix + text
            try:
                (source,) = encode_sources(search, [line], [Place(number)])
            except InputError as error:
                yield number, error
                continue
            if not source:
                yield number, blank_translations(search.generation)
                continue
            sources[number], length = source, slot_length(len(source), config)
            if length not in pools:
                sizes = length, search.limit(length), most_tokens, shards
                pools[length] = empty_pool(*sizes)
                running[length] = search.empty_slots(pools[length])
            pools[length].members.append(number)
            if len(pools[length].members) < pools[length].group:
                continue
            full = length
        for length in running:
            with jax.set_mesh(search.mesh):
                turn = _turn(search, pools[length], running[length], sources, length == full)
                pools[length], running[length], all_ended = turn
            for ended in all_ended:
                del sources[ended.member]
                try:
                    yield ended.member, search.found(ended, Place(ended.member))
                except NonFiniteError as error:
                    yield ended.member, error


def _numbered(
    texts: Iterable[str | None], sources: dict[int, list[int]]
) -> Iterator[tuple[int, str | None]]:
    """Yield texts and their numbers, and None; behind the last text while any source is left."""
    number = 0
    for text in texts:
        number += text is not None
        yield number, text
    while sources:
        yield number, None


def _turn(
    search: TextSearch,
    pool: Pool,
    running: Running,
    sources: dict[int, list[int]],
    is_full: bool,
) -> tuple[Pool, Running, list[Ended]]:
    """Let members of a pool that wait enter its slots: a full group at once, or what finds room.

    Then some steps follow, if the group is not full: more texts are there otherwise.
    """
    all_ended, num_slots = [], pool.num_slots
    free = int(np.sum(running.owners < 0))
    if is_full and free < pool.group:
        running, all_ended = advance(running, None, pool.group)
        free = pool.group
    entering, left = pool.members[:free], pool.members[free:]
    group = None
    if entering:
        places = {number: Place(number) for number in entering}
        (group,) = search.groups(pool._replace(members=entering), sources, places)
    if group is not None or free < num_slots:
        bounds = (0,) if is_full else (num_slots, MOST_STEPS)
        running, ended = advance(running, group, *bounds)
        all_ended += ended
    return pool._replace(members=left), running, all_ended
