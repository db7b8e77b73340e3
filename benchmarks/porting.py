"""What is read of unknown programs, and in what time: python -m benchmarks.porting.

The models are those of the tests, written with names, orders and choices of their own. Each is
recorded by the program that `suggest` prints. The last one has some 50 million parameters, and a
process of its own. Needs the extra test.
"""

import contextlib
import dataclasses
import io
import multiprocessing
import os
import re
import resource
import tempfile
import time
from collections.abc import Callable

import torch
import tyro
from torch import nn

from jax_transformer import InputError
from jax_transformer.porting import program, read_recording, suggest
from tests.convert.foreign import randomized
from tests.porting.foreign_models import MODELS
from tests.porting.public_models import PAD as PUBLIC_PAD
from tests.porting.public_models import SHAPES

PAD = 11_999  # of the large model, which is also the size of its vocabulary less 1
HEADINGS = ("model", "operations", "runs", "recorded", "read", "result", "error")


class Large(nn.Module):
    """Hugging Face's Marian with 6 + 6 layers and one vocabulary, called with ids alone."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import MarianConfig, MarianMTModel

        sizes = {f"{side}_layers": 6 for side in ("encoder", "decoder")}
        sizes |= {f"{side}_ffn_dim": 2048 for side in ("encoder", "decoder")}
        sizes |= {f"{side}_attention_heads": 8 for side in ("encoder", "decoder")}
        ids = {"vocab_size": PAD + 1, "pad_token_id": PAD, "decoder_start_token_id": PAD}
        self.marian = MarianMTModel(MarianConfig(d_model=512, eos_token_id=0, **ids, **sizes))

    def forward(self, src: torch.Tensor, tgt: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, T, V] of ids [B, S] and [B, T]."""
        seen = (src != PAD).long()
        options = {"decoder_input_ids": tgt, "use_cache": False}
        return self.marian(input_ids=src, attention_mask=seen, **options).logits


@dataclasses.dataclass
class Settings:
    """What is run.

    Attributes:
        models: Names of models that are run; none means all.
    """

    models: tuple[str, ...] = ()


def models() -> dict[str, tuple[Callable[[], nn.Module], int]]:
    """Return what builds each model, and its id of padding, by its name."""
    found = {name: (row.build, row.expected["pad_id"]) for name, row in MODELS.items()}
    found |= {name: (row.build, PUBLIC_PAD) for name, row in SHAPES.items()}
    del found["features"]  # takes no ids, so that a user changes more than `call`
    return found | {"large": (Large, PAD)}


def main(settings: Settings) -> None:
    """Print a row for each model, with seconds of the processor."""
    print(f"| {' | '.join(HEADINGS)} |\n{'|---' * len(HEADINGS)}|")
    for name in settings.models or models():
        if name == "large":
            process = multiprocessing.get_context("spawn").Process(target=row, args=(name,))
            process.start()
            process.join()
        else:
            row(name)


def row(name: str) -> None:
    """Record and read one model; print its row."""
    torch.set_num_threads(1)
    build, pad_id = models()[name]
    module = randomized(build()).eval()
    tensors = {key: value.numpy().copy() for key, value in module.state_dict().items()}
    tensors.pop("criterion.weight", None)  # --drop of one model
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        start = time.process_time()
        with contextlib.redirect_stdout(io.StringIO()):
            exec(re.sub("(?m)^PAD = .*", f"PAD = {pad_id}", program()), {"model": module})
        seconds = [time.process_time() - start]
        memory, size = peak(), os.path.getsize("recorded.pt")
        start, calls, runs, errors = time.process_time(), 0, 0, list[float]()
        try:
            recording = read_recording("recorded.pt")
            calls, runs = len(recording.runs[0].calls), len(recording.runs)
            found = suggest(tensors, recording)
            errors, refused = [*found.errors.values()], found.refused
        except InputError as error:
            refused = (str(error),)
        seconds.append(time.process_time() - start)
    cells = [name, f"{calls:,}", str(runs), *(f"{each:.1f} s" for each in seconds)]
    cells += [refused[0].partition(": ")[0] if refused else "found"]
    print(f"| {' | '.join([*cells, f'{max(errors):.0e}' if errors else ''])} |", flush=True)
    if name == "large":
        count = sum(parameter.numel() for parameter in module.parameters())
        print(f"\n{count:,} parameters; {size / 2**20:.0f} MiB are recorded; at most", end=" ")
        print(f"{memory:.1f} GiB of memory for recording, {peak():.1f} GiB with reading")


def peak() -> float:
    """Return the most memory that the process has had, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    main(tyro.cli(Settings))
