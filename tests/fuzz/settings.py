"""Gives hostile settings: YAML files and flags of `train`, flags of the other commands."""

import dataclasses
import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from jax_transformer.commands.budget import budget
from jax_transformer.commands.convert import convert
from jax_transformer.commands.train_arguments import PARTS, named_settings
from jax_transformer.commands.translate import translate
from jax_transformer.config.declared import declarations
from jax_transformer.runs.arguments import WHEN_RESUMED, Arguments
from jax_transformer.storage.yaml_file import to_yaml
from tests.fuzz import stock
from tests.fuzz.mutations import PLACE_CHANGES, RAW, VALUES, Draw, changed_bytes
from tests.fuzz.outcomes import OTHER, Attempt, Fault, command

LINES = b"one hundred and two\n\nseven\n"
LEFT_OUT = ("compile", "alignments", *PARTS)  # take minutes, draw pictures, or are no flags
FLAG_VALUES = (
    *("0", "1", "2", "-1", "3", "10000000", "9223372036854775808", "1000000000000", "-1e6"),
    *("1" * 40, "9" * 5000, "nan", "inf", "-inf", "1e308", "1e-320", "0.5", "1e999", "0x10"),
    *("1_000", "", " ", "None", "null", "true", "x", "é", "\udcff", "a\nb", "[]", "{}", "data=-1"),
    *("data=0", "data=2,data=2", "fsdp=9999999999", "=", "data=1" * 50, "torch_nn", "marian"),
    *("x" * 5000, "/dev/zero", "/dev/null", "/dev/full", "/", "nothing/here", "layout.toml"),
    *("n" * 300, "float16", "bfloat16", "float32", "cut", "refuse", "5GB", "0KB", "-5GB", "1e9TB"),
)
NINE = [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9) if i else 'x'}]\n" for i in range(10)]
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
    "".join(NINE),
)
HOW = ("fields", "fields", "odd", "more", "bytes", "place", "flags", "flags")
FIELD_VALUES = st.sampled_from([v for v in VALUES if not str(v).startswith((RAW, "\ud800"))])
FIELD_VALUES |= st.sampled_from((0, -1, 4, 10**7, 10**12, 10**23, 0.5, -0.5, 1e308))


def check_accepted(argv: list[str], folder: Path) -> None:
    """Check that accepted settings are finite, and the same when settings.yaml is read."""
    arguments = named_settings(argv).arguments()
    for part in (vars(arguments), vars(arguments.training), arguments.model):
        for name, value in part.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise Fault(f"{name}={value} is accepted")
    path = folder / "again.yaml"
    path.write_text(to_yaml(arguments.to_mapping()), "utf-8")
    again = named_settings((f"--config={path}",)).arguments()
    unwritten = (name for name, when in WHEN_RESUMED.items() if when == "unwritten")
    ignored = {name: getattr(Arguments(), name) for name in unwritten}
    if dataclasses.replace(arguments, **ignored) != dataclasses.replace(again, **ignored):
        raise Fault(f"settings.yaml gives {again}, not {arguments}")


@st.composite
def flags(draw: Draw, names: list[str]) -> list[str]:
    """One or two flags with hostile values, or without one."""
    given = []
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.sampled_from([name for name in names if name not in LEFT_OUT]))
        flag, value = f"--{name.replace('_', '-')}", draw(st.sampled_from(FLAG_VALUES))
        given += draw(st.sampled_from(([f"{flag}={value}"], [flag, value], [flag])))
    return given


def _training(draw: Draw, folder: Path, stock_folder: Path) -> Attempt:
    """Return `prepare --dry-run`, which checks what `train` checks before its first step."""
    text = stock.stocked(stock_folder, "text", stock.text)
    sides = {side: [str(text / f"{side}.txt")] for side in ("source", "target")}
    settings: dict[str, Any] = {**sides, "vocab_size": 60, "valid_pairs": 5}
    settings |= {"prepared": str(folder / "prepared"), "model": stock.SIZES, "training": {}}
    path, how = folder / "settings.yaml", draw(st.sampled_from(HOW))
    parts = {"run": Arguments, **PARTS}
    for _ in range(draw(st.integers(1, 2)) if how == "fields" else 0):
        part = draw(st.sampled_from(list(parts)))
        name = draw(st.sampled_from([field.name for field in dataclasses.fields(parts[part])]))
        value = draw(FIELD_VALUES)
        if part in PARTS and isinstance(settings[part], dict):
            name, value = part, settings[part] | {name: value}
        settings[name] = value
    content = yaml.safe_dump(settings, sort_keys=False).encode()
    odd = draw(st.sampled_from(ODD)).encode("utf-8", "surrogateescape")
    written = {"odd": odd, "more": content + odd, "bytes": draw(changed_bytes(content))}
    path.write_bytes(written.get(how, content))
    if how == "place":
        PLACE_CHANGES[draw(st.sampled_from(list(PLACE_CHANGES)))](path)
    argv = [f"--config={path}"]
    if how == "flags":
        names = [field.name for part in parts.values() for field in dataclasses.fields(part)]
        argv += draw(flags(names))

    def run() -> str:
        command(["prepare", "--dry-run", *argv])
        check_accepted(argv, folder)
        return OTHER

    return run, (path,)


def flag_names(called: Callable[[Any], None]) -> list[str]:
    """Return the names of the flags of a command, without dashes."""
    settings, names = next(iter(inspect.get_annotations(called, eval_str=True).values())), []
    types = declarations(settings)
    for each in dataclasses.fields(settings):
        part = each.metadata.get("options") or types[each.name]
        is_part = dataclasses.is_dataclass(part)
        names += [field.name for field in dataclasses.fields(part)] if is_part else [each.name]
    return names


def _other(draw: Draw, folder: Path, stock_folder: Path) -> Attempt:
    """Return an attempt on the flags of `translate`, `convert` or `budget`."""
    called = draw(st.sampled_from((translate, convert, budget)))
    name, given = called.__name__, draw(flags(flag_names(called)))
    model = stock.stocked(stock_folder, "own model", stock.own_folder)
    positional = {"translate": [str(model)], "budget": []}
    positional["convert"] = [str(model), str(folder / "model.safetensors")]

    def run() -> str:
        printed = command([name, *positional[name], *given], LINES)
        more = ("--output", "--nbest", "--num-hypotheses", "--input")
        plain = name == "translate" and not any(flag.startswith(more) for flag in given)
        if plain and printed.count(b"\n") != LINES.count(b"\n"):
            raise Fault(f"{printed!r} for three lines")
        return OTHER

    return run, (folder, model)


def prepare(draw: Draw, folder: Path, stock_folder: Path) -> Attempt:
    """Return an attempt on settings."""
    return draw(st.sampled_from((_training, _training, _other)))(draw, folder, stock_folder)
