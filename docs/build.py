"""Build the site from this folder: python -m docs.build, then open build/site/index.html.

The tutorials are shown without their results, unless `--tutorials` executes them: all, or those
that it names. Needs the extra [test]; nothing of the site loads from elsewhere.
"""

import argparse
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

from docs import generated, notebooks

ROOT = Path(__file__).parents[1]
PAGES, STAGED, SITE = ROOT / "docs", ROOT / "build" / "docs", ROOT / "build" / "site"
TUTORIALS = sorted((PAGES / "tutorials").glob("*.py"))
SCRIPT_LINK = re.compile(r"\]\(([\w./]*tutorials/\w+)\.py\)")
PROGRAMS = shutil.ignore_patterns("*.py", "__pycache__", "draw")


def stage(executed: Collection[str]) -> None:
    """Write every page into `STAGED`: those that are written by hand, and those made by programs.

    Args:
        executed: Names of the tutorials that are executed.
    """
    shutil.rmtree(STAGED, ignore_errors=True)
    shutil.copytree(PAGES, STAGED, ignore=PROGRAMS)
    shutil.copytree(PAGES / "examples", STAGED / "examples", dirs_exist_ok=True)
    for script in TUTORIALS:
        notebooks.publish(script, STAGED / "tutorials", execute=script.stem in executed)
    for page in STAGED.rglob("*.md"):  # a link to a tutorial's script leads to its page
        text = page.read_text("utf-8")
        page.write_text(SCRIPT_LINK.sub(r"](\1.md)", text), "utf-8")
    (STAGED / "reference" / "side_by_side.md").write_text(generated.side_by_side(), "utf-8")
    (STAGED / "reference" / "commands.md").write_text(generated.commands(), "utf-8")


def build() -> None:
    """Build the staged pages; a warning, as of a broken link, ends the build with its text."""
    shutil.rmtree(SITE, ignore_errors=True)
    zensical = Path(sys.executable).with_name("zensical")
    subprocess.run([zensical, "build", "--clean", "--strict"], cwd=ROOT, check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    executed = "execute these tutorials; without a name, all"
    parser.add_argument("--tutorials", nargs="*", metavar="NAME", help=executed)
    named = parser.parse_args().tutorials
    began = time.perf_counter()
    stage([] if named is None else named or [script.stem for script in TUTORIALS])
    staged = time.perf_counter()
    build()
    done = time.perf_counter()
    print(f"{SITE / 'index.html'}: pages {staged - began:.0f} s, site {done - staged:.0f} s")
