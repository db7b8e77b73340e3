"""The command line of declared arguments: flags, their help and their values.

The arguments of a command are a frozen dataclass. A field without a default is positional, every
other one is a flag. A field that is a dataclass itself is a group of flags.
"""

import argparse
import dataclasses
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from jax_transformer.config.declared import checked, declarations, meant
from jax_transformer.errors import InputError, shorten

REQUIRED = dataclasses.MISSING


class Parser(argparse.ArgumentParser):
    """A parser that refuses a wrong argument in one line, and keeps values as text.

    The results have only the values that are named. If `shown` is not None, it has the names of
    the flags that the parser knows: it shows a help, and parses nothing. A help that is short has
    the first clause about each flag.
    """

    def __init__(
        self,
        command: str,
        description: str,
        positional: Sequence[str] = (),
        shown: Collection[str] | None = None,
        is_short: bool = False,
    ) -> None:
        super().__init__(
            f"jax-transformer {command}",
            " ".join(["%(prog)s", *map(str.upper, positional), "[--ARGUMENT VALUE ...]"]),
            description,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            add_help=False,
        )
        self.positional, self.shown, self.is_short = positional, shown, is_short
        self.heading: Any = self  # the part of the help under which the next flags stand
        self.add_argument("-h", "--help", action="store_true", help="show this help and exit")
        others = argparse.SUPPRESS if shown is None else "show all arguments and exit"
        self.add_argument("--help-all", action="store_true", help=others)

    def add(self, name: str, declared: Any, help_text: str, default: Any, *short: str) -> None:
        """Add a positional argument, or the flag of a value, under the last heading."""
        if self.shown is not None and name not in (*self.shown, *self.positional):
            return
        default = " ".join(map(str, default)) if isinstance(default, tuple) else default
        # Without a default, the help says what happens.
        has_none = any(default is absent for absent in (REQUIRED, None, False)) or default == ""
        shown = "" if has_none else f" (default: {'yes' if default is True else default})"
        if self.is_short:
            help_text = re.split(r"[.;:] ", help_text)[0].removesuffix(".")
        help_text = f"{help_text}{shown}".replace("%", "%%")
        flags = [f"--{form.replace('_', '-')}" for form in (*short, name)]
        if name in self.positional:
            several = "+" if _list_depth(declared) else None
            self.add_argument(name, metavar=name.upper(), nargs=several, help=help_text)
        elif declared is bool:
            action = "store_true" if self.is_short else argparse.BooleanOptionalAction
            self.heading.add_argument(*flags, action=action, help=help_text)
        else:
            kinds = (declared, *get_args(declared))
            choices = [
                word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)
            ]
            choices += ["True", "False"] if choices and bool in kinds else []
            depth = _list_depth(declared)
            self.heading.add_argument(
                *flags,
                dest=name,
                metavar=f"{{{','.join(choices)}}}" if choices else _kind(declared),
                type=(lambda word: word.split(",")) if depth > 1 else str,
                nargs="*" if depth else None,
                help=help_text,
            )

    def parse(self, argv: Sequence[str]) -> dict[str, Any]:
        """Return the values that are named, as text."""
        # A flag has hyphens for underscores; a value stays as it is.
        flags = [re.sub("^--[^=]*", lambda f: f[0].replace("_", "-"), word) for word in argv]
        values, unknown = self.parse_known_args(flags)
        if unknown:
            flag = unknown[0].partition("=")[0]
            known = {each[2:].replace("-", "_"): each for each in self._option_string_actions}
            near = meant(flag[2:].replace("-", "_"), known)
            hint = f"did you mean {known[near]}?" if near else f"see {self.prog} --help"
            raise InputError(f"{shorten(unknown[0])} is not an argument of {self.prog}; {hint}")
        return vars(values)

    def error(self, message: str) -> None:
        """Refuse the arguments in one line."""
        raise InputError(f"{message}; see {self.prog} --help")


def parse(command: Callable[[Any], None], argv: Sequence[str]) -> Any:
    """Return the declared arguments of a command, as a command line names them.

    With --help, what they mean is shown, and the program ends: those alone that the attribute
    `USUAL` of the dataclass names, if it has one; with --help-all, all of them. A field with the
    metadata "options", a declared dataclass, is a mapping of those of its fields that are named;
    the metadata "short" has shorter names of its flags.

    Args:
        command: A function whose one argument is a declared dataclass.

    Raises:
        InputError: An argument is unknown or missing, or a value is out of range.
    """
    settings = next(iter(inspect.get_annotations(command, eval_str=True).values()))
    text, helps = described(settings)
    fields, types = dataclasses.fields(settings), declarations(settings)
    unnamed = (each for each in fields if each.default is each.default_factory is REQUIRED)
    asks = {"-h", "--help", "--help-all"} & set(argv)
    usual = getattr(settings, "USUAL", None) if asks and "--help-all" not in asks else None
    parser = Parser(command.__name__, text, [each.name for each in unnamed], usual)
    parts: dict[str, type] = {}
    for each in fields:
        part = each.metadata.get("options") or types[each.name]
        if not dataclasses.is_dataclass(part):
            parser.add(each.name, types[each.name], helps[each.name], each.default)
            continue
        parts[each.name], types = part, types | declarations(part)
        parser.heading = parser.add_argument_group(each.name)
        part_helps, short = described(part)[1], each.metadata.get("short", {})
        for option in dataclasses.fields(part):
            # An option that is not named is left to the model.
            default = REQUIRED if "options" in each.metadata else option.default
            forms, text = short.get(option.name, ()), part_helps[option.name]
            parser.add(option.name, types[option.name], text, default, *forms)
    if asks:
        parser.print_help()
        parser.exit()
    named = {
        name: checked(name, value, types[name], text=True)
        for name, value in parser.parse(argv).items()
    }
    for name, part in parts.items():
        values = {option: named.pop(option) for option in declarations(part) if option in named}
        if get_origin(types[name]) is Mapping:
            named[name] = {key: value for key, value in values.items() if value is not None}
        else:
            named[name] = part(**values)
    return settings(**named)


def described(documented: type) -> tuple[str, dict[str, str]]:
    """Return the text of a docstring, and that of each attribute, inherited ones too, by name.

    What an attribute says of None, the help says of a flag that is left out.
    """
    helps: dict[str, str] = {}
    for part in reversed(documented.__mro__):
        text, _, listed = inspect.cleandoc(part.__doc__ or "").partition("\n\nAttributes:\n")
        entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", listed, re.MULTILINE)
        helps |= {
            name: re.sub("None (is|means)", "by default", " ".join(help_text.split()))
            for name, help_text in entries
        }
    return text, helps


def _kind(declared: Any) -> str:
    """Return what stands for a value in the help: N for a number, FILE for a path, else TEXT."""
    for kind, word in ((Path, "FILE"), (int, "N"), (float, "N")):
        if declared is kind:
            return word
    kinds = [_kind(part) for part in get_args(declared) if isinstance(part, type) or get_args(part)]
    return next((word for word in kinds if word != "TEXT"), "TEXT")


def _list_depth(declared: Any) -> int:
    """Return how many lists a declared type nests: 0 for a number, 2 for a list of lists."""
    inner = max(map(_list_depth, get_args(declared)), default=0)
    return inner + (get_origin(declared) is tuple)
