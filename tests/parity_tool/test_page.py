"""docs/how_to/compare_two_models.md is followed as a reader would."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from jax_transformer.commands.main import main

PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "compare_two_models.md"


@pytest.mark.exhaustive
def test_the_page_is_executed(tmp_path, monkeypatch, capsys):
    text = PAGE.read_text("utf-8")
    program = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    (command,) = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    with pytest.raises(SystemExit) as left:
        main(command.split()[1:])
    assert left.value.code == 1
    (shown,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in shown.splitlines() if line != "..." and line not in printed] == []
    assert (tmp_path / "it.html").exists()
