"""The command line: `jax-transformer translate | average | convert | verify | budget`."""

import itertools
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

from jax_transformer.errors import InputError

Prefixes = Annotated[tuple[str, ...], tyro.conf.arg(metavar="PREFIX ...")]


def main() -> None:
    """Run a subcommand; an input error is one line on standard error and exit code 1."""
    try:
        tyro.extras.subcommand_cli_from_dict(
            {
                "translate": translate,
                "average": average,
                "convert": convert,
                "verify": verify,
                "budget": budget,
            },
            prog="jax-transformer",
            config=(tyro.conf.FlagCreatePairsOff,),
        )
        sys.stdout.flush()  # here, and not at exit, a reader that has left can be dealt with
    except InputError as error:
        sys.exit(f"error: {error}")
    except BrokenPipeError:  # the reader has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def translate(
    checkpoint: tyro.conf.Positional[Path],
    /,
    beam: int = 1,
    length_penalty: float = 0.6,
    nbest: int = 1,
    scores: bool = False,
    max_new_tokens: int | None = None,
    overlong: Literal["refuse", "cut"] = "refuse",
    token_budget: int = 4096,
    mesh: str | None = None,
    alignments: Path | None = None,
    overwrite: bool = False,
) -> None:
    """Translate the lines of standard input: --nbest lines each on standard output, best first.

    Line i gives the lines from (i - 1) * nbest + 1 to i * nbest, blank ones if it is blank. With
    --scores each begins with its score and a tab. Progress is shown on standard error, where that
    is a terminal.

    Args:
        checkpoint: Directory that train.py has written.
        beam: Hypotheses that beam search keeps open; 1 is greedy.
        length_penalty: Exponent alpha of ((5 + n) / 6)**alpha, which the log-probability of a
            translation of n tokens is divided by.
        nbest: Translations of each line, at most --beam.
        scores: Write the score of each translation, that of a blank line being 0.
        max_new_tokens: Most tokens of a translation, its end included; if None, ten more than
            twice as many as its line.
        overlong: Refuse all lines where one has more tokens than the model takes, or cut it.
        token_budget: Most slots (lines times beam times length) of a batch on a device: more of
            them need more memory and fewer batches.
        mesh: This machine's devices as axes, such as data=4,fsdp=2; if None, all on data.
        alignments: Picture to write of where the model looked, for the first few lines: .png,
            .pdf or .svg.
        overwrite: Replace an existing picture.
    """
    # Imported here, so that --help need not wait for them.
    import jax
    from rich.console import Console

    from jax_transformer import alignment_plot, translation
    from jax_transformer.data.corpus import split_lines
    from jax_transformer.host_memory import keep_freed_memory
    from jax_transformer.sharding import make_mesh
    from jax_transformer.training.checkpoint import load

    if not 1 <= nbest <= beam:
        raise InputError(f"--nbest {nbest} must be from 1 to --beam {beam}")
    if alignments is not None:
        alignment_plot.check_picture(alignments, overwrite)
    keep_freed_memory()
    devices = make_mesh(mesh or "data=-1", jax.local_devices())
    model = load(checkpoint)
    lines = split_lines(sys.stdin.buffer.read(), "standard input")
    translations = translation.translate(
        model,
        lines,
        beam_size=beam,
        num_hypotheses=nbest,
        length_penalty=length_penalty,
        max_new_tokens=max_new_tokens,
        overlong=overlong,
        token_budget=token_budget,
        console=Console(stderr=True, markup=False, highlight=False, soft_wrap=True),
        mesh=devices,
    )
    for one in itertools.chain.from_iterable(translations):
        score = f"{one.score:.6f}\t" if scores else ""
        sys.stdout.buffer.write(f"{score}{one.text}\n".encode())
    if alignments is not None:
        drawn = alignment_plot.alignments(model, lines, translations)
        alignment_plot.draw(alignments, drawn, overwrite)


def average(
    run: tyro.conf.Positional[Path],
    output: tyro.conf.Positional[Path],
    /,
    last: int = 10,
    overwrite: bool = False,
) -> None:
    """Write the mean of a training run's last checkpoints as a checkpoint for translate.

    Args:
        run: Directory of the run's checkpoints: run/ in the output of train.py.
        output: Directory to write.
        last: How many checkpoints, counted from the newest.
        overwrite: Replace an existing checkpoint.
    """
    from jax_transformer.training import averaging, checkpoint

    checkpoint.check_free(output, overwrite)
    checkpoint.save(output, averaging.average_run(run, last), overwrite)
    print(f"mean of the last {last} checkpoints of {run} written to {output}")


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


def budget(
    size: Literal["base", "big"] = "base",
    preset: str = "vaswani2017",
    vocab_size: int | None = None,
    d_model: int | None = None,
    num_heads: int | None = None,
    d_ff: int | None = None,
    num_encoder_layers: int | None = None,
    num_decoder_layers: int | None = None,
    mesh: str = "data=1",
    batch_rows: int = 256,
    length: int = 96,
    compute_type: Literal["float32", "bfloat16"] = "bfloat16",
    steps: int | None = None,
    utilisation: float = 0.4,
) -> None:
    """Print the memory, FLOPs and time that training a model takes, computed and not measured.

    The batch is by default the paper's, about 25,000 source and 25,000 target tokens (section 5.1).

    Args:
        size: Model of Vaswani et al. 2017, table 3; the sizes below replace its.
        preset: The described implementation.
        vocab_size: Entries of both vocabularies.
        d_model: Width of the residual stream.
        num_heads: Attention heads.
        d_ff: Inner width of the feed-forward networks.
        num_encoder_layers: Layers of the encoder.
        num_decoder_layers: Layers of the decoder.
        mesh: Sizes of the mesh's axes, as in data=8,fsdp=4; their product is the devices.
        batch_rows: Rows of the batch, of all devices together.
        length: Length of a source and of a target, in tokens.
        compute_type: What the model computes in; parameters and optimizer are float32.
        steps: Steps of the training; if None, the paper's.
        utilisation: Share of a device's peak that is reached.
    """
    from rich.console import Console

    from jax_transformer import budget
    from jax_transformer.config import TransformerConfig

    given = {
        "src_vocab_size": vocab_size,
        "tgt_vocab_size": vocab_size,
        "d_model": d_model,
        "num_heads": num_heads,
        "d_ff": d_ff,
        "num_encoder_layers": num_encoder_layers,
        "num_decoder_layers": num_decoder_layers,
    }
    fields, paper_steps = budget.SIZES[size]
    fields = fields | {name: value for name, value in given.items() if value is not None}
    config = TransformerConfig.preset(preset, **fields)
    workload = budget.Workload(batch_rows, length, compute_type, mesh)
    shown = budget.show(config, workload, paper_steps if steps is None else steps, utilisation)
    Console(width=100).print(shown)


if __name__ == "__main__":
    main()
