"""The front door of the command line: `jax-transformer COMMAND ...`."""

import importlib
import os
import sys

from jax_transformer.errors import InputError

# The module beside this one that has the command's name also has its function. Only the module of
# the chosen command is imported.
COMMANDS = {
    "translate": "translate the lines of standard input",
    "average": "write the mean of a run's last checkpoints as a model",
    "convert": "read weights in one layout and write them in another",
    "verify": "run JAX and PyTorch on the same weights and compare every block",
    "budget": "print the memory, FLOPs and time that training a model takes",
}


def main() -> None:
    """Run a command; an input error is one line on standard error and exit code 1."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return
    try:
        run_command(*arguments)
        sys.stdout.flush()  # here, and not at exit, a reader that has left can be dealt with
    except InputError as error:
        sys.exit(f"error: {error}")
    except BrokenPipeError:  # the reader has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def run_command(name: str, *arguments: str) -> None:
    """Import the command's module and call its function with the parsed arguments.

    Args:
        name: One of `COMMANDS`.
        *arguments: What follows it on the command line.

    Raises:
        InputError: The command is unknown.
    """
    if name not in COMMANDS:
        raise InputError(f"command {name!r} is unknown; choose one of {', '.join(COMMANDS)}")
    import tyro

    command = getattr(importlib.import_module(f"jax_transformer.commands.{name}"), name)
    tyro.cli(
        command,
        prog=f"jax-transformer {name}",
        args=arguments,
        config=(tyro.conf.FlagCreatePairsOff,),
    )


def usage() -> str:
    """Return what `jax-transformer --help` prints."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items()]
    return "\n".join(
        [
            "usage: jax-transformer COMMAND ...",
            "",
            *lines,
            "",
            "jax-transformer COMMAND --help shows the arguments of a command.",
        ]
    )


if __name__ == "__main__":
    main()
