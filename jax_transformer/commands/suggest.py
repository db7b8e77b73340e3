"""`jax-transformer suggest`: the config and the layout of weights that nobody described."""

import dataclasses
import sys
from pathlib import Path

from jax_transformer.convert import write_layout
from jax_transformer.errors import InputError, check_installed
from jax_transformer.porting.recording import program, read_recording
from jax_transformer.porting.suggestion import described
from jax_transformer.porting.suggestion import suggest as read_program
from jax_transformer.storage import weights as files
from jax_transformer.storage.weights.checks import check_target

RECORDED = "recorded.pt"  # written by the program that is printed


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Read what an unknown program computes; write the config and the layout of its weights.

    Without --against, the names and shapes of the weights are shown, and a program is printed that
    records some runs of yours. With its file, the operations of these runs are read, and the model
    in JAX is compared with them on fresh ids before a layout is written. The exit code is 1 where
    something of the program is in no config: each is named by its operation, module and line.

    Attributes:
        weights: A whole encoder-decoder: a .safetensors, .pt, .pth, .bin or .ckpt file, or a folder
            with shards and their index.
        against: What your program computed: the file that the printed program writes.
        output: TOML file to write, for --layout of convert and verify.
        overwrite: Replace an existing output.
        other_masks: Write the layout also where your program differs by nothing but masks that no
            config has: give the model your own in JAX.
        key: The entry of a checkpoint that holds the weights. Without it, model,
            model_state_dict, state_dict and ema are tried.
        drop: Names of tensors to leave out, for example criterion.weight "extra_head.*".
    """

    weights: Path
    against: Path | None = None
    output: Path = Path("layout.toml")
    overwrite: bool = False
    other_masks: bool = False
    key: str | None = None
    drop: tuple[str, ...] = ()


def suggest(arguments: Arguments) -> None:
    """Write the layout of a recorded program; leave with code 1 where no config expresses it."""
    output, against = arguments.output, arguments.against
    if against is None:
        tensors = files.read_trained(arguments.weights, key=arguments.key, drop=arguments.drop)
        print(described(tensors))
        print(f"\nRun this in your program; then: suggest ... --against {RECORDED}\n\n{program()}")
        return
    check_installed("torch")
    check_target(output, arguments.overwrite)
    if output.suffix != ".toml":
        raise InputError(f"--output {output} must be a .toml file")
    recording = read_recording(against)
    tensors = files.read_trained(arguments.weights, key=arguments.key, drop=arguments.drop)
    found = read_program(tensors, recording)
    print(found)
    if not found.fits and not (arguments.other_masks and found.only_masks):
        more = "; --other-masks writes it" if found.only_masks else ""
        print(f"{output} is not written{more}")
        sys.exit(1)
    write_layout(
        output,
        found.layout,
        found.config,
        overwrite=arguments.overwrite,
        comment="\n".join(found.refused),
    )
    print(f"{output} written; no weights tell bos_id and eos_id: set them there")
