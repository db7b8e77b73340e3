"""Kills writers, damages what they wrote and puts strange things beside it, in any order."""

import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jax_transformer import InputError
from tests.fuzz.mutations import changed_bytes
from tests.fuzz.outcomes import Fault, Found, is_short, tree_digest
from tests.storage.kills import WRITERS, contents, is_killed

VERSIONS = st.integers(0, 1)
MOST_CHANGES = 40  # of the disk that a writer makes
NEIGHBOURS = {
    "a link to the user's folder": lambda path, victim: path.symlink_to(victim),
    "a link to the user's file": lambda path, victim: path.symlink_to(victim / "thesis.tex"),
    "a link to nothing": lambda path, victim: path.symlink_to("nothing"),
    "a FIFO": lambda path, victim: os.mkfifo(path),
    "a file": lambda path, victim: path.write_text("x"),
    "a folder with links": lambda path, victim: (
        path.mkdir(),
        [(path / name).symlink_to(victim) for name in ("old", "new", "config.json")],
    ),
}


class Machine(RuleBasedStateMachine):
    """A writer that is killed and goes on; a twin that nothing happens to says what is right."""

    found: Found  # counts the histories

    @initialize(name=st.sampled_from(list(WRITERS)))
    def choose(self, name: str) -> None:
        """Choose what is written; beside it are files of the user that no step may change."""
        self.home, self.writer = Path(tempfile.mkdtemp()), WRITERS[name]
        self.folder, self.twin, self.victim = (
            self.home / name for name in ("folder", "twin", "victim")
        )
        for folder in (self.folder, self.twin, self.victim):
            folder.mkdir()
        (self.victim / "thesis.tex").write_text("years of work")
        (self.victim / "config.json").write_text("{}")
        self.before, self.target = tree_digest(self.victim), self.folder / f"model{name}"
        self.damaged = self.crowded = False

    def teardown(self) -> None:
        """Remove the home."""
        if hasattr(self, "home"):
            shutil.rmtree(self.home)
            self.found.outcomes["histories"] += 1

    def visible(self, folder: Path) -> dict[str, bytes]:
        """Return the contents without hidden names, which a kill may leave."""
        paths = {path.relative_to(folder): path for path in folder.rglob("*")}
        shown = {name: path for name, path in paths.items() if name.parts[0][0] != "."}
        return {str(name): path.read_bytes() for name, path in shown.items() if path.is_file()}

    @rule(version=VERSIONS)
    def write(self, version: int) -> None:
        """Write to the end: then all is as in the twin, and nothing is left of killed writers."""
        before = self.visible(self.folder)
        try:
            self.writer.write(self.target, version)
        except InputError as error:
            if not is_short(error) or not (self.damaged or self.crowded):
                raise
            if self.visible(self.folder) != before:
                raise Fault(f"refused ({error}) after a change") from error
            return
        if any(path.name == "thesis.tex" for path in self.folder.rglob("*")):
            raise Fault("files of the user are in what was written")
        if self.damaged or self.crowded:
            return
        self.writer.write(self.twin / self.target.name, version)
        if contents(self.folder) != contents(self.twin):
            raise Fault(f"after a write there are {[*contents(self.folder)]}")

    @rule(version=VERSIONS, moment=st.integers(1, MOST_CHANGES))
    def kill(self, version: int, moment: int) -> None:
        """Kill a writer at a change of the disk: the old content is there, or the new one."""
        if self.damaged or self.crowded:
            return
        is_killed(lambda: self.writer.write(self.target, version), self.folder, moment)
        found, old = self.visible(self.folder), self.visible(self.twin)
        if found != old:
            self.writer.write(self.twin / self.target.name, version)
            if found != self.visible(self.twin):
                raise Fault(f"neither the old nor the new content after change {moment}")

    @rule(kind=st.sampled_from(list(NEIGHBOURS)))
    def crowd(self, kind: str) -> None:
        """Put something where a writer keeps what is not finished."""
        path = self.target.with_name(f".writing.{self.target.name}")
        if not os.path.lexists(path):
            NEIGHBOURS[kind](path, self.victim)
        self.crowded = True

    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        """Change the bytes of a file that was written."""
        paths = [path for path in sorted(self.folder.rglob("*")) if path.is_file()]
        if paths := [path for path in paths if not path.is_symlink()]:
            path = data.draw(st.sampled_from(paths))
            path.write_bytes(data.draw(changed_bytes(path.read_bytes())))
            self.damaged = True

    @invariant()
    def only_writing_changes_files(self) -> None:
        """What is there is read, or refused in one line where it was damaged."""
        if tree_digest(self.victim) != self.before:
            raise Fault("files of the user were changed")
        if not self.target.exists():
            return
        before = tree_digest(self.folder)
        try:
            self.writer.read(self.target)
        except InputError as error:
            if not self.damaged or not is_short(error):
                raise
        if tree_digest(self.folder) != before:
            raise Fault("reading has changed something")
