"""A small trained model for the pictures: English dates to German ones, as in the tutorials."""

import functools
import itertools
import random
import tempfile
from pathlib import Path

from jax_transformer import Translator
from jax_transformer.commands.main import command_call

ENGLISH = "january february march april may june july august september october november december"
GERMAN = "januar februar märz april mai juni juli august september oktober november dezember"
SETTINGS = (
    "--preset pre_norm --d-model 64 --num-heads 4 --d-ff 128 --dropout 0 --num-encoder-layers 1 "
    "--num-decoder-layers 1 --vocab-size 160 --steps 150 --warmup-steps 50 --max-tokens 1024 "
    "--evaluation-interval 150"
)


@functools.cache
def translator() -> Translator:
    """Train the model, in seconds, and return it."""
    months = zip(ENGLISH.split(), GERMAN.split(), strict=True)
    dates = itertools.product(months, range(1, 29), range(1950, 2030))
    pairs = [
        (f"{month} {day}, {year}", f"{day}. {monat} {year}") for (month, monat), day, year in dates
    ]
    random.Random(0).shuffle(pairs)
    with tempfile.TemporaryDirectory() as folder:
        text, output = Path(folder, "dates.tsv"), Path(folder, "run")
        text.write_text("".join("\t".join(pair) + "\n" for pair in pairs[:4000]), "utf-8")
        command_call("train", f"--source={text}", f"--output={output}", *SETTINGS.split())()
        return Translator(str(output))
