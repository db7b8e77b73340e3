"""A model in every format of `jax-transformer export`: python -m benchmarks.exports.

Each artifact translates a text in an environment without this library: token ids beside those of
`translate`, BLEU, lines a second of the whole command, its start, and the size of the folder.
"""

import functools
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import sacrebleu
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.systems import processor, read_lines
from jax_transformer import Translator

# The loop of a user, as docs/export.md shows it; arguments as those of the READMEs.
CTRANSLATE2 = """
import sys
import ctranslate2
import tokenizers

folder, beam, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3]
tokenizer = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
translator = ctranslate2.Translator(folder, compute_type=kind)
encoded = [tokenizer.encode(line.rstrip("\\n")).tokens + ["</s>"] for line in sys.stdin]
options = {"suppress_sequences": [["<pad>"]], "min_decoding_length": 0, "length_penalty": 0}
options |= {"max_decoding_length": 128, "return_end_token": True, "max_batch_size": 64}
results = translator.translate_batch(encoded, beam_size=beam, **options)
for result in results:
    ids = [tokenizer.token_to_id(token) for token in result.hypotheses[0]]
    print(*ids) if SHOWS_IDS else print(tokenizer.decode(ids))
"""
IDS = "as_text = lambda ids, decode, settings: ' '.join(map(str, ids))\n"


class Artifact(NamedTuple):
    """An export, and how its program is started.

    Attributes:
        export: Arguments of `jax-transformer export`.
        program: Arguments of the program that translates, behind the folder.
        beam: Hypotheses that its search keeps.
        length_penalty: Of its search; None is the model's.
    """

    export: tuple[str, ...]
    program: tuple[str, ...] = ()
    beam: int = 1
    length_penalty: float | None = None


def artifacts(beam: int) -> dict[str, Artifact]:
    """Return what is measured by name."""
    found = {"ONNX Runtime, greedy": Artifact(("--to", "onnx"))}
    for search, size in (("greedy", 1), ("beam", beam)):
        export = ("--to", "stablehlo", "--beam", str(beam))
        found[f"StableHLO, {search}"] = Artifact(export, (search,), size)
        for kind in ("float32", "float16", "int8"):
            # A CPU computes float16 weights in float32.
            computed = "int8" if kind == "int8" else "float32"
            export = ("--to", "ctranslate2", "--quantization", kind)
            program = str(size), computed
            found[f"CTranslate2, {kind}, {search}"] = Artifact(export, program, size, 0.0)
    return found


def program_of(folder: Path, ids: bool) -> str:
    """Return the program that translates lines by an exported folder; it may print ids."""
    if not (folder / "README.md").exists():
        return CTRANSLATE2.replace("SHOWS_IDS", str(ids))
    (program,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text("utf-8"), re.S)
    return program.replace("\nlines = ", f"\n{IDS}lines = ") if ids else program


def run(
    python: Path, folder: Path, arguments: Sequence[str], lines: Sequence[str], ids: bool = False
) -> tuple[list[str], float]:
    """Return what a program prints for lines, and the seconds of the whole command."""
    started = time.perf_counter()
    done = subprocess.run(
        [python, "-c", program_of(folder, ids), str(folder), *arguments],
        input="".join(f"{line}\n" for line in lines),
        env={"PATH": os.environ["PATH"], "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "cache")},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split("\n")[:-1], time.perf_counter() - started


def main(
    model: tyro.conf.Positional[Path],
    source: tyro.conf.Positional[Path],
    reference: tyro.conf.Positional[Path],
    /,
    python: Path = Path(sys.executable),
    beam: int = 5,
) -> None:
    """Export a model, translate a text by each artifact, and print a table.

    Args:
        model: Folder of a model with a tokenizer of the library tokenizers.
        source: Lines to translate.
        reference: Their translations, for BLEU.
        python: Interpreter of an environment with jax, flatbuffers, safetensors, onnxruntime,
            ctranslate2 and tokenizers, and without this library.
        beam: Hypotheses of the searches with beams.
    """
    lines, references = read_lines(source), read_lines(reference)
    translator = Translator(model)

    @functools.cache
    def expected(beam: int, length_penalty: float | None) -> list[str]:
        results = translator(lines, beam_size=beam, length_penalty=length_penalty)
        return [" ".join(map(str, result.tokens)) for result in results]

    table = Table("artifact", "equal ids", "BLEU", "lines/s", "start, s", "MB")
    with tempfile.TemporaryDirectory() as name:
        for title, artifact in artifacts(beam).items():
            folder = Path(name) / "-".join(artifact.export).replace("--", "")
            if not folder.exists():
                command = [sys.executable, "-m", "jax_transformer", "export", model, folder]
                subprocess.run([*command, *artifact.export], check=True, capture_output=True)
            found, _ = run(python, folder, artifact.program, lines, ids=True)
            texts, seconds = run(python, folder, artifact.program, lines)
            _, start = run(python, folder, artifact.program, lines[:1])
            _, start = run(python, folder, artifact.program, lines[:1])
            ours = expected(artifact.beam, artifact.length_penalty)
            equal = sum(a == b for a, b in zip(found, ours, strict=True))
            size = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
            score = sacrebleu.corpus_bleu(texts, [references]).score
            rate = f"{len(lines) / seconds:,.0f}"
            table.add_row(title, f"{equal:,}", f"{score:.2f}", rate, f"{start:.2f}", f"{size:.1f}")
    Console().print(
        table, f"{len(lines):,} lines; second calls. {processor()}, {os.cpu_count()} cores."
    )


if __name__ == "__main__":
    tyro.cli(main)
