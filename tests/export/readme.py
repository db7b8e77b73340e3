"""The Python of the README of an exported model, run where this library cannot be imported."""

import re

from tests.programs import run_python

# What a process does that has neither this library nor what only this library needs.
WITHOUT = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"{{name}} is not installed here")

sys.meta_path.insert(0, Blocked())
"""
LIBRARY = ["jax_transformer", "torch_reference", "flax", "optax"]


def run_readme(folder, lines, *arguments, without=(), added=""):
    """Run the Python of a folder's README on lines; return what it prints.

    Args:
        arguments: Of the program, behind the folder.
        without: Libraries that cannot be imported either.
        added: Code that goes on from it.
    """
    (program,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text("utf-8"), re.S)
    path = folder.parent / "translate.py"
    path.write_text(WITHOUT.format(blocked=[*LIBRARY, *without]) + program + added, "utf-8")
    read = "".join(f"{line}\n" for line in lines)
    done = run_python(path.name, folder.name, *arguments, cwd=folder.parent, read=read)
    return done.stdout.split("\n")[:-1]
