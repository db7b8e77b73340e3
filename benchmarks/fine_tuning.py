"""Every family learns the number words from its folder: python -m benchmarks.fine_tuning.

For each family a folder of random weights is written by transformers, with a tokenizer that is
trained on the words. `jax-transformer train --init` trains the model, `jax-transformer translate`
translates the held-out numbers, greedily and with the folder's own generation defaults.
`jax-transformer convert` writes a folder again, and transformers translates the same with it.
"""

import time
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.huggingface import run, translate_here, translate_there
from benchmarks.huggingface_models import FAMILIES, build
from benchmarks.systems import processor
from jax_transformer.convert.huggingface import read_config
from jax_transformer.text.number_words import corpus
from jax_transformer.translation.scores import exact_match

SIZES = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 256,
    "decoder_ffn_dim": 256,
    "max_position_embeddings": 64,
    "dropout": 0.0,
}
PIECES = 60  # of a language


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
        build(family, folder, training.sources, training.targets, 0, PIECES, **SIZES)
        begun = time.perf_counter()
        run("train", f"--init={folder}", f"--output={trained}", f"--steps={steps}")
        seconds = time.perf_counter() - begun
        run("convert", trained, back, f"--output-layout={read_config(folder)['model_type']}")
        greedy, here = translate_here(trained, source, "--beam=1"), translate_here(trained, source)
        there, info = translate_there(back, held_out.sources)
        right = [
            # Blenderbot's tokenizer begins every text with a space.
            exact_match([text.strip() for text in texts], held_out.targets)
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
