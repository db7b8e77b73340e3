"""Try what a hostile user tries: python -m benchmarks.attack --minutes 60 --seed 1.

Each try is a mutated file, a setting, a text, a call or a kill. The library must refuse it in one
line, or give the result that it would give without the mutation, or take it as another input that
is as good. The table counts what became of the tries; the folder --keep has those that broke a
promise, each with the command that repeats it. The exit code is 1 if there is one.
"""

import itertools
import sys
import tempfile
import time
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.attack.driver import WEIGHTS, Survey, attack, draws, repeat_line
from benchmarks.attack.outcomes import Outcome


def show(survey: Survey, seconds: float) -> Table:
    """Return the counts as a table, a column for each kind."""
    kinds = [kind for kind, counts in survey.outcomes.items() if counts]
    title = f"{survey.tries:,} tries in {seconds:,.0f} s"
    table = Table("became of it", *kinds, "all", title=title)
    rows = {"tries": [sum(survey.outcomes[kind].values()) for kind in kinds]}
    rows |= {
        str(outcome): [survey.outcomes[kind][outcome] for kind in kinds] for outcome in Outcome
    }
    for name, counts in rows.items():
        table.add_row(name, *(f"{count:,}" for count in counts), f"{sum(counts):,}")
    growths = [survey.largest[kind].growth / 2**20 for kind in kinds]
    times = [survey.slowest[kind].seconds for kind in kinds]
    for name, values in (("largest growth of memory, MiB", growths), ("slowest try, s", times)):
        table.add_row(name, *(f"{value:.1f}" for value in values), f"{max(values):.1f}")
    return table


def show_faults(survey: Survey) -> str:
    """Return the faults, the most frequent one first, each with a command that repeats it."""
    lines = []
    faults = sorted(survey.faults.items(), key=lambda item: -len(item[1]))
    for (kind, outcome, cause), results in faults:
        lines.append(f"- {len(results)} x {outcome}, {kind}: {cause}")
        lines += [f"    {result.what}\n    {repeat_line(result)}" for result in results[:2]]
    return "\n".join(lines)


def main(
    minutes: float = 1.0,
    seed: int = 0,
    tries: int | None = None,
    keep: Path | None = None,
    only: str | None = None,
    kinds: tuple[str, ...] = tuple(WEIGHTS),
    quick: bool = False,
) -> None:
    """Attack, print the counts and the faults; leave with 1 where there is a fault.

    Args:
        minutes: How long.
        seed: Of the draws; equal seeds give equal tries.
        tries: Stop after so many; then the time does not count.
        keep: Folder that gets the tries that broke a promise; if None, one below /tmp.
        only: KIND:SEED of one try to repeat.
        kinds: Kinds to try.
        quick: Attack only what is made within a second: no models of transformers, no runs.
    """
    keep = keep or Path(tempfile.mkdtemp(prefix="attack-"))
    keep.mkdir(parents=True, exist_ok=True)
    started, until = time.monotonic(), time.monotonic() + 60 * minutes
    chosen = draws(seed, {kind: WEIGHTS[kind] for kind in kinds})
    if tries is not None:
        chosen, until = itertools.islice(chosen, tries), float("inf")
    if only is not None:
        kind, _, number = only.partition(":")
        chosen, until = iter([(kind, int(number))]), float("inf")
    survey = Survey(keep)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            attack(chosen, survey, Path(scratch), until=until, quick=quick)
        except KeyboardInterrupt:
            print("interrupted")
    console = Console(width=110)
    console.print(show(survey, time.monotonic() - started))
    if survey.faults:
        report = show_faults(survey)
        (keep / "faults.txt").write_text(report + "\n")
        print(f"{report}\n\nkept in {keep}")
        sys.exit(1)


if __name__ == "__main__":
    tyro.cli(main)
