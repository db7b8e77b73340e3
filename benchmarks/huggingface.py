"""A Hugging Face folder translated, trained on and handed back: python -m benchmarks.huggingface.

A model of random weights is trained by transformers on real text, with a tokenizer that is trained
on the same text, and saved. `jax-transformer translate` must give the strings of transformers'
`generate` with the folder's own defaults. Then `jax-transformer train --init` goes on from the
folder, `jax-transformer convert` writes a folder again, and both translate that folder.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.huggingface_models import FAMILIES, build
from benchmarks.systems import processor, read_lines
from jax_transformer.translation.scores import bleu

BATCH = 50  # lines of a batch of transformers


def run(*arguments: object) -> None:
    """Run a command of `jax-transformer`."""
    program = [sys.executable, "-m", "jax_transformer.commands.main"]
    subprocess.run([*program, *map(str, arguments)], check=True)


def translate_here(folder: Path, source: Path, *flags: str) -> list[str]:
    """Return the translations of `jax-transformer translate`: the folder's defaults, or flags."""
    output = folder.parent / f"{folder.name}.translated"
    run("translate", folder, f"--input={source}", f"--output={output}", "--overwrite", *flags)
    return read_lines(output)


def translate_there(folder: Path, lines: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Return the translations of transformers with the folder's own defaults, and loading info."""
    import torch
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model, info = AutoModelForSeq2SeqLM.from_pretrained(folder, output_loading_info=True)
    model.eval()
    order = sorted(range(len(lines)), key=lambda index: len(lines[index]))
    translations = [""] * len(lines)
    for start in range(0, len(order), BATCH):
        members = order[start : start + BATCH]
        inputs = tokenizer([lines[index] for index in members], return_tensors="pt", padding=True)
        with torch.inference_mode():
            tokens = model.generate(**inputs)
        texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
        for index, text in zip(members, texts, strict=True):
            translations[index] = text
    return translations, {name: found for name, found in info.items() if found}


def compare(folder: Path, source: Path, target: Path) -> list[str]:
    """Translate a test set in both frameworks; return the cells of a row of the table."""
    lines, references = read_lines(source), read_lines(target)
    here = translate_here(folder, source)
    there, info = translate_there(folder, lines)
    equal = sum(a == b for a, b in zip(here, there, strict=True))
    for number, (a, b) in enumerate(zip(here, there, strict=True), start=1):
        if a != b:
            print(f"line {number}: here {a!r}, there {b!r}")
    scores = [f"{bleu(texts, references).value:.6f}" for texts in (here, there)]
    return [f"{equal:,} of {len(lines):,}", *scores, str(info or "clean")]


def main(
    source: Path,
    target: Path,
    test_source: Path,
    test_target: Path,
    output: Path,
    families: tuple[str, ...] = tuple(FAMILIES),
    steps: int = 800,
    more_steps: int = 300,
) -> None:
    """Compare both frameworks before and after training here, print a row for each.

    Args:
        source: Training text.
        target: Its translation.
        test_source: Text to translate.
        test_target: Its translation.
        output: Folder for the models. A model of transformers that is there already is taken as it
            is.
        families: Families to compare.
        steps: Training steps of transformers.
        more_steps: Training steps of this library.
    """
    table = Table("folder", "equal strings", "BLEU here", "BLEU there", "loading info")
    for family in families:
        folder = output / family
        if not folder.exists():
            build(family, folder, read_lines(source), read_lines(target), steps)
        table.add_row(f"{family}, as saved", *compare(folder, test_source, test_target))
        trained, back = output / f"{family}-trained", output / f"{family}-back"
        run(
            "train",
            f"--init={folder}",
            f"--output={trained}",
            f"--source={source}",
            f"--target={target}",
            f"--steps={more_steps}",
            "--valid-pairs=200",
            f"--evaluation-interval={more_steps}",
            "--warmup-steps=100",
            "--learning-rate-factor=0.2",
            "--overwrite",
        )
        run("convert", trained, back, f"--output-layout={family}", "--overwrite")
        table.add_row(f"{family}, trained here", *compare(back, test_source, test_target))
    Console().print(
        table,
        f"BLEU by sacrebleu's defaults. {steps} steps of transformers, {more_steps} here. "
        f"{processor()}.",
    )


if __name__ == "__main__":
    tyro.cli(main)
