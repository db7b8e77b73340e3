"""Marian itself, by the package pymarian: it trains models, and translates with them and with ours.

`python -m tests.convert.marian.with_marian FOLDER` prints a table of published combinations of
options: how far scores differ, how many texts. It needs `pip install pymarian==1.12.42`.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

import jax_transformer
from jax_transformer.convert import to_huggingface
from jax_transformer.convert.huggingface import load_folder
from jax_transformer.text.number_words import english, german
from tests.convert.marian.published import PUBLISHED

_RUN = """
import json, pymarian, sys
kind, options, lines = json.loads(sys.argv[1])
if kind == "train":
    pymarian.Trainer(**options).train()
else:
    found = pymarian.Translator(**options).translate(lines)
    print("\\n".join(found) if isinstance(found, list) else found)
"""
SIZES = {"dim-emb": 16, "enc-depth": 2, "dec-depth": 2, "transformer-heads": 4}
SIZES |= {"transformer-dim-ffn": 32, "tied-embeddings-all": True, "dim-vocabs": ["200", "200"]}
TRAINING = {"after-batches": 40, "mini-batch": 32, "learn-rate": 0.003, "seed": 7, "quiet": True}
QUIET = {"quiet": True, "quiet-translation": True, "cpu-threads": 1, "workspace": 300}
BEAM, NORMALIZE = 4, 0.6


class Row(NamedTuple):
    """How this library and Marian agree on a model: of lines, hypotheses and scores."""

    other_texts: int  # among the n-best of all lines
    score_error: float  # largest, by its size
    other_texts_back: int  # Marian with the folder that this library has written


def run(kind, options, lines=()):
    arguments = json.dumps([kind, options, list(lines)])
    done = subprocess.run(
        [sys.executable, "-c", _RUN, arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def train(folder: Path, options):
    """Let Marian train a model; return its folder."""
    folder.mkdir()
    numbers = np.random.default_rng(0).permutation(100_000)[:2_000]
    for name, texts in (("a", german(numbers)), ("b", english(numbers))):
        (folder / f"train.{name}").write_text("\n".join(texts) + "\n")
    files = {
        "model": str(folder / "model.npz"),
        "vocabs": [str(folder / "vocab.yml")] * 2,
        "train-sets": [str(folder / "train.a"), str(folder / "train.b")],
    }
    given = {key: value for key, value in options.items() if value is not False}
    every = {**SIZES, **TRAINING, **QUIET, "type": "transformer", **files, **given}
    off = [key for key, value in options.items() if value is False]
    run("train", {key: value for key, value in every.items() if key not in off})
    return folder


def n_best(folder: Path, lines):
    """Return Marian's hypotheses of each line: texts and normalised scores."""
    options = {"models": [str(folder / "model.npz")], "vocabs": [str(folder / "vocab.yml")] * 2}
    options |= {"n-best": True, "beam-size": BEAM, "normalize": NORMALIZE, "mini-batch": 1}
    found = [[] for _ in lines]
    for line in run("translate", {**options, **QUIET, "maxi-batch": 1}, lines):
        number, text, _, score = line.split(" ||| ")
        found[int(number)].append((text, float(score)))
    return found


def compare(folder: Path, options, lines) -> Row:
    """Let Marian train a model, and compare what it and this library make of it."""
    model = train(folder, options)
    expected = n_best(model, lines)
    translator = jax_transformer.Translator(model)
    search = {"beam_size": BEAM, "num_hypotheses": BEAM, "length_penalty": NORMALIZE}
    other_texts, errors = 0, [0.0]
    for hypotheses, result in zip(expected, translator(lines, **search), strict=True):
        for (text, score), found in zip(hypotheses, result.hypotheses, strict=False):
            other_texts += text != found.text
            errors.append(abs(score - found.score) / max(1, abs(score)))
    config, params, tokenizer, _ = load_folder(model)
    back = folder / "back"
    to_huggingface(params, config, back, family="marian_npz", tokenizer=tokenizer)
    again = n_best(back, lines)
    other_back = sum(
        a[0] != b[0] or not np.isclose(a[1], b[1], rtol=1e-5)
        for old, new in zip(expected, again, strict=True)
        for a, b in zip(old, new, strict=True)
    )
    return Row(other_texts, max(errors), other_back)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    lines = german(range(0, 1_000_000, 17_241))
    print("| options | other texts of n-best | score error | other texts, written back |")
    for name, options in PUBLISHED.items():
        row = compare(folder / name, options, lines)
        print(f"| {name} | {row.other_texts} | {row.score_error:.1e} | {row.other_texts_back} |")
