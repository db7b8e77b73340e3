"""A parallel text of any size, made by code: python -m benchmarks.made_text --folder F --pairs N.

Words of both languages are drawn by Zipf's law from a lexicon of syllables, so that byte-pair
encoding has something to learn and the lengths vary as those of sentences do.
"""

from pathlib import Path

import numpy as np
import tyro
from rich.progress import track

BLOCK = 100_000  # pairs that are made at a time
WORDS, SYLLABLES = 50_000, 300
MEAN_WORDS = 17  # of a sentence


def make(folder: Path, pairs: int, seed: int = 0) -> tuple[Path, Path]:
    """Write two line-aligned files; return their paths.

    Args:
        folder: Where they are written.
        pairs: Number of lines.
        seed: Decides the text.
    """
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "made.source", folder / "made.target"
    lexicons = [_lexicon(random) for _ in paths]
    chances = 1 / (np.arange(WORDS) + 10.0)
    chances = chances.cumsum() / chances.sum()
    with paths[0].open("w") as source, paths[1].open("w") as target:
        for start in track(range(0, pairs, BLOCK), "making the text"):
            count = min(BLOCK, pairs - start)
            counts = np.clip(random.gamma(3, MEAN_WORDS / 3, count).astype(int), 1, 80)
            words = np.searchsorted(chances, random.random(counts.sum()))
            ends = counts.cumsum()
            for file, lexicon in zip((source, target), lexicons, strict=True):
                spelled = lexicon[words].tolist()
                lines = (
                    " ".join(spelled[end - length : end])
                    for end, length in zip(ends.tolist(), counts.tolist(), strict=True)
                )
                file.write("\n".join(lines) + "\n")
    return paths


def _lexicon(random: np.random.Generator) -> np.ndarray:
    letters = [list("bcdfghjklmnprstvwz"), list("aeiou"), [*list("lnrst"), ""]]
    syllables = ["".join(random.choice(kind) for kind in letters) for _ in range(SYLLABLES)]
    parts = random.integers(1, 5, WORDS)
    return np.array(["".join(random.choice(syllables, count)) for count in parts], object)


if __name__ == "__main__":
    tyro.cli(make)
