"""Runs of `jax-transformer train` on a tiny text, in the working directory."""

import gzip
from pathlib import Path
from unittest import mock

import pytest

from jax_transformer import InputError
from jax_transformer.commands import main as cli
from jax_transformer.commands import train

FILES = ("source", "target", "valid_source", "valid_target")
SMALL = (
    "--vocab-size=16 --d-model=8 --num-heads=2 --d-ff=8 --num-encoder-layers=1 "
    "--num-decoder-layers=1 --steps=12 --warmup-steps=4 --bucket-count=1 --max-tokens=60"
).split()
PLAIN = (
    "--vocab-size=200 --sentinels=20 --d-model=8 --num-heads=2 --d-ff=8 --num-encoder-layers=1 "
    "--num-decoder-layers=1 --steps=8 --warmup-steps=4 --max-tokens=128 --pack-length=64 "
    "--max-length=64 --valid-pairs=9 --evaluation-interval=4 --prepared=store --preset=t5_v1_1 "
    "--d-kv=4"
).split()
WORDS = ["ab", "ba", "abba", "baab", "a b", "b a"]

# Of torch.nn.Transformer.
FIELDS = {"d_model": 12, "num_heads": 2, "d_ff": 20, "num_encoder_layers": 1}
FIELDS |= {"num_decoder_layers": 1}
# Three systems' translations of these lines.
REFERENCES = [
    f"the {animal} sees a {other} in the garden"
    for animal in ("cat", "dog", "cow")
    for other in ("bird", "man", "tree", "red house")
]
BETTER = [line.replace("garden", "park") if i % 4 else line for i, line in enumerate(REFERENCES)]
WORSE = [line.replace("sees a", "has one") for line in BETTER]
OTHER = [line.replace("garden", "park") if i % 3 else line for i, line in enumerate(REFERENCES)]


def write_corpus(directory):
    """Write the four files: words, and the same words in capitals."""
    text = "".join(f"{word}\n" for word in WORDS)
    for name in FILES:
        content = (text.upper() if name.endswith("target") else text).encode()
        (directory / name).write_bytes(gzip.compress(content) if name == "source" else content)


def named(files):
    return [f"--{name.replace('_', '-')}={path}" for name, path in files.items()]


TEXT = named({name: name for name in FILES})


def arguments(files, *options):
    return [*named(files), *SMALL, *options]


def program(*argv):
    cli.main(["train", *argv])


def checked(*argv):
    """Run `train` up to its first step."""
    stopped = mock.patch.object(train.loop, "train", side_effect=InputError("enough"))
    with stopped, pytest.raises(SystemExit, match="enough"):
        program(*argv)


def written():
    """Return when each file was last written; when it was read does not matter."""
    return {path: path.stat().st_mtime_ns for path in Path().rglob("*")}


def refused(*arguments):
    """Return the one line with which a command is refused."""
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    assert isinstance(left.value.code, str)  # Python prints it on standard error and leaves with 1
    assert left.value.code.startswith("error: ")
    assert "\n" not in left.value.code
    return left.value.code


def refusal(capsys, *argv):
    """Return the one line that a refused run leaves on standard error; it writes nothing."""
    before, line = written(), refused("train", *argv)
    assert capsys.readouterr().err == ""
    assert written() == before
    return line
