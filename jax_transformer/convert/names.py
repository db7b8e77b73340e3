"""Names that are missing or unexpected, and what helps: a prefix, a field, the nearest name."""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.report import MOST_LINES, Report, group_layers, nearest
from jax_transformer.convert.table import BoundRow, Buffer, Layout, name_pattern
from jax_transformer.model.tree import LAYER, find_parameter, parameter_shapes


def compare_names(
    named: Mapping[str, Any],
    rows: Sequence[BoundRow],
    computed: Sequence[Buffer],
    layout: Layout,
    config: TransformerConfig,
    report: Report,
) -> None:
    """Report the names that a layout expects and nobody gave, and those that nobody expects."""
    copies: dict[tuple[Any, ...], list[str]] = {}
    for row in rows:
        if not row.zeros:
            copies.setdefault((row.paths, row.head), []).append(row.foreign)
    missing = [names[0] for names in copies.values() if not any(name in named for name in names)]
    missing += [buffer.foreign for buffer in computed if buffer.foreign not in named]
    expected = {row.foreign for row in rows} | {buffer.foreign for buffer in computed}
    unexpected = [name for name in named if name not in expected]
    report.hint = _hint(named, unexpected, missing)
    add_names(report, "missing", missing, unexpected)
    explain = functools.partial(why_unexpected, layout=layout, config=config)
    add_names(report, "unexpected", unexpected, missing or expected, explain)


def _hint(named: Collection[str], unexpected: Sequence[str], missing: Sequence[str]) -> str:
    """Return the remedy: a prefix that keeps half of the names from matching, or --drop."""
    absent = {*missing}
    prefixes = Counter(
        name[:end]
        for name in unexpected
        for end, character in enumerate(name, 1)
        if character == "." and name[end:] in absent
    )
    prefix, count = prefixes.most_common(1)[0] if prefixes else ("", 0)
    if not prefix or 2 * count < len(missing):
        drop = "tensors that the model has not are left out by --drop NAME ... on the command line"
        return drop if unexpected and not missing else ""
    begin = sum(name.startswith(prefix) for name in named)
    names = "every name begins" if begin == len(named) else f"{begin} of {len(named)} names begin"
    return (
        f"{names} with {prefix!r}: pass strip_prefixes=({prefix!r},), on the command line "
        f"--strip-prefixes {prefix}"
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
    first_names = (group[0] for group in group_layers(names).values())
    hinted = set(itertools.islice(first_names, MOST_LINES))
    for name in names:
        hint = explain(name) or nearest(name, candidates) if name in hinted else ""
        report.add(kind, name, hint)


def why_unexpected(name: str, layout: Layout, config: TransformerConfig) -> str:
    """Return why a tensor of the layout has no place in the config, and the remedy."""
    shapes = parameter_shapes(config)
    inside = f"{layout.scope}/" if layout.scope else ""
    for row in layout.rows:
        match = name_pattern(row.foreign).fullmatch(name)
        if match and row.applies_to(config):
            for path in (path.format_map(match.groupdict()) for path in row.paths):
                if f"{inside}{path}" not in shapes and find_parameter(f"{inside}{path}"):
                    return f"is {path}, which the config lacks{_remedy(f'{inside}{path}', config)}"
    return ""


def _remedy(path: str, config: TransformerConfig) -> str:
    """Return what the config would need, for example "; final_norm=True has it"."""
    parameter = find_parameter(path)
    layer = LAYER.search(path)
    if layer and int(layer[1]) >= (count := parameter.count(config)):
        return f", with num_{path.partition('/')[0]}_layers={count}"
    needs = [f"{field}={value!r}" for field, value in parameter.missing_fields(config).items()]
    return f"; {needs[0]} has it" if needs else ""
