"""Translations of texts that come one by one: each enters a search that is already running."""

from collections.abc import Iterable, Iterator

import jax

from jax_transformer.decoding.generation import NonFiniteError
from jax_transformer.decoding.slots import Ended, Running, advance, free_slots
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
            if len(pools[length].members) < free_slots(running[length]):
                continue  # more of them may be there
        for length, pool in pools.items():
            running[length], all_ended = _turn(search, pool, running[length], sources)
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
    search: TextSearch, pool: Pool, running: Running, sources: dict[int, list[int]]
) -> tuple[Running, list[Ended]]:
    """Let members of a pool that wait enter its free slots, and take some steps."""
    free = free_slots(running)
    entering, pool.members[:] = pool.members[:free], pool.members[free:]
    if not entering and free == pool.num_slots:
        return running, []
    places = {number: Place(number) for number in entering}
    with jax.set_mesh(search.mesh):
        for group in search.groups(pool._replace(members=entering), sources, places):
            running, _ = advance(running, group, 0)
        return advance(running, None, pool.num_slots, MOST_STEPS)
