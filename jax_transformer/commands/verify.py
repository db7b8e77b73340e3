"""`jax-transformer verify`: the same weights in both frameworks, or beside the user's program."""

import dataclasses
import sys
from pathlib import Path

from jax_transformer.commands.convert import (
    Weights,
    file_config,
    holds_weights_alone,
    read_source,
)
from jax_transformer.convert import to_torch
from jax_transformer.convert.huggingface import is_huggingface, read_config
from jax_transformer.errors import InputError, check_installed
from jax_transformer.parity.report import check_report
from jax_transformer.porting.compare import compare_record
from jax_transformer.porting.layouts import get_layout
from jax_transformer.porting.record import Record, read_record
from jax_transformer.porting.report import write_report
from jax_transformer.porting.verify import verify as verify_tensors
from jax_transformer.storage import weights as files


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(Weights):
    """Run JAX beside PyTorch, or beside your own program; print the error of every block.

    Without --against, JAX and PyTorch run on the same weights and random input. This tests the
    conversion. It does not test whether the config describes your model: both sides are built
    from the same config. With --against, JAX runs on the inputs that your program was given, and
    is compared with what it computed: this tests the model. The exit code is 1 where a block
    differs by more than rounding.

    Attributes:
        against: What your program computed: a file that the code written by `jax-transformer
            suggest` leaves, with token ids and logits, and outputs of modules.
        report: HTML file to write about the comparison with --against.
        overwrite: Replace an existing report.
    """

    against: Path | None = None
    report: Path | None = None
    overwrite: bool = False


def verify(arguments: Arguments) -> None:
    """Compare a model in JAX with PyTorch or with a record; leave with code 1 if they differ."""
    source, layout, against = arguments.source, arguments.layout, arguments.against
    strip_prefixes, report = arguments.strip_prefixes, arguments.report
    overwrite = arguments.overwrite
    if report is not None and against is None:
        raise InputError(f"--report {report} needs --against, a record of your program")
    if against is None:
        check_installed("torch")
        if holds_weights_alone(arguments):
            config = file_config(source, arguments.config, layout)
            tensors = files.read_trained(source, key=arguments.key, drop=arguments.drop)
            result = verify_tensors(tensors, config, layout, strip_prefixes=strip_prefixes)
        else:
            model = read_source(arguments)
            result = verify_tensors(to_torch(model.params, model.config), model.config)
        print(result)
    else:
        if report is not None:
            check_report(report, overwrite)
        record = _strip(read_record(against), strip_prefixes)
        model = read_source(arguments)
        names = get_layout(read_config(source)["model_type"] if is_huggingface(source) else layout)
        result = compare_record(model.params, model.config, names, record)
        print(result)
        if report is not None:
            write_report(report, result, model.config, names, overwrite=overwrite)
            print(f"{report} written")
    if result.first_differing:
        sys.exit(1)


def _strip(record: Record, prefixes: tuple[str, ...]) -> Record:
    """Return the record without the prefixes of its modules' names, as of the weights' names."""
    batches = []
    for batch in record.batches:
        blocks = batch.blocks
        for prefix in prefixes:
            blocks = {name.removeprefix(prefix): block for name, block in blocks.items()}
        batches.append(batch._replace(blocks=blocks))
    return record._replace(batches=tuple(batches))
