"""Whole commands that translate a file: python -m benchmarks.translation MODEL INPUT.

`jax-transformer translate` beside transformers and CTranslate2 on the same Hugging Face folder of
Marian's family: lines a second from the start of the process to its end, with the imports, the
reading of the model and compilation. Needs the extra "test".
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median

import numpy as np
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.systems import processor, read_lines
from jax_transformer.storage import weights as files

BATCH = 256  # lines of a batch of transformers
CT2_TOKENS = 4096  # of a batch of CTranslate2


def translate_by_transformers(folder: Path, lines: Sequence[str], beam: int) -> list[str]:
    """Return the translations of `generate`, in batches of lines of similar length."""
    import torch
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    order = sorted(range(len(lines)), key=lambda index: -len(lines[index]))
    translations = [""] * len(lines)
    for start in range(0, len(order), BATCH):
        members = order[start : start + BATCH]
        inputs = tokenizer([lines[index] for index in members], return_tensors="pt", padding=True)
        with torch.inference_mode():
            tokens = model.generate(**inputs, num_beams=beam)
        texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
        for index, text in zip(members, texts, strict=True):
            translations[index] = text
    return translations


def translate_by_ctranslate2(folder: Path, lines: Sequence[str], beam: int) -> list[str]:
    """Return the translations of CTranslate2, which sorts by length; sentencepiece as opus-mt's."""
    import ctranslate2
    from sentencepiece import SentencePieceProcessor

    source, target = (
        SentencePieceProcessor(model_file=str(folder / f"{side}.spm"))
        for side in ("source", "target")
    )
    translator = ctranslate2.Translator(str(folder / "ctranslate2"), compute_type="float32")
    tokens = [[*pieces, "</s>"] for pieces in source.encode(list(lines), out_type=str)]
    results = translator.translate_batch(
        tokens,
        beam_size=beam,
        max_batch_size=CT2_TOKENS,
        batch_type="tokens",
        max_decoding_length=127,
    )
    return [target.decode(result.hypotheses[0]) for result in results]


SYSTEMS: dict[str, Callable[[Path, Sequence[str], int], list[str]]] = {
    "transformers": translate_by_transformers,
    "CTranslate2": translate_by_ctranslate2,
}


CALLS = ("ours, first call", "ours", *SYSTEMS)  # all that can be timed


def run_system(name: str, folder: str, source: str, output: str, beam: str) -> None:
    """Translate a file by another system; the program of its process."""
    texts = SYSTEMS[name](Path(folder), read_lines(source), int(beam))
    Path(output).write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")


def commands(folder: Path, source: Path, output: Path, beam: int) -> dict[str, list[str]]:
    """Return the command of each system by name."""
    own = [sys.executable, "-m", "jax_transformer.commands.main", "translate", str(folder)]
    own += [f"--input={source}", f"--output={output}", "--overwrite", f"--beam={beam}"]
    program = "from sys import argv; from benchmarks.translation import run_system as run"
    theirs = [sys.executable, "-c", f"{program}; run(*argv[1:])"]
    arguments = [str(folder), str(source), str(output), str(beam)]
    return dict.fromkeys(CALLS[:2], own) | {name: [*theirs, name, *arguments] for name in SYSTEMS}


def write_models(model: Path, folder: Path) -> None:
    """Copy a model, and convert the copy for CTranslate2.

    The row of padding, which begins a target, is 0 in the copy, as in the opus-mt models:
    CTranslate2 relies on it.
    """
    from ctranslate2.converters import TransformersConverter

    shutil.copytree(model, folder)
    tensors = files.read(folder / "model.safetensors")
    pad_id = json.loads((folder / "config.json").read_text())["pad_token_id"]
    tensors["model.shared.weight"][pad_id] = 0
    metadata = {"format": "pt"}
    files.write(folder / "model.safetensors", tensors, overwrite=True, metadata=metadata)
    TransformersConverter(str(folder)).convert(str(folder / "ctranslate2"))


def write_input(path: Path, lines: list[str], count: int) -> None:
    """Write `count` lines: the given ones, again and again, each time in another order."""
    random = np.random.default_rng(0)
    with path.open("w", encoding="utf-8") as file:
        for start in range(0, count, len(lines)):
            order = random.permutation(len(lines))[: count - start]
            file.writelines(f"{lines[index]}\n" for index in order)


def timed(command: Sequence[str], environment: dict[str, str]) -> float:
    """Return the seconds of a command."""
    started = time.monotonic()
    subprocess.run(command, env=environment, check=True, capture_output=True)
    return time.monotonic() - started


def main(
    model: tyro.conf.Positional[Path],
    source: tyro.conf.Positional[Path],
    /,
    sizes: tuple[int, ...] = (10, 1_000, 100_000),
    beam: int = 1,
    rounds: int = 1,
    systems: tuple[str, ...] = CALLS,
) -> None:
    """Time all systems on inputs of several sizes, print lines a second.

    Args:
        model: Hugging Face folder of Marian's family; its conversion for CTranslate2 is not timed.
        source: Text whose lines are repeated.
        sizes: Numbers of lines.
        beam: Hypotheses that beam search keeps.
        rounds: How often each system is timed, in turn with the others; the median counts.
        systems: What is timed.
    """
    table = Table("lines", *systems, "lines unlike ours")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_models(model, folder / "model")
        lines = read_lines(source)
        for size in sizes:
            write_input(folder / "input", lines, size)
            cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / f"cache-{size}")}
            seconds: dict[str, list[float]] = {}
            outputs = {}
            for _ in track(range(rounds), f"{size:,} lines"):
                shutil.rmtree(cache["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
                output = folder / "output"
                own = commands(folder / "model", folder / "input", output, beam)
                for system in systems:
                    taken = timed(own[system], os.environ | cache)
                    seconds.setdefault(system, []).append(taken)
                    outputs[system] = read_lines(output)
            ours = outputs[systems[0]]
            others = [name for name in SYSTEMS if name in outputs]
            pairs = {name: zip(outputs[name], ours, strict=True) for name in others}
            unlike = [f"{name} {sum(a != b for a, b in both)}" for name, both in pairs.items()]
            cells = [f"{size / median(taken):,.1f}" for taken in seconds.values()]
            table.add_row(f"{size:,}", *cells, ", ".join(unlike))
    versions = {name: version(name) for name in ("jax", "transformers", "torch", "ctranslate2")}
    Console().print(
        table,
        f"Lines a second of the whole command, beam {beam}, median of {rounds}, float32; the first "
        f"call compiles, later calls find the programs in the cache. {processor()}, cores: "
        f"{len(os.sched_getaffinity(0))}. {', '.join(f'{n} {v}' for n, v in versions.items())}.",
    )


if __name__ == "__main__":
    tyro.cli(main)
