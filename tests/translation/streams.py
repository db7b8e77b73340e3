"""Translations of lines that come in windows, as the command and `Translator` read them."""

from itertools import chain

from jax_transformer.translation.source_batches import windows
from jax_transformer.translation.text_search import text_search
from jax_transformer.translation.translate import split_options, translate_windows


def translate_stream(model, lines, *, skip=0, bad_lines=None, console=None, **options):
    """Return an iterator over the translations of each line."""
    reading, batching, named = split_options(options)
    search, parts = text_search([model], **named), windows(lines, batching.window, skip)
    shown = {"bad_lines": bad_lines, "console": console}
    return chain.from_iterable(translate_windows(search, parts, reading, batching, **shown))
