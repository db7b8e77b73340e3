"""The reference: what a page uses has an entry there, and an entry says what each argument is."""

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
from pathlib import Path

import pytest

from docs.generated import PAIRS
from tests.test_docstrings import described, fields_of, section, words

ROOT = Path(__file__).parents[1]
REFERENCE = sorted((ROOT / "docs" / "reference").glob("*.md"))
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *ROOT.glob("docs/tutorials/*.py")]
TEXT = "".join(page.read_text("utf-8") for page in REFERENCE)


def resolve(path):
    """Return what a dotted name is; a module wins over a name in its package, as on the site."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise AssertionError(path)


ENTRIES = {path: resolve(path) for path in re.findall(r"^::: ([\w.]+)$", TEXT, re.MULTILINE)}
FUNCTIONS = {path: value for path, value in ENTRIES.items() if inspect.isfunction(value)}
RECORDS = {
    path: value
    for path, value in ENTRIES.items()
    if inspect.isclass(value) and (dataclasses.is_dataclass(value) or hasattr(value, "_fields"))
}
ROWS = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (.*?) \|", TEXT, re.MULTILINE))))


def test_no_entry_is_a_module_and_none_stands_twice():
    assert len(FUNCTIONS) > 30
    assert [path for path, value in ENTRIES.items() if inspect.ismodule(value)] == []
    headings = re.findall(r"^::: (?:[\w.]+\.)?(\w+)\n((?:    .*\n)+)", TEXT, re.MULTILINE)
    shown = [(re.findall("heading: (.*)", options) or [name])[0] for name, options in headings]
    assert len(shown) == len(ENTRIES) == len(set(shown))


@pytest.mark.parametrize("path", FUNCTIONS)
def test_an_entry_says_what_each_argument_is(path):
    text = words(FUNCTIONS[path])
    described = re.findall(r"^    \*{0,2}(\w+): ", section(text, "Args"), re.MULTILINE)
    described += re.findall(r"`(\w+)`", text.partition("\n\nRaises:")[0])
    assert {*inspect.signature(FUNCTIONS[path]).parameters} - {"self", *described} == set()


@pytest.mark.parametrize("path", RECORDS)
def test_an_entry_says_what_each_field_is(path):
    for base in RECORDS[path].__mro__:
        if base.__module__.startswith("jax_transformer"):
            assert {*fields_of(base)} <= {*described(base)}


def named_by(node):
    """Return the names that a statement of a module gives to what is this library's."""
    if isinstance(node, ast.ImportFrom) and node.module.startswith("jax_transformer"):
        return [each.name for each in node.names]
    if isinstance(node, ast.Assign):
        return [ast.unparse(target) for target in node.targets]
    return [node.name] if isinstance(node, ast.ClassDef) else []


@pytest.mark.parametrize("path", FUNCTIONS)
def test_a_type_in_a_signature_has_an_entry_or_a_row(path):
    module = inspect.getmodule(inspect.unwrap(FUNCTIONS[path]))
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(FUNCTIONS[path]))).body
    arguments = [*function.args.args, *function.args.kwonlyargs]
    annotations = [one.annotation for one in arguments if one.annotation] + [function.returns]
    names = {
        node.id for part in annotations for node in ast.walk(part) if isinstance(node, ast.Name)
    }
    ours = {
        name
        for node in ast.parse(inspect.getsource(module)).body
        for name in named_by(node)
        if name in names
    }
    entries = {path.rpartition(".")[2] for path in ENTRIES}
    assert ours - entries - ROWS == set()


def names_in(code):
    """Return the dotted names of this library that a program imports, or takes from an import."""
    imported = {}
    for node in ast.walk(tree := ast.parse(code)):
        if isinstance(node, ast.Import):
            imported |= {each.name: each.name for each in node.names if not each.asname}
        elif isinstance(node, ast.ImportFrom):
            parts = {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
            imported |= parts
    used = set(imported.values())
    for node in ast.walk(tree):
        dotted = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        first, _, rest = dotted.partition(".")
        if first in imported and re.fullmatch(r"[\w.]+", rest):
            used.add(f"{imported[first]}.{rest}")
    return {name for name in used if name.startswith("jax_transformer.") and "__" not in name}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_uses_has_an_entry(page):
    text = page.read_text("utf-8")
    codes = [text] if page.suffix == ".py" else re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    known = [*ENTRIES.values(), *(getattr(ours, name) for ours, _, name in PAIRS.values())]
    for name in set().union(*map(names_in, codes)):
        value = resolve(name)
        owner = resolve(name.rpartition(".")[0])  # of a method, which is under its class
        has_entry = any(value is entry or owner is entry for entry in known)
        assert has_entry or inspect.ismodule(value), name
