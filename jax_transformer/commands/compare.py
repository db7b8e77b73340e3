"""`jax-transformer compare`: two records of any two models, block by block."""

import dataclasses
import sys
from pathlib import Path

from jax_transformer.parity import compare as compare_records
from jax_transformer.parity import read_record
from jax_transformer.parity.report import check_new_file, check_report
from jax_transformer.storage.writing import json_bytes, replace_file


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Compare what two programs computed of the same inputs; print the error of every block.

    A record is a file that `parity.record` wrote, or any .safetensors file of named arrays:
    gradients, parameters after some steps, losses. The exit code is 1 where the values that the
    programs returned differ by more than rounding.

    Attributes:
        a: Record of the program that is examined.
        b: Record of the program that it must follow.
        bound: How many times the precision of a dtype is no difference; 64 without it, and 8 of
            half precision.
        json: JSON file to write about the comparison.
        report: HTML file to write about the comparison.
        overwrite: Replace existing files.
    """

    a: Path
    b: Path
    bound: float | None = None
    json: Path | None = None
    report: Path | None = None
    overwrite: bool = False


def compare(arguments: Arguments) -> None:
    """Compare two records; leave with code 1 if they differ."""
    json, report, overwrite = arguments.json, arguments.report, arguments.overwrite
    if json is not None:
        check_new_file(json, overwrite)
    if report is not None:
        check_report(report, overwrite)
    records = [read_record(path) for path in (arguments.a, arguments.b)]
    result = compare_records(*records, bound=arguments.bound)
    print(result)
    if json is not None:
        replace_file(json, json_bytes(result.to_json()))
    if report is not None:
        result.write_page(report, overwrite=overwrite)
    if not result.agrees:
        sys.exit(1)
