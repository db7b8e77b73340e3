"""The tutorials of docs/tutorials: scripts that become executed notebooks and pages.

A script has the percent format of jupytext and runs as `python FILE`, too. A cell that draws names
the words for its picture: `# %% alt="..."`.
"""

import base64
import os
import tempfile
from pathlib import Path

import jupytext
from nbclient import NotebookClient
from nbformat import NotebookNode


def read(script: Path) -> NotebookNode:
    """Return the notebook of a script without results."""
    notebook = jupytext.read(script)
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    return notebook


def executed(script: Path) -> NotebookNode:
    """Return the notebook of a script with its results, executed in an empty folder."""
    notebook = read(script)
    # The code of this folder, also where another copy of it is installed.
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": folder}})
        client.execute(env=environment)
    return notebook


def publish(script: Path, folder: Path, execute: bool = True) -> None:
    """Write a tutorial into a folder: its page, its pictures, its notebook and its script."""
    name = script.stem
    notebook = executed(script) if execute else read(script)
    jupytext.write(notebook, folder / f"{name}.ipynb")
    (folder / script.name).write_bytes(script.read_bytes())
    title, *cells = notebook.cells
    heading, _, text = title.source.partition("\n")
    offer = f"Download this page as [a notebook]({name}.ipynb) or [a script]({script.name})."
    parts = [heading, offer, text.strip()]
    for number, cell in enumerate(cells):
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            if output.output_type == "stream" and output.name == "stdout":
                parts.append(
                    f'<div class="printed" markdown>\n\n```text\n{output.text}```\n\n</div>'
                )
            elif "image/png" in output.get("data", {}):
                picture = f"{name}_{number}.png"
                (folder / picture).write_bytes(base64.b64decode(output.data["image/png"]))
                parts.append(f"![{cell.metadata['alt']}]({picture})")
    (folder / f"{name}.md").write_text("\n\n".join(parts) + "\n", "utf-8")
