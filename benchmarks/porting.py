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

import torch
import tyro
from torch import nn

from jax_transformer import InputError
from jax_transformer.porting import program, read_recording, suggest
from tests.porting.models import SHAPES, Shape
from tests.porting.recorded import tensors_of

PAD = 11_999  # of the large model, which is also the size of its vocabulary less 1
HEADINGS = ("model", "operations", "runs", "recorded", "read", "result", "error")


class Large(nn.Module):
    """Hugging Face's Marian with 6 + 6 layers and one vocabulary, called with ids alone."""

    pad = PAD

    def __init__(self) -> None:
        super().__init__()
        from transformers import MarianConfig, MarianMTModel

        config = MarianConfig(
            vocab_size=PAD + 1,
            d_model=512,
            encoder_layers=6,
            decoder_layers=6,
            encoder_attention_heads=8,
            decoder_attention_heads=8,
            encoder_ffn_dim=2048,
            decoder_ffn_dim=2048,
            pad_token_id=PAD,
            decoder_start_token_id=PAD,
            eos_token_id=0,
        )
        self.marian = MarianMTModel(config)

    def forward(self, src: torch.Tensor, tgt: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, T, V] of ids [B, S] and [B, T]."""
        seen = (src != PAD).long()
        return self.marian(
            input_ids=src, attention_mask=seen, decoder_input_ids=tgt, use_cache=False
        ).logits


@dataclasses.dataclass
class Settings:
    """What is run.

    Attributes:
        models: Names of models that are run; none means all.
    """

    models: tuple[str, ...] = ()


# A user of the program `features`, which takes no ids, changes more than `call`.
MODELS = {name: shape for name, shape in SHAPES.items() if name != "features"}
MODELS["large"] = Shape(Large)


def main(settings: Settings) -> None:
    """Print a row for each model, with seconds of the processor."""
    print(f"| {' | '.join(HEADINGS)} |\n{'|---' * len(HEADINGS)}|")
    for name in settings.models or MODELS:
        if name == "large":
            process = multiprocessing.get_context("spawn").Process(target=row, args=(name,))
            process.start()
            process.join()
        else:
            row(name)


def row(name: str) -> None:
    """Record and read one model; print its row."""
    torch.set_num_threads(1)
    shape = MODELS[name]
    module = shape.module()
    tensors = tensors_of(module, shape.dropped)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        start = time.process_time()
        with contextlib.redirect_stdout(io.StringIO()):
            exec(re.sub("(?m)^PAD = .*", f"PAD = {shape.build.pad}", program()), {"model": module})
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
