"""An adapter of 1 % of the parameters: a model of German number words learns Dutch ones."""

import tempfile
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from docs.draw.style import JAX, TORCH, save
from jax_transformer import Translator
from jax_transformer.commands.main import command_call
from jax_transformer.evaluation.scores import exact_match
from jax_transformer.runs.metrics import METRICS_FILE, read_metrics
from jax_transformer.text.number_words import english, german
from jax_transformer.tokenizers import train_byte_pair
from jax_transformer.tokenizers.formats import write_files

NUMBERS, HELD_OUT = 2000, 200
BELOW_20 = (
    "nul een twee drie vier vijf zes zeven acht negen tien elf twaalf dertien veertien vijftien "
    "zestien zeventien achttien negentien"
).split()
TENS = "twintig dertig veertig vijftig zestig zeventig tachtig negentig".split()
COMMON = "--label-smoothing 0 --max-tokens 1024 --bucket-count 1"
BASE = (
    "--d-model 128 --num-heads 4 --d-ff 256 --num-encoder-layers 2 --num-decoder-layers 2 "
    "--max-length 64 --dropout 0 --steps 500 --warmup-steps 100 --cooldown-steps 300 "
    "--learning-rate-factor 0.5 --evaluation-interval 500"
)
ADAPT = "--schedule cosine --warmup-steps 20 --steps 900 --evaluation-interval 100"
TARGETS = ("query", "value", "output")  # of the attention to the source
KINDS = {
    "an adapter of 1 %": "--learning-rate 0.01 --lora-rank 2 --lora-alpha 8 --lora-targets "
    + " ".join([*(f"decoder/*/cross_attention/{name}" for name in TARGETS), "decoder/*/inner"])
    + " decoder/*/outer",
    "all parameters": "--learning-rate 0.003",
}


def dutch(number: int) -> str:
    """Return a number below 2,000 in Dutch: 22 is "tweeëntwintig"."""
    if number >= 1000:
        return f"duizend {dutch(number - 1000) if number > 1000 else ''}".rstrip()
    if number >= 100:
        hundreds, rest = divmod(number, 100)
        return f"{BELOW_20[hundreds] * (hundreds > 1)}honderd{dutch(rest) if rest else ''}"
    if number < 20:
        return BELOW_20[number]
    tens, unit = divmod(number, 10)
    joined = BELOW_20[unit] + ("ën" if BELOW_20[unit].endswith("e") else "en")
    return joined * (unit > 0) + TENS[tens - 2]


def write_text(folder: Path) -> None:
    """Write the words of all numbers in three languages, and a tokenizer of their letters."""
    order = np.random.default_rng(0).permutation(NUMBERS).tolist()
    for name, numbers in {"valid": order[:HELD_OUT], "train": order[HELD_OUT:]}.items():
        words = {"en": english(numbers), "de": german(numbers), "nl": map(dutch, numbers)}
        for language, lines in words.items():
            text = "".join(f"{line}\n" for line in lines)
            (folder / f"{name}.{language}").write_text(text, "utf-8")
    lines = "".join(path.read_text("utf-8") for path in sorted(folder.glob("train.*")))
    (folder / "tokenizer").mkdir()
    write_files(folder / "tokenizer", train_byte_pair(lines.splitlines(), vocab_size=64))


def draw() -> None:
    """Train the model and adapt it in both ways, in minutes; draw the validation losses."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(folder)

        def train(target: str, output: str, *options: str) -> None:
            files = {"source": "train.en", "valid-source": "valid.en"}
            files |= {"target": f"train.{target}", "valid-target": f"valid.{target}"}
            named = [f"--{name}={folder / file}" for name, file in files.items()]
            named += [f"--output={folder / output}", *COMMON.split()]
            command_call("train", *named, *options)()

        train("de", "base", f"--tokenizer={folder / 'tokenizer'}", *BASE.split())
        figure = Figure(figsize=(6, 3), layout="constrained")
        axes = figure.subplots()
        english_lines, dutch_lines = (
            (folder / f"valid.{code}").read_text("utf-8").splitlines() for code in ("en", "nl")
        )
        for (kind, options), colour in zip(KINDS.items(), (JAX, TORCH), strict=True):
            output = kind.replace(" ", "_")
            train("nl", output, f"--init={folder / 'base'}", *ADAPT.split(), *options.split())
            reports = read_metrics(folder / output / METRICS_FILE)
            found = {
                one["step"]: one["validation_loss"] for one in reports if "validation_loss" in one
            }
            texts = [result.text for result in Translator(folder / output)(english_lines)]
            label = f"{kind}: {exact_match(texts, [dutch_lines]):.1%} of {HELD_OUT} numbers exact"
            style = {"color": colour, "marker": "o", "markersize": 3}
            axes.plot([*found], [*found.values()], label=label, **style)
        axes.set(yscale="log", xlabel="step", ylabel="validation loss, nats a token")
        axes.legend()
        save(figure, "lora")
