"""The README's Python runs as it stands, from top to bottom, in one fresh interpreter."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_python_of_the_readme_runs(tmp_path):
    snippets = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
    assert len(snippets) >= 3
    program = tmp_path / "readme.py"
    program.write_text("\n".join(snippets), "utf-8")
    run = subprocess.run(
        [sys.executable, program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
