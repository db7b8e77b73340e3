"""The public face is documented without a gap: shapes, errors and the source of the mathematics."""

import dataclasses
import inspect
import re

import flax.linen
import pytest

import jax_transformer
from jax_transformer import adapters, convert, parity, porting

PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (jax_transformer, adapters, convert, parity, porting)
    for name in module.__all__
    if name not in ("weight_files", "TRAINERS", "identity", "transpose", "lora")  # no functions
}
FUNCTIONS = {name: value for name, value in PUBLIC.items() if inspect.isfunction(value)}
RECORDS = {
    name: value
    for name, value in PUBLIC.items()
    if dataclasses.is_dataclass(value) or hasattr(value, "_fields")
}
NEVER_RAISE = {  # they take nothing that could be wrong
    "jax_transformer.convert.layouts",
    "jax_transformer.porting.layouts",
    "jax_transformer.porting.layouts_of",
    "jax_transformer.porting.program",
}
# What computes a formula names the section or the paper that the formula is from.
MATHEMATICS = "TransformerConfig Transformer apply encode decode generate cross_entropy"
SOURCE = re.compile(r"section \d|figure \d|et al\. \d{4}|\(\w+ \d{4}\)")
AXES = re.compile(r"(Int|Float|Bool|Shaped|Integer)[\d]*\[[\w., ]+, '[^']*[A-Za-z][^']*'\]")


def words(value):
    return inspect.cleandoc(value.__doc__ or "")


def section(text, name):
    """Return a section of a docstring, or nothing where it has none."""
    found = re.search(rf"^{name}:\n((?:    .*\n?|\n)+)", text, re.MULTILINE)
    return found.group(1) if found else ""


def is_array(annotation):
    """Whether a type has arrays with axes: neither scalars nor random keys have any."""
    return bool(AXES.search(str(annotation)))


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_begins_with_a_sentence(name):
    first = words(PUBLIC[name]).partition("\n\n")[0]
    assert first.endswith((".", ":")), first


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_says_what_it_returns_and_raises(name):
    text = words(FUNCTIONS[name])
    annotation = inspect.signature(FUNCTIONS[name]).return_annotation
    if annotation not in (None, "None"):
        assert section(text, "Returns") or re.match("Return|Load|Read|Run|Write", text)
    assert bool(section(text, "Raises")) != (name in NEVER_RAISE)
    if is_array(annotation):
        assert re.search(r"\[[\w, ()+]+\]", text.partition("Args:")[0] + section(text, "Returns"))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_array_that_a_function_takes_has_its_shape(name):
    """Where the docstring names an argument, that it has the axes is seen here."""
    arguments = section(words(FUNCTIONS[name]), "Args")
    for parameter in inspect.signature(FUNCTIONS[name]).parameters.values():
        if not is_array(parameter.annotation):
            continue
        entry = re.search(
            rf"^    {parameter.name}: ((?:.|\n(?!    \w+: ))*)", arguments, re.MULTILINE
        )
        assert entry, parameter
        assert re.search(r"\[[\w, ]+\]", entry.group(1)), parameter


def fields_of(record):
    """Return the names of a record's own fields; those of a base class are described there."""
    if hasattr(record, "_fields"):
        return [*record._fields]
    inherited = ("parent", "name") if issubclass(record, flax.linen.Module) else ()
    return [
        field.name
        for field in dataclasses.fields(record)
        if not field.name.startswith("_") and field.name in record.__annotations__
        if field.name not in inherited
    ]


def described(record):
    """Return the names of the fields that a record describes."""
    attributes = section(words(record), "Attributes")
    return re.findall(r"^    (\w+): ", attributes, re.MULTILINE)


@pytest.mark.parametrize("name", RECORDS)
def test_every_field_of_a_record_is_described(name):
    assert described(RECORDS[name]) == fields_of(RECORDS[name])


def test_what_computes_a_formula_names_its_source():
    for name in MATHEMATICS.split():
        assert SOURCE.search(words(getattr(jax_transformer, name))), name
