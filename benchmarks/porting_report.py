"""The picture of a porting report in the documents: python -m benchmarks.porting_report.

A program around torch.nn.Transformer computes the tanh approximation of GELU. It is compared with
its weights under a config that names the exact GELU. Needs the extras test and browser.
"""

import os
import shutil
import tempfile
from pathlib import Path

import jax
import torch
from playwright.sync_api import sync_playwright
from torch import nn

from jax_transformer import TransformerConfig, convert
from jax_transformer.convert.layouts import torch_nn
from jax_transformer.porting.compare import compare_record
from jax_transformer.porting.html_report import write_report
from jax_transformer.porting.record import Record, record_module

PICTURE = Path("docs/report.png")
WIDTH, HEIGHT = 1080, 1150  # of the upper part that is shown, in pixels
PAD, VOCABULARY, D_MODEL, HEADS, D_FF, LAYERS = 0, 100, 64, 4, 128, 2


class Program(nn.Module):
    """Embeddings without positions, a pre-norm torch.nn.Transformer and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Embedding(VOCABULARY, D_MODEL)
        self.target = nn.Embedding(VOCABULARY, D_MODEL)
        self.transformer = nn.Transformer(
            D_MODEL,
            HEADS,
            LAYERS,
            LAYERS,
            D_FF,
            activation=lambda x: nn.functional.gelu(x, approximate="tanh"),
            batch_first=True,
            norm_first=True,
        )
        self.head = nn.Linear(D_MODEL, VOCABULARY)

    def forward(self, src: torch.Tensor, tgt: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, T, V] of ids [B, S] and [B, T]."""
        padding, length = src == PAD, tgt.shape[1]
        hidden = self.transformer(
            self.source(src) * D_MODEL**0.5,
            self.target(tgt) * D_MODEL**0.5,
            tgt_mask=torch.ones(length, length, dtype=torch.bool).triu(1),
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_key_padding_mask=tgt == PAD,
        )
        return self.head(hidden)


def report(path: Path) -> None:
    """Write the report of the program under a config with another activation."""
    torch.manual_seed(0)
    program = Program().double()
    layout = convert.Layout(
        "my_model",
        (
            *torch_nn.transformer("transformer.").rows,
            convert.Row("source.weight", "source_embedding/embedding"),
            convert.Row("target.weight", "target_embedding/embedding"),
            *torch_nn.linear("head", "output_projection"),
        ),
    )
    config = TransformerConfig(
        src_vocab_size=VOCABULARY,
        tgt_vocab_size=VOCABULARY,
        d_model=D_MODEL,
        num_heads=HEADS,
        d_ff=D_FF,
        num_encoder_layers=LAYERS,
        num_decoder_layers=LAYERS,
        positions="none",
        norm_placement="pre",
        final_norm=True,
        activation="gelu",
        pad_id=PAD,
    )
    params = convert.from_torch(program.state_dict(), config, layout)
    batches = []
    for source, target in ((1, 1), (7, 5), (7, 5)):
        src, tgt = (torch.randint(1, VOCABULARY, (3, length)) for length in (source, target))
        if len(batches) == 2:
            src[1, 4:] = src[2, 6:] = tgt[1, 4:] = tgt[2, 2:] = PAD
        batches += record_module(program, src, tgt, pad_id=PAD).batches
    record = Record(tuple(batches), PAD)
    comparison = compare_record(params, config, layout, record)
    print(comparison)
    write_report(path, comparison, params, config, layout, record)


def photograph(page: Path, picture: Path) -> None:
    """Write the upper part of a page as the system's Chromium shows it."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--no-sandbox"] if os.geteuid() == 0 else [],
        )
        size = {"width": WIDTH, "height": HEIGHT}
        tab = browser.new_page(viewport=size, color_scheme="light")
        tab.goto(page.as_uri())
        tab.screenshot(path=picture)
        browser.close()


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.html"
        report(path)
        photograph(path, PICTURE)
    print(f"{PICTURE}: {PICTURE.stat().st_size // 1000} kB")
