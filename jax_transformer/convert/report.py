"""What a conversion did with each tensor, and the error that lists every fault at once."""

from __future__ import annotations

import dataclasses
import difflib
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
MOST_LINES = 200  # faults that a message shows; the report holds them all


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line of a report.

    Attributes:
        kind: What happened: "mapped", "transposed", "reshaped", "split" (one tensor, several
            parameters), "tied" (a copy of another), "untied" (shares memory with another, but is
            a parameter of its own here), "computed", "stripped" (of a prefix), "converted" (to
            another dtype) or one of `FAULTS`.
        name: The foreign tensor (of a fault on export: the parameter).
        detail: Where it went, or what is wrong with it.
    """

    kind: str
    name: str
    detail: str


@dataclasses.dataclass
class Report:
    """What went where, in the order it happened; prints as plain text.

    Attributes:
        layout: Name of the layout.
        entries: One for each thing that happened to a tensor.
    """

    layout: str
    entries: list[Entry] = dataclasses.field(default_factory=list)

    def add(self, kind: str, name: str, detail: str) -> None:
        """Append an entry."""
        self.entries.append(Entry(kind, name, detail))

    def names(self, kind: str) -> list[str]:
        """Return the names of the tensors to which `kind` happened."""
        return [entry.name for entry in self.entries if entry.kind == kind]

    @property
    def faults(self) -> list[Entry]:
        """The entries for which a conversion is refused."""
        return [entry for entry in self.entries if entry.kind in FAULTS]

    def summary(self) -> str:
        """Return one line: the layout and how often each kind occurs."""
        counts = Counter(entry.kind for entry in self.entries)
        told = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        return f"layout {self.layout!r}: {told or 'nothing to do'}"

    def __str__(self) -> str:
        return "\n".join([self.summary(), *map(_line, self.entries)])


class ConversionError(InputError):
    """Tensors that do not fit their layout; the message lists every fault, nothing was changed.

    Attributes:
        report: Everything that was found, the faults as `report.faults`.
    """

    def __init__(self, report: Report) -> None:
        self.report = report
        faults = report.faults
        counts = Counter(entry.kind for entry in faults)
        told = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        lines = [f"layout {report.layout!r} does not fit, nothing was converted: {told}"]
        lines += map(_line, faults[:MOST_LINES])
        if len(faults) > MOST_LINES:
            lines.append(f"  and {len(faults) - MOST_LINES} more")
        super().__init__("\n".join(lines))


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Return a hint at the most similar of the candidates, or nothing where none is similar."""
    found = difflib.get_close_matches(
        name[:LONGEST_NAME], [candidate[:LONGEST_NAME] for candidate in candidates], 1
    )
    return f"nearest: {found[0]}" if found else ""


def _line(entry: Entry) -> str:
    return f"  {entry.kind:<16}{entry.name[:LONGEST_NAME]}  {entry.detail}".rstrip()
