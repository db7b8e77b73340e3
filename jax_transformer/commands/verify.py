"""`jax-transformer verify`: the same weights in both frameworks, or beside the user's program."""

import dataclasses
import sys
from pathlib import Path

from jax_transformer.commands.convert import Weights, file_config, holds_weights_alone, read_source
from jax_transformer.convert import to_tensors, to_torch
from jax_transformer.convert.huggingface import is_huggingface, read_config
from jax_transformer.errors import check_installed
from jax_transformer.parity.report import check_report
from jax_transformer.porting import get_layout, read_recording, verify_recording
from jax_transformer.porting import verify as verify_tensors
from jax_transformer.storage import weights as files

NOTE = (
    "note: this tests the conversion, not whether the config describes your model: both sides are "
    "built from the same config. To test your model, give --against a recording of it, which the "
    "program that `jax-transformer suggest` prints writes"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(Weights):
    """Run JAX beside PyTorch, or beside your own program; print the error of every block.

    Without --against, JAX and PyTorch run on the same weights and random input. This tests the
    conversion. It does not test whether the config describes your model: both sides are built
    from the same config. With --against, JAX is compared with the recorded operations of your
    program: this tests the model. The exit code is 1 where a block differs by more than rounding.

    Attributes:
        against: What your program computed: the file that the program printed by `jax-transformer
            suggest` writes.
        report: HTML file to write about the comparison.
        overwrite: Replace an existing report.
    """

    against: Path | None = None
    report: Path | None = None
    overwrite: bool = False


def verify(arguments: Arguments) -> None:
    """Compare a model in JAX with PyTorch or with a recording; leave with code 1 if they differ."""
    source, layout, against = arguments.source, arguments.layout, arguments.against
    check_installed("torch")
    if arguments.report is not None:
        check_report(arguments.report, arguments.overwrite)
    recording = None if against is None else read_recording(against)
    alone = holds_weights_alone(arguments)
    if recording is None and alone:
        config = file_config(source, arguments.config, layout)
        tensors = files.read_trained(source, key=arguments.key, drop=arguments.drop)
        result = verify_tensors(tensors, config, layout, strip_prefixes=arguments.strip_prefixes)
    else:
        model = read_source(arguments)
        if recording is None:
            result = verify_tensors(to_torch(model.params, model.config), model.config)
        else:
            folder = is_huggingface(source)
            names = get_layout(read_config(source)["model_type"] if folder else layout)
            tensors, _ = to_tensors(model.params, model.config, names)
            if alone:  # with what no parameter is
                tensors |= files.read_trained(source, key=arguments.key, tell=lambda line: None)
            result = verify_recording(model.params, model.config, names, recording, tensors)
    print(result)
    if recording is None:
        print(NOTE)
    if arguments.report is not None:
        result.write_page(arguments.report, overwrite=arguments.overwrite)
        print(f"{arguments.report} written")
    if not result.agrees:
        sys.exit(1)
