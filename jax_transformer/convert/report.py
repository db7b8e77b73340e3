"""What a conversion did with each tensor, and the error that shows every kind of fault at once."""

import dataclasses
import difflib
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jax_transformer.errors import InputError, one_line

FAULTS = (
    "missing",
    "unexpected",
    "wrong shape",
    "wrong dtype",
    "not finite",
    "not tied",
    "shared",
    "not as computed",
)
LONGEST_NAME = 200  # characters of a name that a message shows
MOST_LINES = 18  # faults that a message shows; the report holds them all
CANDIDATES = 2000  # names among which the nearest is looked for
LAYER_NUMBERS = 4  # the layer's number is looked for among the first of a name
NUMBER = re.compile(r"(?<![0-9])[0-9]{1,6}(?![0-9])")
Template = tuple[str, str] | tuple[str]  # what precedes and follows the layer's number


class Entry(NamedTuple):
    """One line of a report.

    Attributes:
        kind: What happened: "mapped", "transposed", "reshaped", "split" (one tensor, several
            parameters), "tied" (a copy of another tensor), "untied" (shares memory with another
            tensor, but becomes a parameter of its own), "computed", "stripped" (of a prefix),
            "converted" (to another dtype), "zeros" (of an absent tensor), "not read" or one of
            `FAULTS`.
        name: The foreign tensor; for a fault of `to_tensors`, the parameter.
        detail: The parameter that it became, or what is wrong with it.
    """

    kind: str
    name: str
    detail: str


@dataclasses.dataclass
class Report:
    """What a conversion did with each tensor, in order; prints as plain text.

    Attributes:
        layout: Name of the layout.
        entries: What was done with each tensor, or what is wrong with it.
        hint: One remedy for many faults, for example a prefix to strip.
    """

    layout: str
    entries: list[Entry] = dataclasses.field(default_factory=list)
    hint: str = ""

    def add(self, kind: str, name: str, detail: str) -> None:
        """Append an entry."""
        self.entries.append(Entry(kind, name, detail))

    def names(self, kind: str) -> list[str]:
        """Return the names in the entries of this kind."""
        return [entry.name for entry in self.entries if entry.kind == kind]

    @property
    def faults(self) -> list[Entry]:
        """The entries for which a conversion is refused."""
        return [entry for entry in self.entries if entry.kind in FAULTS]

    def __str__(self) -> str:
        counts = Counter(entry.kind for entry in self.entries)
        listed = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        summary = f"layout {self.layout!r}: {listed or 'nothing to do'}"
        return "\n".join([summary, *map(_line, self.entries)])

    __repr__ = __str__


class ConversionError(InputError):
    """Tensors that do not fit their layout. Nothing was converted.

    The message shows the first faults of each kind and counts the others. Names that differ only in
    the number of the layer are one line, for example "layers.{0..5}.norm.weight".
    """

    def __init__(self, report: Report) -> None:
        self.report = report
        kinds: dict[str, list[Entry]] = {}
        for entry in report.faults:
            kinds.setdefault(entry.kind, []).append(entry)
        counts = ", ".join(f"{len(entries)} {kind}" for kind, entries in kinds.items())
        lines = [f"layout {report.layout!r} does not fit, nothing was converted: {counts}"]
        lines += [f"  {one_line(report.hint)}"] if report.hint else []
        shown = max(1, MOST_LINES // max(1, len(kinds)) - 1)
        for kind, entries in kinds.items():
            groups = _alike(entries)
            most = shown + 1 if len(groups) == shown + 1 else shown
            lines += [_line(_as_one(*group)) for group in groups[:most]]
            if more := sum(len(group) for _, group in groups[most:]):
                lines.append(f"  ... and {more} more {kind}")
        super().__init__(*lines)


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Return a hint that names the most similar candidate, or "" where none is similar."""
    compared = [candidate[:LONGEST_NAME] for candidate in itertools.islice(candidates, CANDIDATES)]
    similar = difflib.get_close_matches(name[:LONGEST_NAME], compared, 1)
    return f"nearest: {similar[0]}" if similar else ""


def group_layers(names: Sequence[str]) -> dict[Template, list[str]]:
    """Return names by the text around the layer's number: the one that gives the fewest groups."""
    best: dict[Template, list[str]] = {(name,): [name] for name in names}
    numbers = [list(itertools.islice(NUMBER.finditer(name), LAYER_NUMBERS)) for name in names]
    for position in range(max(map(len, numbers), default=0)):
        groups: dict[Template, list[str]] = {}
        for name, matches in zip(names, numbers, strict=True):
            template: Template = (name,)
            if len(matches) > position:
                begin, end = matches[position].span()
                template = name[:begin], name[end:]
            groups.setdefault(template, []).append(name)
        if len(groups) < len(best):
            best = groups
    return best


def _alike(entries: Sequence[Entry]) -> list[tuple[Template, list[Entry]]]:
    """Return entries of one kind in groups; a message shows each as one line."""
    templates = group_layers([entry.name for entry in entries])
    template_of = {name: template for template, names in templates.items() for name in names}
    groups: dict[tuple[Template, str], list[Entry]] = {}
    for entry in entries:
        # The hint at a missing or unexpected name depends on the layer.
        detail = "" if entry.kind in ("missing", "unexpected") else entry.detail
        groups.setdefault((template_of[entry.name], detail), []).append(entry)
    return [(template, group) for (template, _), group in groups.items()]


def _as_one(template: Template, entries: Sequence[Entry]) -> Entry:
    """Return one entry for a group, with the numbers of its layers in braces."""
    first = entries[0]
    if len(entries) == 1 or len(template) == 1:  # alone, or one name several times
        return first
    before, after = template
    digits = [entry.name[len(before) : len(entry.name) - len(after)] for entry in entries]
    numbers = sorted(set(map(int, digits)))
    if len(numbers) == numbers[-1] - numbers[0] + 1:
        shown = f"{numbers[0]}..{numbers[-1]}"
    else:
        shown = ",".join([*map(str, numbers[:8]), *(["..."] if len(numbers) > 8 else [])])
    detail = first.detail
    if first.kind in ("missing", "unexpected"):
        detail = re.sub(rf"(?<![0-9]){digits[0]}(?![0-9])", f"{{{shown}}}", detail, count=1)
    return Entry(first.kind, f"{before}{{{shown}}}{after}", detail)


def _line(entry: Entry) -> str:
    name = entry.name[:LONGEST_NAME]
    name = name if name.isprintable() else ascii(name)[1:-1]  # a name may hold line breaks
    return f"  {entry.kind:<16}{name}  {one_line(entry.detail)}".rstrip()
