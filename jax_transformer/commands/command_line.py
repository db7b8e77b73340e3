"""The command line of a function, or of declared settings: flags, their help and their values."""

import argparse
import difflib
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args, get_origin

from jax_transformer.config.declared import checked
from jax_transformer.errors import InputError, shorten

REQUIRED = inspect.Parameter.empty


class Parser(argparse.ArgumentParser):
    """A parser of which a wrong argument is one line, and that keeps values as text.

    A value that is not named is not among the results.
    """

    def __init__(self, command: str, description: str, positional: Sequence[str] = ()) -> None:
        super().__init__(
            f"jax-transformer {command}",
            " ".join(["%(prog)s", *map(str.upper, positional), "[--ARGUMENT VALUE ...]"]),
            description,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            add_help=False,
        )
        self.positional = positional
        self.heading: Any = self  # of the help, under which the next flags stand
        self.add_argument("-h", "--help", action="store_true", help="show this help and exit")

    def add(self, name: str, declared: Any, help_text: str, default: Any, *short: str) -> None:
        """Add a positional argument, or the flag of a value, under the last heading."""
        help_text = help_text if default is REQUIRED else f"{help_text} (default: {default})"
        words: dict[str, Any] = {"help": help_text.replace("%", "%%")}
        flags = [f"--{form.replace('_', '-')}" for form in (*short, name)]
        if name in self.positional:
            self.add_argument(name, metavar=name.upper(), **words)
        elif declared is bool:
            self.heading.add_argument(*flags, action=argparse.BooleanOptionalAction, **words)
        else:
            kinds = (declared, *get_args(declared))
            choices = [
                word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)
            ]
            choices += ["True", "False"] if choices and bool in kinds else []
            words["metavar"] = f"{{{','.join(choices)}}}" if choices else name.upper()
            depth = _list_depth(declared)
            words["type"] = (lambda word: word.split(",")) if depth > 1 else str
            self.heading.add_argument(*flags, dest=name, nargs="*" if depth else None, **words)

    def parse(self, argv: Sequence[str]) -> dict[str, Any]:
        """Return the values that are named, as text."""
        flags = [_hyphens(argument) for argument in argv]
        values, unknown = self.parse_known_args(flags)
        if unknown:
            flag = unknown[0].partition("=")[0]
            near = difflib.get_close_matches(flag, self._option_string_actions, n=1)
            hint = f"did you mean {near[0]}?" if near else f"see {self.prog} --help"
            raise InputError(f"{shorten(unknown[0])} is not an argument of {self.prog}; {hint}")
        return vars(values)

    def error(self, message: str) -> None:
        """Refuse the arguments in one line."""
        raise InputError(f"{message}; see {self.prog} --help")


def call(command: Callable[..., None], argv: Sequence[str]) -> None:
    """Call a function with a command line; arguments without a default are positional."""
    text, helps = described(command)
    hints = inspect.get_annotations(command, eval_str=True)
    parameters = inspect.signature(command).parameters
    positional = [name for name in parameters if parameters[name].default is REQUIRED]
    parser = Parser(command.__name__, text, positional)
    for name, parameter in parameters.items():
        parser.add(name, hints[name], helps[name], parameter.default)
    if {"-h", "--help"} & set(argv):
        show_help(parser)
    values = {
        name: checked(name, value, hints[name], text=True)
        for name, value in parser.parse(argv).items()
    }
    places = [values.pop(name) for name in positional]
    command(*places, **values)


def show_help(parser: Parser) -> None:
    """Print what the arguments mean, and exit."""
    parser.print_help()
    sys.exit(0)


def described(documented: Any) -> tuple[str, dict[str, str]]:
    """Return the text of a docstring, and that of each argument or attribute by name."""
    text, _, listed = re.split(r"(\n\nArgs:|\n\nAttributes:)", inspect.getdoc(documented) or "")
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", listed, re.MULTILINE)
    return text, {name: " ".join(help_text.split()) for name, help_text in entries}


def _list_depth(declared: Any) -> int:
    """Return how many lists a declared type nests: 0 for a number, 2 for a list of lists."""
    inner = max(map(_list_depth, get_args(declared)), default=0)
    return inner + (get_origin(declared) is tuple)


def _hyphens(argument: str) -> str:
    """Return a flag with hyphens for underscores; a value stays as it is."""
    if not argument.startswith("--"):
        return argument
    name, sign, value = argument.partition("=")
    return f"{name.replace('_', '-')}{sign}{value}"
