"""Train a recipe with several seeds and score it: python -m benchmarks.recipe --output F ...

Arguments that are not listed here are those of train.py. Without them the recipe is the default
one: the embedded number words, and the held-out numbers as the test text. A recipe that was
interrupted goes on where it was.
"""

import dataclasses
from pathlib import Path

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.huggingface import run, translate_here
from benchmarks.systems import processor, read_lines
from jax_transformer.evaluation.scores import bleu
from jax_transformer.runs.checkpoints import steps_in
from jax_transformer.runs.metrics import METRICS_FILE, read_metrics
from jax_transformer.storage.folder import CHECKPOINTS
from jax_transformer.text import number_words


@dataclasses.dataclass
class Recipe:
    """What is trained and how it is scored.

    Attributes:
        output: Folder for the runs, one for each seed.
        test_source: Text to translate; None for the held-out numbers of the seed.
        test_target: Its translation.
        seeds: Seeds of the runs.
        average: Checkpoints whose mean translates; 0 for the model of the lowest validation loss.
        beams: Hypotheses of each search; 1 is greedy search.
        length_penalty: Of the searches with more than one hypothesis.
        tokenization: sacrebleu's name of a tokenization of the test text.
    """

    output: Path
    test_source: Path | None = None
    test_target: Path | None = None
    seeds: tuple[int, ...] = (0, 1, 2)
    average: int = 0
    beams: tuple[int, ...] = (1, 5)
    length_penalty: float = 0.6
    tokenization: str = "13a"


def scores_of(recipe: Recipe, seed: int, arguments: list[str]) -> dict[str, float]:
    """Train with a seed and return what the run reached, by name."""
    output = model = recipe.output / f"seed-{seed}"
    # Without a checkpoint, an interrupted run begins again.
    begun = steps_in(output / CHECKPOINTS)
    options = ["--resume"] if begun else [*arguments, f"--seed={seed}"]
    run("train", f"--output={output}", *options)
    if recipe.average:
        model = recipe.output / f"seed-{seed}-mean"
        run("average", output, model, f"--last={recipe.average}", "--overwrite")
    source, tokenization = recipe.test_source, recipe.tokenization
    if source is None:
        tokenization = "char"  # a German number is one word, which has no n-grams of words
        held_out = number_words.corpus(seed)[1]
        source, references = recipe.output / f"seed-{seed}.source", held_out.targets
        source.write_text("".join(f"{line}\n" for line in held_out.sources))
    else:
        references = read_lines(recipe.test_target)
    reports = read_metrics(output / METRICS_FILE)
    losses = [report["validation_loss"] for report in reports if "validation_loss" in report]
    result = {"steps": reports[-1]["step"], "validation loss": min(losses)}
    for beam in recipe.beams:
        options = [f"--length-penalty={recipe.length_penalty}"] if beam > 1 else []
        translations = translate_here(model, source, f"--beam={beam}", *options)
        score = bleu(translations, [references], tokenization)
        result[f"BLEU, beam {beam}"] = score.value
        Console().print(f"seed {seed}, beam {beam}: {score.report}")
    return result


def show(results: dict[int, dict[str, float]]) -> Table:
    """Return the figures of each seed, their mean, and their spread."""
    names = list(next(iter(results.values())))
    table = Table("seed", *names, title=processor())
    for seed, result in results.items():
        table.add_row(str(seed), *(f"{result[name]:.3f}" for name in names))
    columns = [np.array([result[name] for result in results.values()]) for name in names]
    table.add_row("mean", *(f"{column.mean():.3f}" for column in columns))
    table.add_row("largest - smallest", *(f"{np.ptp(column):.3f}" for column in columns))
    return table


def main(recipe: Recipe, arguments: list[str]) -> None:
    """Train, score and print."""
    recipe.output.mkdir(parents=True, exist_ok=True)
    results = {seed: scores_of(recipe, seed, arguments) for seed in recipe.seeds}
    Console().print(show(results))


if __name__ == "__main__":
    main(*tyro.cli(Recipe, return_unknown_args=True))
