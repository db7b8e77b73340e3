"""Translations of lines that come in windows, as the command and `Translator` read them."""

from itertools import chain

from jax_transformer.translation.sources import windows
from jax_transformer.translation.translate import text_search, translate_windows


def translate_stream(model, lines, *, skip=0, bad_lines=None, console=None, **options):
    """Return an iterator over the translations of each line."""
    search = text_search([model], **options)
    of_lines = windows(lines, search.lines.window, skip)
    found = translate_windows(search, of_lines, skip=skip, bad_lines=bad_lines, console=console)
    return chain.from_iterable(found)
