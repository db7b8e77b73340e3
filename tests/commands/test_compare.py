"""`jax-transformer compare`: exit code, table, JSON and page."""

import json

import numpy as np
import pytest

from jax_transformer import parity
from jax_transformer.commands.main import main

X = np.arange(12.0).reshape(3, 4) + 1


def saved(tmp_path, **arrays):
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}.safetensors"
    parity.record_arrays(arrays).save(path)
    return str(path)


def test_equal_records(tmp_path, capsys):
    a, b = saved(tmp_path, hidden=X, logits=X + 1), saved(tmp_path, hidden=X.T, logits=X + 1)
    main(["compare", a, b, "--json", str(tmp_path / "it.json")])
    assert capsys.readouterr().out.splitlines()[-1] == "a agrees with b"
    found = json.loads((tmp_path / "it.json").read_text())
    assert found.keys() == {
        "schema", "agrees", "first_differing", "explanations", "notes", "blocks"
    }  # fmt: skip
    assert (found["schema"], found["agrees"], found["first_differing"]) == (1, True, None)
    assert found["blocks"][1] == {
        "a": "logits",
        "b": "logits",
        "paired": "name",
        "error": 0.0,
        "epsilon": 2.0**-52,
        "form": "",
        "dtypes": ["float64", "float64"],
        "shape": [3, 4],
    }


def test_other_records(tmp_path, capsys):
    a, b = saved(tmp_path, hidden=X, logits=X), saved(tmp_path, hidden=X, logits=2 * X)
    files = ["--json", str(tmp_path / "it.json"), "--report", str(tmp_path / "it.html")]
    with pytest.raises(SystemExit) as left:
        main(["compare", a, b, *files])
    assert left.value.code == 1
    assert (
        capsys.readouterr().out.splitlines()[-1] == "a differs from b, first in logits, by 5.0e-01"
    )
    assert json.loads((tmp_path / "it.json").read_text())["first_differing"]["b"] == "logits"
    page = (tmp_path / "it.html").read_text()
    assert "a differs from b, first in logits" in page
    assert "http" not in page.replace("http-equiv", "")
    with pytest.raises(SystemExit, match=r"it.json: exists already"):
        main(["compare", a, b, *files])
    main(["compare", a, b, "--bound", "1e17"])
