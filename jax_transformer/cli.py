"""The command line: `jax-transformer translate | convert | verify`."""

import sys
from pathlib import Path
from typing import Annotated

import tyro

from jax_transformer.errors import InputError

Prefixes = Annotated[tuple[str, ...], tyro.conf.arg(metavar="PREFIX ...")]


def main() -> None:
    """Run a subcommand; an input error is one line on standard error and exit code 1."""
    try:
        tyro.extras.subcommand_cli_from_dict(
            {"translate": translate, "convert": convert, "verify": verify},
            prog="jax-transformer",
            config=(tyro.conf.FlagCreatePairsOff,),
        )
    except InputError as error:
        sys.exit(f"error: {error}")


def translate(checkpoint: tyro.conf.Positional[Path], /) -> None:
    """Translate the lines of standard input, one a line on standard output.

    Args:
        checkpoint: Directory that train.py has written.
    """
    # Imported here, so that --help need not wait for them.
    from jax_transformer import evaluate
    from jax_transformer.data.corpus import split_lines
    from jax_transformer.training.checkpoint import load

    model = load(checkpoint)
    lines = split_lines(sys.stdin.buffer.read(), "standard input")
    translations = evaluate.translate(model, lines)
    sys.stdout.buffer.writelines(f"{line}\n".encode() for line in translations)


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
    from jax_transformer.convert import command

    options = {"strip_prefixes": strip_prefixes, "dtype": dtype, "overwrite": overwrite}
    for report in command.convert(source, output, layout, output_layout, config, **options):
        print(report)
    print(f"{output} written, and read back equal")


def verify(
    source: tyro.conf.Positional[Path],
    /,
    layout: str = "reference",
    config: Path | None = None,
    strip_prefixes: Prefixes = (),
) -> None:
    """Run JAX and torch on the same weights and random input; print the error of every block.

    Leaves with exit code 1 where a block differs by more than rounding.

    Args:
        source: As for convert.
        layout: Names and shapes in the source.
        config: As for convert.
        strip_prefixes: As for convert.
    """
    from jax_transformer.convert import command

    verification = command.verify(source, layout, config, strip_prefixes=strip_prefixes)
    print(verification)
    if verification.first_differing:
        sys.exit(1)


if __name__ == "__main__":
    main()
