"""Tries that give settings: YAML files and flags of `train`, flags of the other commands."""

import contextlib
import io
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.attack import stock
from benchmarks.attack.mutations import PLACE_CHANGES, RAW, VALUES, choose, mutate_bytes
from benchmarks.attack.outcomes import Attempt, Outcome, WrongResult, call_program, command
from jax_transformer.commands.main import check_arguments, run_command
from jax_transformer.commands.train import check_values, new_arguments
from jax_transformer.commands.train_arguments import (
    OF_ONE_START,
    PARTS,
    Arguments,
    named_settings,
)
from jax_transformer.runtime.sharding import make_mesh
from jax_transformer.storage.yaml_file import to_yaml

LINES = b"one hundred and two\n\nseven\n"
LEFT_OUT = ("help", "compile", "alignments")  # take minutes, or draw pictures
FLAG_VALUES = (
    *("0", "1", "2", "-1", "3", "10000000", "9223372036854775808", "1000000000000", "-1e6"),
    *("1" * 40, "9" * 5000, "nan", "inf", "-inf", "1e308", "1e-320", "0.5", "1e999", "0x10"),
    "1_000",
    *("", " ", "None", "null", "true", "x", "é", "\udcff", "a\nb", "[]", "{}", "data=-1", "data=0"),
    *("data=2,data=2", "fsdp=9999999999", "=", "data=1" * 50, "torch_nn", "marian", "x" * 5000),
    *("/dev/zero", "/dev/null", "/dev/full", "/", "nothing/here", "layout.toml", "n" * 300),
    *("float16", "bfloat16", "float32", "cut", "refuse", "5GB", "0KB", "-5GB", "1e9TB", "base"),
)
ODD = (
    *("", "[]", "null", "x", "3", "- a", "a: b: c", "\t", "%", "---\n---\n", "? a", "{a: 1, a: 2}"),
    *("training: []", "training: 3", "model: x", "preset: []", "preset: {}", "preset: 3"),
    *("steps: 2001-99-99", "training: {steps: 2001-99-99}", "training: {steps: 2001-01-01}"),
    *("training: {steps: 1e3}", "training: {steps: 0x10}", "training: {steps: 1:30}"),
    *("training: {steps: 100, steps: 200}", "training: !!python/object:os.system {}", "&a [*a]"),
    *("model: &a {d_model: *a}", "<<: 3", "<<: {vocab_size: 70}", "!!binary x", "!!set {a, b}"),
    *("1: 2", "null: 3", "[1, 2]: 3", "{a: b}: c", "? [x]\n: y", "source: [[[[a]]]]", "\0"),
    *("[" * 5000, "{a: " * 3000, "a: &b [x]\nc: [" + "*b," * 50 + "]", "x: '" + "y" * 10**6),
    *("training: {freeze: '('}", "training: {freeze: ['(']}", "training: {freeze: ['(a+)+$']}"),
    "a: &a [x,x,x,x,x,x,x,x,x]\n"
    + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [{','.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(9)
    ),
)


def start(argv: Sequence[str]) -> Arguments:
    """Do what `train` does before it reads any text; return the arguments."""
    check_arguments(argv)
    named = named_settings(argv)
    arguments, begin = new_arguments(named, named.arguments())
    check_values(arguments, begin)
    make_mesh(arguments.mesh)
    return arguments


def check_accepted(arguments: Arguments, folder: Path) -> None:
    """Check that accepted arguments are finite, and the same when settings.yaml is read.

    Raises:
        WrongResult: They are not.
    """
    for part in (vars(arguments), vars(arguments.training), arguments.model):
        for name, value in part.items():
            for number in value if isinstance(value, tuple) else (value,):
                if isinstance(number, float) and not math.isfinite(number):
                    raise WrongResult(f"{name}={number} is accepted")
    default = Arguments()
    path = folder / "again.yaml"
    path.write_text(to_yaml(arguments.to_mapping()), "utf-8")
    again = named_settings((f"--config={path}",)).arguments()
    ignored = {name: getattr(default, name) for name in OF_ONE_START}
    one, other = (dataclasses.replace(given, **ignored) for given in (arguments, again))
    if one != other:
        differing = [name for name in vars(one) if getattr(one, name) != getattr(other, name)]
        raise WrongResult(f"settings.yaml gives another {', '.join(differing)}")


def base(text: Path, folder: Path) -> dict[str, Any]:
    """Return settings of a tiny run on a text."""
    return {
        "source": [str(text / "source.txt")],
        "target": [str(text / "target.txt")],
        "vocab_size": 60,
        "valid_pairs": 5,
        "prepared": str(folder / "prepared"),
        "model": dict(stock.SIZES),
        "training": {"steps": 10, "warmup_steps": 3},
    }


def prepare(draw: np.random.Generator, folder: Path, stock_folder: Path, quick: bool) -> Attempt:
    """Return a try on settings; arguments as for the files."""
    text = stock.stocked(stock_folder, "text", stock.text)
    (folder / "output").mkdir()
    makers = [_yaml, _yaml, _odd_yaml, _flags, _flags, _budget, _other]
    if not quick:
        makers.append(_prepared)
    return choose(draw, makers)(draw, folder, text, stock_folder)


def _train(argv: list[str], folder: Path, what: str) -> Attempt:
    def run() -> Outcome:
        found: list[Arguments] = []
        call_program(lambda: found.append(start(argv)))
        check_accepted(found[0], folder)
        return Outcome.OTHER

    return Attempt(what, run, (folder,))


def _yaml(draw: np.random.Generator, folder: Path, text: Path, _: Path) -> Attempt:
    settings = base(text, folder)
    done = []
    for _ in range(int(choose(draw, (1, 1, 2)))):
        settings, what = _with_change(draw, settings)
        done.append(what)
    path = _write(folder, yaml.safe_dump(settings, sort_keys=False).encode())
    return _train([f"--config={path}"], folder, f"train --config; {', '.join(done)}")


def _with_change(draw: np.random.Generator, settings: dict[str, Any]) -> tuple[dict, str]:
    """Return settings with one field of the run, the model or the training set to a value."""
    part = choose(draw, ("run", "model", "training", "training"))
    fields = {"run": Arguments, **PARTS}[part]
    name = choose(draw, [field.name for field in dataclasses.fields(fields)])
    value = choose(draw, [value for value in VALUES if not str(value).startswith(RAW)])
    if isinstance(value, str):
        value = value.encode("utf-8", "replace").decode()
    if draw.random() < 0.4:  # of a type that the field may have
        value = choose(draw, (0, -1, 10**7, 10**12, 10**23, 0.5, -0.5, 1e308, float("nan")))
    if part == "run":
        settings = settings | {name: value}
    else:
        before = settings[part] if isinstance(settings[part], dict) else {}
        settings = settings | {part: before | {name: value}}
    return settings, f"{part}: {name}={value!r:.40}"


def _odd_yaml(draw: np.random.Generator, folder: Path, text: Path, _: Path) -> Attempt:
    settings = yaml.safe_dump(base(text, folder), sort_keys=False)
    how = draw.random()
    if how < 0.5:
        odd = choose(draw, ODD)
        path = _write(folder, odd.encode("utf-8", "surrogateescape"))
        what = f"{odd!r:.60}"
    elif how < 0.7:
        odd = choose(draw, ODD)
        path = _write(folder, f"{settings}{odd}".encode("utf-8", "surrogateescape"))
        what = f"settings, then {odd!r:.60}"
    elif how < 0.85:
        data, what = mutate_bytes(draw, settings.encode())
        path = _write(folder, data)
    else:
        path = _write(folder, settings.encode())
        what = choose(draw, list(PLACE_CHANGES))
        PLACE_CHANGES[what](path)
    return _train([f"--config={path}"], folder, f"train --config; {what}")


def _flags(draw: np.random.Generator, folder: Path, text: Path, _: Path) -> Attempt:
    settings = base(text, folder)
    argv = [f"--{name.replace('_', '-')}={settings[name]}" for name in ("vocab_size", "prepared")]
    argv += ["--source", settings["source"][0], "--target", settings["target"][0]]
    changed = []
    for _ in range(int(choose(draw, (1, 1, 2)))):
        part = choose(draw, (Arguments, *PARTS.values()))
        names = [field.name for field in dataclasses.fields(part)]
        name = choose(draw, [name for name in names if name not in PARTS])
        value = choose(draw, FLAG_VALUES)
        flag = name.replace("_", "-")
        changed += choose(draw, ([f"--{flag}={value}"], [f"--{flag}", value], [f"--{flag}"]))
    return _train([*argv, *changed], folder, f"train; {' '.join(changed)!r:.150}")


def _prepared(draw: np.random.Generator, folder: Path, text: Path, _: Path) -> Attempt:
    """Return `prepare --dry-run`, which also reads the text and trains a tokenizer."""
    settings, what = _with_change(draw, base(text, folder))
    path = _write(folder, yaml.safe_dump(settings, sort_keys=False).encode())

    def run() -> Outcome:
        command(["prepare", "--dry-run", f"--config={path}"])
        return Outcome.OTHER

    return Attempt(f"prepare --dry-run; {what}", run, (path, folder / "output"))


def _command_flags(draw: np.random.Generator, name: str) -> list[str]:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        run_command(name, "--help")
    flags = sorted({*re.findall(r"--([a-z][\w-]*)", shown.getvalue())})
    flags = [flag for flag in flags if flag not in LEFT_OUT]
    given = []
    for _ in range(int(choose(draw, (1, 1, 2)))):
        flag = choose(draw, flags).replace("_", "-")
        value = choose(draw, FLAG_VALUES)
        given += choose(draw, ([f"--{flag}={value}"], [f"--{flag}={value}"], [f"--{flag}"]))
    return given


def _budget(draw: np.random.Generator, folder: Path, *_: Path) -> Attempt:
    given = _command_flags(draw, "budget")

    def run() -> Outcome:
        command(["budget", *given])
        return Outcome.OTHER

    return Attempt(f"budget; {' '.join(given)!r:.150}", run, (folder,))


def _other(draw: np.random.Generator, folder: Path, _: Path, stock_folder: Path) -> Attempt:
    name = choose(draw, ("translate", "convert"))
    given = _command_flags(draw, name)
    model = stock.stocked(stock_folder, "own-model", stock.own_folder)
    target = folder / "output" / "model.safetensors"
    positional = [str(model)] if name == "translate" else [str(model), str(target)]
    os.chdir(folder / "output")

    def run() -> Outcome:
        printed = command([name, *positional, *given], LINES)
        plain = not any(
            flag.startswith(("--output", "--nbest", "--num-hypotheses", "--input"))
            for flag in given
        )
        if name == "translate" and plain and len(printed.splitlines()) != LINES.count(b"\n"):
            raise WrongResult(f"{len(printed.splitlines())} lines of output")
        return Outcome.OTHER

    return Attempt(f"{name}; {' '.join(given)!r:.150}", run, (folder, model))


def _write(folder: Path, content: bytes) -> Path:
    path = folder / "settings.yaml"
    path.write_bytes(content)
    return path
