"""What documents and comments name exists: files behind links, modules, commands, extras."""

import importlib
import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("jax_transformer", "torch_reference", "benchmarks", "docs", "tests")
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("docs/tutorials/*.py")]
SOURCES = [*ROOT.glob("*.py"), *(path for room in ROOMS for path in ROOT.glob(f"{room}/**/*.py"))]
PACKAGE = ROOT / "jax_transformer"


def pages_and_sources():
    # The changelog names what was. A how-to with changes names what they would make.
    for path in dict.fromkeys([*PAGES, *SOURCES]):
        if path.name != "CHANGELOG.md" and path != Path(__file__):
            yield path.relative_to(ROOT), path.read_text("utf-8")


def names(pattern):
    """Return each match of a pattern with the file that has it."""
    found = {}
    for path, text in pages_and_sources():
        for name in re.findall(pattern, text):
            found.setdefault(name, path)
    assert len(found) >= 3, f"{pattern} finds nothing"
    return found.items()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_of_the_repository(page):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text("utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s#]+)(?:#[^)]*)?\)", text):
        if "://" not in link:
            assert (page.parent / link).exists(), link


def test_every_dotted_name_is_a_module_or_in_one():
    rooms = "|".join(ROOMS[:3])
    for name, path in names(rf"(?<![\w./])(?:{rooms})(?:\.[a-zA-Z_]\w*)+(?![\w/])"):
        module, _, rest = name.partition(".")
        value = importlib.import_module(module)
        for part in rest.split("."):
            module = f"{module}.{part}"
            if hasattr(value, "__path__") and importlib.util.find_spec(module):
                value = importlib.import_module(module)
            else:
                assert hasattr(value, part), f"{path}: {name}"
                value = getattr(value, part)


def test_every_command_by_python_m_is_a_module():
    for name, path in names(rf"python -m ((?:{'|'.join(ROOMS)})[\w.]*\w)"):
        assert importlib.util.find_spec(name), f"{path}: python -m {name}"


def test_every_path_of_a_file_of_code_exists():
    inner = "|".join(
        folder.name for folder in PACKAGE.iterdir() if (folder / "__init__.py").exists()
    )
    pattern = rf"(?<![\w./])((?:{'|'.join(ROOMS)}|{inner})/[\w/]+\.py)\b"
    for name, path in names(pattern):
        places = (ROOT, PACKAGE, ROOT / "torch_reference", PACKAGE / "convert", ROOT / path.parent)
        assert any((place / name).exists() for place in places), f"{path}: {name}"


def test_every_extra_is_one_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    pattern = r"(?:\bextras? |-e ['\"]?\.|jax-transformer)[\[`\"]([\w,-]+)[\]`\"]"
    for listed, path in names(pattern):
        for extra in listed.split(","):
            assert extra in extras, f"{path}: [{extra}]"


def test_every_extra_has_a_row_on_the_page_about_the_installation():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    page = (ROOT / "docs" / "how_to" / "install.md").read_text("utf-8")
    rows = re.findall(r"^\| `(.*?)` \|", page, re.MULTILINE)
    assert rows == [*project["optional-dependencies"]]


def test_every_test_that_a_document_names_exists():
    for (name, test), path in names(r"(tests/[\w/]+\.py)::(\w+)"):
        text = (ROOT / name).read_text("utf-8")
        assert re.search(rf"^def {test}\(", text, re.MULTILINE), f"{path}: {name}::{test}"
