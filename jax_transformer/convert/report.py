"""What a conversion did with each tensor, and the error that shows every kind of fault at once."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections import Counter
from collections.abc import Iterable

from jax_transformer.errors import InputError

FAULTS = (
    "missing",
    "unexpected",
    "wrong shape",
    "wrong dtype",
    "not finite",
    "not tied",
    "not as computed",
)
LONGEST_NAME = 200  # characters of a name that a message shows
MOST_LINES = 18  # faults that a message shows; the report holds them all
CANDIDATES = 2000  # names among which the nearest is looked for


@dataclasses.dataclass(frozen=True)
class Entry:
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
        entries: One entry for each thing that happened to a tensor.
        hint: One remedy for many faults, as a prefix to strip; "" where there is none.
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

    def summary(self) -> str:
        """Return one line: the layout and how often each kind occurs."""
        counts = Counter(entry.kind for entry in self.entries)
        listed = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        return f"layout {self.layout!r}: {listed or 'nothing to do'}"

    def __str__(self) -> str:
        return "\n".join([self.summary(), *map(_line, self.entries)])


class ConversionError(InputError):
    """Tensors that do not fit their layout. Nothing was converted.

    The message shows the first faults of each kind and counts the others.

    Attributes:
        report: Everything that was found, with every fault in `report.faults`.
    """

    def __init__(self, report: Report) -> None:
        self.report = report
        kinds: dict[str, list[Entry]] = {}
        for entry in report.faults:
            kinds.setdefault(entry.kind, []).append(entry)
        counts = ", ".join(f"{len(entries)} {kind}" for kind, entries in kinds.items())
        lines = [f"layout {report.layout!r} does not fit, nothing was converted: {counts}"]
        lines += [f"  {report.hint}"] if report.hint else []
        shown = max(1, MOST_LINES // max(1, len(kinds)) - 1)
        for kind, entries in kinds.items():
            most = shown + 1 if len(entries) == shown + 1 else shown
            lines += map(_line, entries[:most])
            if len(entries) > most:
                lines.append(f"  ... and {len(entries) - most} more {kind}")
        super().__init__("\n".join(lines))


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Return a hint that names the most similar candidate, or "" where none is similar."""
    compared = [candidate[:LONGEST_NAME] for candidate in itertools.islice(candidates, CANDIDATES)]
    similar = difflib.get_close_matches(name[:LONGEST_NAME], compared, 1)
    return f"nearest: {similar[0]}" if similar else ""


def _line(entry: Entry) -> str:
    return f"  {entry.kind:<16}{entry.name[:LONGEST_NAME]}  {entry.detail}".rstrip()
