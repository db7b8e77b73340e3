"""A model whose translations differ, lines that come in windows, and a search that stands still."""

import threading
from itertools import chain

import jax

from jax_transformer.decoding.slots import SlotSearch
from jax_transformer.translation.sources import windows
from jax_transformer.translation.translate import text_search, translate_windows
from tests.models import tiny_model


def varied_model(text="abc cab fed dab bead", **fields):
    """A model of random parameters: some of its translations end, others run to their limit."""
    untrained = tiny_model([text], **{"vocab_size": 16, "seed": 128, "max_length": 40} | fields)
    return untrained._replace(params=jax.tree.map(lambda leaf: 3 * leaf, untrained.params))


def translate_stream(model, lines, *, skip=0, bad_lines=None, console=None, **options):
    """Return an iterator over the translations of each line."""
    search = text_search([model], **options)
    of_lines = windows(lines, search.lines.window, skip)
    found = translate_windows(search, of_lines, skip=skip, bad_lines=bad_lines, console=console)
    return chain.from_iterable(found)


class HeldSearch:
    """A search that begins, and takes no step until `goes_on` is set."""

    def __init__(self, monkeypatch):
        self.begun, self.goes_on = threading.Event(), threading.Event()
        self.groups = []  # that entered
        advance = SlotSearch.advance

        def waits(slots, group, *bounds):
            self.begun.set()
            assert self.goes_on.wait(60)
            self.groups.append(group)
            return advance(slots, group, *bounds)

        monkeypatch.setattr(SlotSearch, "advance", waits)
