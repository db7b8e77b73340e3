"""`jax-transformer convert`: weights from one layout to another."""

from pathlib import Path
from typing import Annotated

import tyro

from jax_transformer.convert import weights

Prefixes = Annotated[tuple[str, ...], tyro.conf.arg(metavar="PREFIX ...")]


def convert(
    source: tyro.conf.Positional[Path],
    output: tyro.conf.Positional[Path],
    /,
    layout: str = "reference",
    output_layout: str = "reference",
    config: Path | None = None,
    strip_prefixes: Prefixes = (),
    dtype: str | None = None,
    overwrite: bool = False,
) -> None:
    """Read weights in one layout, write them in another, and print what went where.

    Args:
        source: Weights to read: .safetensors, .pt, .pth or .bin; with --layout marian a folder of
            Hugging Face; or a checkpoint of train.py, whatever the layout.
        output: Weights to write: a file of one of these kinds, or a folder with
            --output-layout marian.
        layout: Names and shapes in the source.
        output_layout: Names and shapes wanted in the output.
        config: JSON file of the config's fields, as {"preset": "torch_nn", "num_heads": 8}, where
            the source does not record them.
        strip_prefixes: Taken off every name of the source that begins with them, as module.
        dtype: Floating-point type to convert to; if None, each tensor keeps its own.
        overwrite: Replace an existing output.
    """
    options = {"strip_prefixes": strip_prefixes, "dtype": dtype, "overwrite": overwrite}
    for report in weights.convert(source, output, layout, output_layout, config, **options):
        print(report)
    print(f"{output} written, and read back equal")
