"""`jax-transformer suggest`: the config and the layout of weights that nobody described."""

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

from jax_transformer.convert import to_params, to_tensors, write_layout
from jax_transformer.errors import InputError, check_installed
from jax_transformer.porting.compare import DEFAULT_MASKS, compare_record
from jax_transformer.porting.layouts import layouts_of
from jax_transformer.porting.record import Record, read_record, snippet
from jax_transformer.porting.structure import StackAlone
from jax_transformer.porting.suggest import Suggestion
from jax_transformer.porting.suggest import suggest as suggest_layout
from jax_transformer.storage import weights as files

RECORDED = "recorded.safetensors"  # written by the code that is printed


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Find the stacks, layers and blocks of unknown weights; write their layout and config.

    Names and shapes tell what is certain, what is likely and what is open. The code that is
    printed then runs in your own program and records what it computes. With that file the open
    questions are settled by computing, and the model in JAX is compared with your program. The
    exit code is 1 where no config follows the record.

    Attributes:
        weights: A whole encoder-decoder: a .safetensors, .pt, .pth, .bin or .ckpt file, or a folder
            with shards and their index.
        against: What your program computed: the file that the printed code writes.
        output: TOML file to write, for --layout of convert and verify.
        minutes: After so many minutes the search gives the nearest model that it has found.
        overwrite: Replace an existing output.
        key: The entry of a checkpoint that holds the weights. Without it, model,
            model_state_dict, state_dict and ema are tried.
        drop: Names of tensors to leave out, for example criterion.weight "extra_head.*".
    """

    weights: Path
    against: Path | None = None
    output: Path = Path("layout.toml")
    minutes: float = 10.0
    overwrite: bool = False
    key: str | None = None
    drop: tuple[str, ...] = ()


def suggest(arguments: Arguments) -> None:
    """Suggest a layout; leave with code 1 if no config follows the record."""
    weights, against, output = arguments.weights, arguments.against, arguments.output
    minutes, overwrite = arguments.minutes, arguments.overwrite
    if not minutes > 0:
        raise InputError(f"--minutes {minutes} must be above 0")
    if os.path.lexists(output) and not overwrite:
        raise InputError(f"{output} already exists; choose another --output or add --overwrite")
    if output.suffix != ".toml" or not output.absolute().parent.is_dir():
        raise InputError(f"--output {output} must be a .toml file in a folder that exists")
    if against is not None:
        check_installed("torch")
    record = None if against is None else read_record(against)
    tensors = files.read_trained(weights, key=arguments.key, drop=arguments.drop)
    if known := layouts_of(tensors):
        print(f"note: these are the names of the layout {', '.join(known)}\n")
    try:
        suggestion = _with_progress(tensors, record, minutes) if record else suggest_layout(tensors)
    except InputError as error:
        alone = isinstance(error, StackAlone)
        if record is None and not alone:  # a layout by hand can be compared with a record too
            print(f"Run this in your program; then: verify ... --against {RECORDED}\n\n{snippet()}")
        raise
    print(suggestion)
    if record is not None and not (suggestion.fits and _holds(tensors, suggestion, record)):
        print(f"{output} is not written")
        sys.exit(1)
    write_layout(output, suggestion.layout, suggestion.config, overwrite=overwrite)
    print(f"{output} written; no weights tell bos_id and eos_id: set them there")
    if record is None:
        sizes = suggestion.config.src_vocab_size, suggestion.config.tgt_vocab_size
        print(f"\nRun this in your program; then: suggest ... --against {RECORDED}\n")
        print(snippet(suggestion.config.pad_id, *sizes))


def _holds(tensors: dict[str, Any], suggestion: Suggestion, record: Record) -> bool:
    """Return whether the model in JAX follows the record, and its tensors come back bit for bit."""
    described = suggestion.config, suggestion.layout
    params, _ = to_params(tensors, *described)
    comparison = compare_record(params, *described, record)
    print(f"logits in JAX: {comparison.blocks[-1].error:.1e} from your program's")
    back, _ = to_tensors(params, *described, buffers=False)
    changed = [name for name in back if back[name].tobytes() != tensors[name].tobytes()]
    if changed:
        print(f"{changed[0]} does not come back bit for bit")
    if comparison.first_differing or comparison.masks != DEFAULT_MASKS:
        print(comparison)
        return False
    return not changed


def _with_progress(tensors: dict, record: Record, minutes: float) -> Suggestion:
    """Search, and show how many places agree."""
    from rich.console import Console

    with Console(stderr=True).status("searching") as line:

        def show(agreed: int, places: int, passes: int) -> None:
            line.update(f"{agreed} of {places} places agree, {passes:,} forward passes")

        return suggest_layout(tensors, record, show, minutes=minutes)
