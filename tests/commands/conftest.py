"""A tiny text in the working directory, a run on it that several modules go on from, commands."""

import contextlib
import gzip
import io
import json
import shutil
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest
import torch
from torch import nn

from jax_transformer.commands import main as cli
from jax_transformer.commands.train_arguments import named_settings
from jax_transformer.convert.huggingface import to_huggingface
from jax_transformer.runs import evaluation
from jax_transformer.runs.model_settings import model_config
from jax_transformer.storage import weights as weight_files
from jax_transformer.tokenizers import train_byte_pair
from tests.commands.training import (
    BETTER,
    FIELDS,
    FILES,
    OTHER,
    REFERENCES,
    WORDS,
    WORSE,
    arguments,
    program,
    write_corpus,
)
from tests.convert.test_toy_family import add_toy
from tests.models import random_params
from tests.porting.models import SHAPES
from tests.porting.recorded import write


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """The four files in the working directory."""
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path)
    return {name: name for name in FILES}


@pytest.fixture(scope="session")
def first_run(tmp_path_factory):
    """A run of 12 steps at model, beside its four files, and what it has printed."""
    directory, shown = tmp_path_factory.mktemp("first"), io.StringIO()
    write_corpus(directory)
    options = arguments({name: directory / name for name in FILES}, "--evaluation-interval=5")
    with contextlib.chdir(directory), contextlib.redirect_stdout(shown):
        program(*options, "--output=model")
    return directory, shown.getvalue()


@pytest.fixture
def finished(first_run, corpus):
    """A copy of that run in the working directory."""
    return Path(shutil.copytree(first_run[0] / "model", "model"))


@pytest.fixture
def base(first_run, corpus, no_pictures):
    """A copy of that run at base, in the working directory."""
    return Path(shutil.copytree(first_run[0] / "model", "base"))


def write_toy(folder):
    """Write a Hugging Face folder in bfloat16, with a file of each sort beside the model."""
    tokenizer = train_byte_pair([*WORDS, *map(str.upper, WORDS)], vocab_size=16)
    fields = named_settings(["--source=x"]).arguments().model
    sizes = {"num_encoder_layers": 1, "num_decoder_layers": 1, "d_model": 8, "num_heads": 2}
    sizes |= dict.fromkeys(("src_vocab_size", "tgt_vocab_size"), tokenizer.src_vocab_size)
    ids = {"pad_id": 0, "bos_id": 1, "eos_id": 2, "d_ff": 8, "dropout": 0.2}
    config = model_config({**fields, **sizes, **ids}, tokenizer)
    params = random_params(config, dtype=jax.numpy.bfloat16)
    to_huggingface(params, config, folder, family="toy", tokenizer=tokenizer)
    (Path(folder) / "README.md").write_text("# toy\n")
    (Path(folder) / "flax_model.msgpack").write_text("stale weights")


@pytest.fixture
def toy(corpus, monkeypatch):
    """A Hugging Face folder at toy, of a family that only the tests know."""
    add_toy(monkeypatch)
    write_toy("toy")
    return Path("toy")


@pytest.fixture
def bad_models(base, monkeypatch):
    """Files that cannot be used beside the model at base."""
    add_toy(monkeypatch)
    other = train_byte_pair([*WORDS, "xyz"], vocab_size=16)
    Path("other.json").write_bytes(other.contents["tokenizer.json"])
    Path("damaged.json").write_text("{")
    Path("mine.yaml").write_text("model: {num_heads: 4}\n")
    Path("thesis").mkdir()
    Path("thesis/thesis.tex").touch()
    Path("bert").mkdir()
    Path("bert/config.json").write_text('{"model_type": "bert"}')
    write_toy("broken")
    changed = json.loads(Path("broken/config.json").read_text()) | {"inner_width": 15}
    Path("broken/config.json").write_text(json.dumps(changed))
    write_toy("sampling")
    Path("sampling/generation_config.json").write_text('{"do_sample": true}')


@pytest.fixture
def plain_text(tmp_path, monkeypatch):
    """Write 90 documents, and the same as pairs with their capitals."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    words = "eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf".split()
    lines = [" ".join(random.choice(words, random.integers(4, 30))) for _ in range(90)]
    Path("plain.txt").write_text("\n".join(lines), encoding="utf-8")
    Path("pairs.tsv").write_text("".join(f"{line}\t{line.upper()}\n" for line in lines))


@pytest.fixture
def weights(tmp_path, monkeypatch):
    """The state_dict of a torch.nn.Transformer in weights.pt, its config in config.json."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    module = nn.Transformer(12, 2, 1, 1, 20, batch_first=True)
    torch.save(module.state_dict(), "weights.pt")
    (tmp_path / "config.json").write_text(json.dumps({"preset": "torch_nn", **FIELDS}))
    contents = {"cut": "{", "list": "[1]", "width": '{"width": 3}', "preset": '{"preset": "x"}'}
    for name, text in contents.items():
        (tmp_path / f"{name}.json").write_text(text)
    (tmp_path / "bad.toml").write_text('name = "x"\nrows = [{foreign = "y"}]\n')
    (tmp_path / "folder").mkdir()
    return module.state_dict()


@pytest.fixture
def systems(tmp_path, monkeypatch):
    """Files of lines in the working folder: references and three systems; one is compressed."""
    monkeypatch.chdir(tmp_path)
    texts = {"references": REFERENCES, "better": BETTER, "worse": WORSE, "other": OTHER}
    for name, lines in (texts | {"short": ["a line"], "empty": []}).items():
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    (tmp_path / "better.gz").write_bytes(gzip.compress((tmp_path / "better").read_bytes()))
    return tmp_path


@pytest.fixture(scope="session")
def recordings(tmp_path_factory):
    """A folder with the weights and recordings of a model that fits and of another one."""
    folder = tmp_path_factory.mktemp("recordings")
    for name in ("letters", "linear_bias"):
        module = SHAPES[name].module()
        weight_files.write(folder / f"{name}.safetensors", module.state_dict())
        write(module, folder / f"{name}.pt", lengths="[(7, 5)]")
    torch.save({}, folder / "empty.pt")
    return folder


@pytest.fixture
def among_recordings(recordings, monkeypatch):
    """The folder of recordings as the working directory."""
    monkeypatch.chdir(recordings)


@pytest.fixture
def no_pictures(monkeypatch):
    """Leave out the pictures, which take most of the time of a tiny run."""
    monkeypatch.setattr(evaluation, "draw_curves", mock.Mock())
    monkeypatch.setattr(evaluation.alignment_plot, "draw", mock.Mock())


@pytest.fixture
def run(capsys):
    """Run a command; return its exit code or refusal, and what it printed."""

    def run(*arguments):
        code = 0
        try:
            cli.main(arguments)
        except SystemExit as left:
            code = left.code
        return code, capsys.readouterr().out

    return run
