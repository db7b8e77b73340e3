"""Names that are missing or unexpected, and what helps: a prefix, a field, the nearest name."""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.absent import why_unexpected
from jax_transformer.convert.report import MOST_LINES, Report, group_layers, nearest
from jax_transformer.convert.table import Buffer, Layout, Pair
from jax_transformer.model.parameters import parameter_shapes

NUMBER = re.compile(r"[0-9]+")


def compare_names(
    named: Mapping[str, Any],
    pairs: Sequence[Pair],
    computed: Sequence[Buffer],
    layout: Layout,
    config: TransformerConfig,
    report: Report,
) -> None:
    """Report the names that a layout expects and nobody gave, and those that nobody expects.

    Args:
        named: The given tensors by name.
        pairs: The layout's rows for the config.
        computed: The layout's buffers that must be there.
        layout: The foreign names.
        config: The shape of the model.
        report: Receives the faults, and the remedy for many of them.
    """
    copies: dict[tuple[str, ...], list[str]] = {}
    for pair in pairs:
        if not pair.zeros:
            copies.setdefault(pair.paths, []).append(pair.foreign)
    missing = [names[0] for names in copies.values() if not any(name in named for name in names)]
    missing += [buffer.foreign for buffer in computed if buffer.foreign not in named]
    expected = {pair.foreign for pair in pairs} | {buffer.foreign for buffer in computed}
    unexpected = [name for name in named if name not in expected]
    report.hint = _prefix_hint(named, unexpected, set(missing))
    add_names(report, "missing", missing, unexpected)
    shapes = parameter_shapes(config, layout.scope)
    explain = functools.partial(why_unexpected, layout=layout, config=config, shapes=shapes)
    add_names(report, "unexpected", unexpected, missing or expected, explain)


def _prefix_hint(named: Mapping[str, Any], unexpected: Sequence[str], missing: set[str]) -> str:
    """Return the remedy where a prefix keeps at least half of the missing names from matching."""
    prefixes: Counter[str] = Counter()
    for name in unexpected:
        ends = (index + 1 for index, character in enumerate(name) if character == ".")
        prefixes.update(name[:end] for end in ends if name[end:] in missing)
    if not prefixes:
        return _lacking_prefix_hint(unexpected, missing)
    prefix, count = prefixes.most_common(1)[0]
    if 2 * count < len(missing):
        return ""
    begin = sum(name.startswith(prefix) for name in named)
    who = "every name begins" if begin == len(named) else f"{begin} of {len(named)} names begin"
    return (
        f"{who} with {prefix!r}: pass strip_prefixes=({prefix!r},), on the command line "
        f"--strip-prefixes {prefix}"
    )


def _lacking_prefix_hint(unexpected: Sequence[str], missing: set[str]) -> str:
    """Return the remedy where a prefix of the layout keeps half of the given names from matching.

    A part of a module is often saved alone, and its layout is that of the whole.
    """
    given, prefixes = set(unexpected), Counter[str]()
    for name in missing:
        ends = (index + 1 for index, character in enumerate(name) if character == ".")
        prefixes.update(name[:end] for end in ends if name[end:] in given)
    if not prefixes:
        return ""
    prefix, count = prefixes.most_common(1)[0]
    if 2 * count < len(missing):
        return ""
    return (
        f"names of the layout begin with {prefix!r}, which the given names lack: pass "
        f"{{{prefix!r} + name: tensor for name, tensor in state_dict.items()}}, or use a layout "
        "without it"
    )


def add_names(
    report: Report,
    kind: str,
    names: Sequence[str],
    others: Iterable[str],
    explain: Callable[[str], str] = lambda name: "",
) -> None:
    """Add an entry for each name, with a hint at the first of each group that a message shows."""
    candidates = list(others)
    alike: dict[tuple[str, ...], list[str]] = {}  # by their numbers: the layer comes first
    for candidate in candidates:
        alike.setdefault(tuple(NUMBER.findall(candidate)), []).append(candidate)
    first_names = (group[0] for group in group_layers(names).values())
    hinted = set(itertools.islice(first_names, MOST_LINES))
    for name in names:
        hint = ""
        if name in hinted:
            same_layer = alike.get(tuple(NUMBER.findall(name)), [])
            hint = explain(name) or nearest(name, same_layer) or nearest(name, candidates)
        report.add(kind, name, hint)
