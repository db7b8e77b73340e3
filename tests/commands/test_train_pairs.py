"""`jax_transformer.train`: pairs in Python give the run of `jax-transformer train`."""

import json

import jax
import numpy as np
import pytest

from jax_transformer import InputError, load, train
from tests.commands.training import WORDS, program
from tests.models import unchecked

pytestmark = pytest.mark.usefixtures("no_pictures")

PAIRS = [(word, word.upper()) for word in WORDS]
SETTINGS = {"vocab_size": 16, "d_model": 8, "num_heads": 2, "d_ff": 8, "num_encoder_layers": 1}
SETTINGS |= {"num_decoder_layers": 1, "steps": 4, "warmup_steps": 2, "bucket_count": 1}
SETTINGS |= {"max_tokens": 60, "evaluation_interval": 4}


@pytest.mark.exhaustive
def test_a_run_on_pairs_is_that_of_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    translator = train(iter(PAIRS), "python", PAIRS, prepared="store", **SETTINGS)
    assert "model of step 4 written to python" in capsys.readouterr().out
    records = [json.dumps({"source": source, "target": target}) for source, target in PAIRS]
    (tmp_path / "pairs.jsonl").write_text("\n".join(records))
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
    files = ["--source=pairs.jsonl", "--valid-source=pairs.jsonl", "--columns", "source", "target"]
    program(*files, *flags, "--output=command", "--prepared=store")
    params = [load(run).params for run in ("python", "command")]
    assert jax.tree.all(jax.tree.map(np.array_equal, *params))
    (result,) = translator(["ab"])
    assert isinstance(result.text, str)
    (result,) = train(PAIRS, "python", PAIRS, resume=True, prepared="store", steps=6)(["ab"])
    assert "resumed at step 4 of 6" in capsys.readouterr().out


@unchecked()
def test_what_is_no_pair_is_named(tmp_path):
    for wrong in ("ab", ("a",), ("a", None), ["a", "b", "c"]):
        with pytest.raises(InputError, match=r"pairs\[1\] = .* is not a source and a target"):
            train([("a", "b"), wrong], tmp_path / "run", prepared=tmp_path / "store")
    for named, fault in (
        ({"source": "a"}, "source: the pairs are in memory; leave it out"),
        ({"stepps": 3}, "stepps=3 is not a setting; did you mean steps"),
        ({"steps": "many"}, "steps='many' must be a whole number"),
        ({"learning_rate": 1e-3}, "schedule"),
        ({"training": {"steps": 3}}, "training=.* is not a setting"),
    ):
        with pytest.raises(InputError, match=fault):
            train(PAIRS, tmp_path / "run", prepared=tmp_path / "store", **named)
    assert not (tmp_path / "run").exists()
