"""Vectors of texts beside sentence-transformers, on one core: python -m benchmarks.embedding -h.

Both read one folder that sentence-transformers wrote: a T5 encoder of random numbers, its mean, a
dense layer and normalization. Each round embeds the lines of the file with both in turn.
"""

import os
import resource
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.systems import System, processor, read_lines, spread, start, stop, time_in_turn

SHAPE = {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8}  # of T5 small


def write_folder(folder: Path, lines: Sequence[str]) -> None:
    """Write a model of sentence-transformers, with a vocabulary of these lines."""
    import sentencepiece
    import transformers
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    inner = folder.with_name("encoder")
    inner.mkdir()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(inner / "spiece"),
        vocab_size=4000,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    tokenizer = transformers.T5Tokenizer.from_pretrained(inner)
    tokenizer.save_pretrained(inner)
    config = transformers.T5Config(vocab_size=len(tokenizer), **SHAPE)
    transformers.T5EncoderModel(config).save_pretrained(inner)
    width = SHAPE["d_model"]
    layers = [modules.Pooling(width, "mean"), modules.Dense(width, 768, bias=False)]
    transformer = modules.Transformer(str(inner), max_seq_length=256)
    SentenceTransformer(modules=[transformer, *layers, modules.Normalize()]).save(str(folder))


def ours(folder: Path, core: int) -> System:
    """Return a function that embeds lines with this library."""
    os.sched_setaffinity(0, {core})
    from jax_transformer import Embedder

    embedder = Embedder(folder)
    return lambda lines: (embedder(lines), peak())


def theirs(folder: Path, core: int) -> System:
    """Return a function that embeds lines with sentence-transformers."""
    os.sched_setaffinity(0, {core})
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(1)
    model = SentenceTransformer(str(folder), device="cpu")
    return lambda lines: (model.encode(lines, batch_size=32), peak())


def peak() -> int:
    """Return the peak of this process's memory in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def main(file: Path, lines: int = 1000, rounds: int = 3, core: int = 0) -> None:
    """Print texts a second and memory of both, the ratio, and how far their vectors are apart.

    Args:
        file: Text, one a line.
        lines: Lines that are embedded.
        rounds: Rounds.
        core: The core.
    """
    texts = read_lines(file)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "folder"
        write_folder(folder, texts)
        systems = start({"jax_transformer": ours, "sentence-transformers": theirs}, folder, core)
        found, seconds = time_in_turn(systems, (texts[:lines],), rounds)
        stop(systems)
    table = Table("system", "texts a second", "peak MiB")
    for name, (_, memory) in found.items():
        table.add_row(name, f"{lines / float(np.median(seconds[name])):.0f}", f"{memory:,}")
    console = Console()
    console.print(table)
    (mine, _), (other, _) = found.values()
    ratios: Any = np.divide(*(np.array(times) for times in reversed(seconds.values())))
    console.print(
        f"ratio of the speeds {spread(ratios)}, largest difference {abs(mine - other).max():.1e}"
    )
    console.print(processor())


if __name__ == "__main__":
    tyro.cli(main)
