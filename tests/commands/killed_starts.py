"""Starts a run again from what a kill would leave before each of its changes of the disk.

A program for test_killed_starts.py, because no process gets rid of an audit hook. It copies the
output before each change: a kill leaves the same. Files that orbax writes without Python count not.
"""

import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

from jax_transformer.commands import main as cli
from jax_transformer.runs import evaluation
from jax_transformer.runs.checkpoints import HALF_WRITTEN
from jax_transformer.storage.writing import WRITING
from tests.commands.training import FILES, arguments, write_corpus
from tests.runs.kill_resume import losses, state_digest
from tests.storage.kills import CHANGES, contents
from tests.storage.kills import WRITING as WRITES

STEPS = 1


class Copies:
    """The copies of a folder before each of its changes, while `run` runs."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.folder, self.home, self.active = folder, home, False
        self.kept = {}  # by their contents
        self._lock = threading.RLock()
        sys.addaudithook(self._hook)

    def run(self, *command: str) -> list[Path]:
        """Run a command; return the copies that differ, the oldest first."""
        self.active, self.kept = True, {}
        try:
            cli.main(command)
        finally:
            self.active = False
        return list(self.kept.values())

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.active or not (event in CHANGES or event == "open"):
            return
        if event == "open" and not arguments[2] & WRITES:
            return
        # A name without its folder is below a descriptor, as in `shutil.rmtree`.
        paths = [str(path) for path in arguments if isinstance(path, str | Path)]
        if not any(path[:1] != "/" or path.startswith(str(self.folder)) for path in paths):
            return
        with self._lock:
            self.active = False
            copy = self._copy()
            self.kept.setdefault(tuple(contents(copy).items()), copy)
            self.active = True

    def _copy(self) -> Path:
        """Return a copy of the folder; other threads may change it at the same time."""
        target = self.home / f"{len(list(self.home.iterdir()))}"
        target.mkdir()
        while self.folder.exists():
            try:
                shutil.copytree(self.folder, target / "output", symlinks=True)
                break
            except (shutil.Error, FileNotFoundError):
                shutil.rmtree(target / "output", ignore_errors=True)
        return target / "output"


def result(output: Path) -> Any:
    """Return what a run has in the end: model, state, log, and nothing half-written."""
    names = [path.name for path in output.rglob("*")]
    half_written = [name for name in names if WRITING in name or HALF_WRITTEN in name]
    return contents(output / "model"), state_digest(output, STEPS), losses(output), half_written


def start_again(output: Path, first_command: list[str]) -> str:
    """Resume a run, or start it, as a supervisor's line does; return which of them it was."""
    try:
        cli.main(["train", f"--output={output}", "--resume"])
        return "resumed"
    except SystemExit as left:
        if "holds no checkpoint of a run; start one without resume" not in str(left.code):
            raise
    cli.main(["train", *first_command])
    return "started"


def main(home: Path, every: int) -> None:
    """Print how the copies, of a new run and of one that overwrites a run, come to their end.

    Args:
        home: An empty folder.
        every: 1 takes each of the copies, 5 the first of five.
    """
    write_corpus(home)
    output, other = home / "output", home / "copies"
    other.mkdir()
    files = {name: home / name for name in FILES}
    command = arguments(files, f"--output={output}", f"--steps={STEPS}")
    copies = Copies(output, other)
    # The pictures take most of the time of a tiny run.
    evaluation.draw_curves = evaluation.alignment_plot.draw = lambda *_, **__: None
    for options in ([], ["--overwrite"]):
        kept = copies.run("train", *command, *options)
        expected = result(output)
        step = 4 * every if options else every  # most lie in the deletion of the old run
        for copy in kept[::step]:
            shutil.rmtree(output)
            if copy.exists():
                shutil.copytree(copy, output)
            if options:
                cli.main(["train", *command, *options])
                print("overwritten")
            else:
                print(start_again(output, command))
            assert result(output) == expected, f"{copy}: another end"


if __name__ == "__main__":
    os.fsync = lambda descriptor: None  # slow, and no kill loses what the system was told to write
    main(Path(sys.argv[1]), int(sys.argv[2]))
