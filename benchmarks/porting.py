"""How much of an unknown model is found, and in what time: python -m benchmarks.porting.

The models are those of the tests: written with names, orders and choices of their own. Each is
recorded by the code that `suggest` prints, and searched with the outputs of its modules, and with
its logits alone. The last one has the size of opus-mt. Needs the extra test.
"""

import dataclasses
import time

import numpy as np
import torch
import tyro
from torch import nn

from jax_transformer import InputError, convert
from jax_transformer.porting.compare import compare_record
from jax_transformer.porting.record import Record
from jax_transformer.porting.suggest import Suggestion, suggest
from tests.convert.foreign import randomized
from tests.porting.foreign_models import MODELS, OUTSIDE
from tests.porting.renamed import KINDS, renamed, run_snippet
from tests.porting.renamed import recorded as model_record

LARGE = "opus-mt's size"


class Marian(nn.Module):
    """Hugging Face's Marian in the size of opus-mt, called with ids alone."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import MarianConfig, MarianMTModel

        sizes = {f"{side}_layers": 6 for side in ("encoder", "decoder")}
        sizes |= {f"{side}_ffn_dim": 2048 for side in ("encoder", "decoder")}
        sizes |= {f"{side}_attention_heads": 8 for side in ("encoder", "decoder")}
        config = MarianConfig(
            vocab_size=58101,
            d_model=512,
            activation_function="swish",
            pad_token_id=58100,
            eos_token_id=0,
            decoder_start_token_id=58100,
            **sizes,
        )
        self.marian = MarianMTModel(config)

    def forward(self, src: torch.Tensor, tgt: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, T, V] of ids [B, S] and [B, T]; 58100 is padding."""
        seen = (src != 58100).long()
        options = {"decoder_input_ids": tgt, "use_cache": False}
        return self.marian(input_ids=src, attention_mask=seen, **options).logits


@dataclasses.dataclass
class Settings:
    """What is run.

    Attributes:
        models: Names of models; none means the twelve, the outside ones and the large one.
        names: Instead, the twelve with every name replaced: by random words, by words of other
            languages, by names of other parts; with the outputs of their modules, and, with random
            words, by their logits alone.
        logits_alone: Whether the search without the outputs of modules is run too.
        minutes: The longest search.
    """

    models: tuple[str, ...] = ()
    names: bool = False
    logits_alone: bool = True
    minutes: float = 30.0


def main(settings: Settings) -> None:
    """Print a row for each model."""
    if settings.names:
        names(settings)
        return
    print("| model | tensors | certain, likely, open | passes, seconds | logits | logits alone |")
    print("|---|---|---|---|---|---|")
    for name in settings.models or (*MODELS, *OUTSIDE, LARGE):
        tensors, record = recorded(name)
        try:
            shares = suggest(tensors).shares.values()
            found, cost = search(tensors, record, settings)
        except InputError as error:
            print(f"| {name} | {len(tensors)} | {error} | | | |", flush=True)
            continue
        share = ", ".join(f"{100 * part:.0f}" for part in shares)
        row = [name, str(len(tensors)), f"{share} %", cost]
        row.append(f"{logits_error(tensors, found, record):.0e}" if found.fits else miss(found))
        if settings.logits_alone and found.fits:
            row.append(search(tensors, without_blocks(record), settings)[1])
        print(f"| {' | '.join(row)} |", flush=True)


def names(settings: Settings) -> None:
    """Print a row for each model: the effort with its names replaced in three ways."""
    alone = ["random, logits alone"] if settings.logits_alone else []
    print(f"| model | {' | '.join([*KINDS, *alone])} |")
    print("|---" * (1 + len(KINDS) + len(alone)) + "|")
    for name in settings.models or MODELS:
        row = [name]
        for column in (*KINDS, *alone):
            tensors, record = renamed(name, column.partition(",")[0])
            record = without_blocks(record) if column in alone else record
            try:
                row.append(search(tensors, record, settings)[1])
            except InputError:
                row.append("refused")
        print(f"| {' | '.join(row)} |", flush=True)


def without_blocks(record: Record) -> Record:
    """Return a record of the logits alone."""
    batches = tuple(batch._replace(blocks={}) for batch in record.batches)
    return Record(batches, record.pad_id)


def recorded(name: str) -> tuple[dict[str, np.ndarray], Record]:
    """Return a model's weights, and what the printed code records of it."""
    if name != LARGE:
        return model_record(name)
    module = randomized(Marian()).eval()
    tensors = {key: value.numpy().copy() for key, value in module.state_dict().items()}
    return tensors, run_snippet(module, 58100, 58101, 58101)


def search(
    tensors: dict[str, np.ndarray], record: Record, settings: Settings
) -> tuple[Suggestion, str]:
    """Return what is found, and its passes and seconds of the processor."""
    before = time.process_time()
    suggestion = suggest(tensors, record, minutes=settings.minutes)
    seconds = time.process_time() - before
    outcome = "" if suggestion.fits else ", not found"
    return suggestion, f"{suggestion.finding.passes:,}, {seconds:.1f} s{outcome}"


def logits_error(tensors: dict[str, np.ndarray], suggestion: Suggestion, record: Record) -> float:
    """Return how far the logits in JAX are from the program's."""
    config, layout = suggestion.config, suggestion.layout
    params = convert.from_torch(tensors, config, layout)
    return compare_record(params, config, layout, record).blocks[-1].error


def miss(suggestion: Suggestion) -> str:
    """Return what no config has, or where nothing fits."""
    starts = ("your program", "nothing fits", "near, not equal")
    return next(line for line in str(suggestion).splitlines() if line.startswith(starts))


if __name__ == "__main__":
    main(tyro.cli(Settings))
