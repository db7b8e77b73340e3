"""Every family learns the number words from its folder: python -m benchmarks.huggingface.

For each family a folder of random weights is written by transformers, with a tokenizer that is
trained on the words. `jax-transformer train --init` trains the model, `jax-transformer translate`
translates the held-out numbers, greedily and with the folder's own generation defaults.
`jax-transformer convert` writes a folder again, and transformers translates the same with it.
"""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.huggingface_models import FAMILIES, build
from benchmarks.systems import processor, read_lines
from jax_transformer.convert.huggingface import read_config
from jax_transformer.evaluation.scores import exact_match
from jax_transformer.text.number_words import corpus

PIECES = 60  # of a language
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


def main(
    output: Path, families: tuple[str, ...] = tuple(FAMILIES), steps: int = 1500, seed: int = 0
) -> None:
    """Train each family, print its shares of right translations, and how many are transformers'.

    Args:
        output: Folder for the models; nothing may be in the way.
        families: Families to train.
        steps: Training steps.
        seed: Seed of the held-out numbers, as of `jax-transformer train`.
    """
    training, held_out = corpus(seed)
    source = output / "numbers.en"
    output.mkdir(parents=True, exist_ok=True)
    source.write_text("".join(f"{line}\n" for line in held_out.sources))
    headings = ("family", "right, greedy", "right, by defaults", "equal strings", "loading info")
    table = Table(*headings, "training, s")
    for family in families:
        folder, trained, back = (output / f"{family}{end}" for end in ("", "-trained", "-back"))
        build(family, folder, training.sources, training.targets, PIECES)
        begun = time.perf_counter()
        run("train", f"--init={folder}", f"--output={trained}", f"--steps={steps}")
        seconds = time.perf_counter() - begun
        run("convert", trained, back, f"--output-layout={read_config(folder)['model_type']}")
        greedy, here = translate_here(trained, source, "--beam=1"), translate_here(trained, source)
        there, info = translate_there(back, held_out.sources)
        right = [
            # Blenderbot's tokenizer begins every text with a space.
            exact_match([text.strip() for text in texts], [held_out.targets])
            for texts in (greedy, here)
        ]
        equal = sum(a == b for a, b in zip(here, there, strict=True))
        table.add_row(
            family,
            *(f"{share:.2%}" for share in right),
            f"{equal:,} of {len(here):,}",
            str(info or "clean"),
            f"{seconds:.0f}",
        )
        Console().print(table)
    Console().print(f"{steps} steps from random weights. {processor()}.")


if __name__ == "__main__":
    tyro.cli(main)
