"""What is published: a wheel and a source distribution, built, read, installed and tested."""

import re
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.metadata import Metadata

import jax_transformer
from tests.programs import run_python
from tests.tiers import tiered

ROOT = Path(__file__).parents[2]
PACKAGES = ("jax_transformer", "torch_reference")
VERSION = jax_transformer.__version__
FIRST_PROGRAM = """
import jax, numpy as np
import jax_transformer, torch_reference
from jax_transformer import TransformerConfig, generate, init_params

sizes = {"src_vocab_size": 20, "tgt_vocab_size": 20, "d_model": 8, "num_heads": 2, "d_ff": 16}
config = TransformerConfig.preset("vaswani2017", **sizes)
params = init_params(jax.random.key(0), config)
print(generate(params, config, np.array([[5, 6, 2]]), max_new_tokens=4).tokens.shape)
print(jax_transformer.__file__, torch_reference.__file__)
"""


def run(*command, cwd, path=""):
    """Run Python, with a folder of packages; return what it prints."""
    return run_python(*command, cwd=cwd, environment={"PYTHONPATH": str(path)}).stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel, which is built from the source distribution, and that, unpacked."""
    folder = tmp_path_factory.mktemp("built")
    run("-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    with tarfile.open(folder / f"jax_transformer-{VERSION}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return (
        folder / f"jax_transformer-{VERSION}-py3-none-any.whl",
        folder / f"jax_transformer-{VERSION}",
    )


def files_of(folder):
    """The files of both packages, without what Python has compiled."""
    found = (path for name in PACKAGES for path in (folder / name).rglob("*") if path.is_file())
    return {str(path.relative_to(folder)) for path in found if path.suffix != ".pyc"}


@pytest.mark.exhaustive
def test_the_wheel_is_both_packages(built):
    wheel, _ = built
    with zipfile.ZipFile(wheel) as archive:
        names = {*archive.namelist()}
        about = f"jax_transformer-{VERSION}.dist-info"
        metadata = Metadata.from_email(archive.read(f"{about}/METADATA"))  # validates each field
    assert {name for name in names if not name.startswith(about)} == files_of(ROOT)
    assert f"{about}/licenses/LICENSE" in names
    assert str(metadata.version) == VERSION
    assert metadata.description == (ROOT / "README.md").read_text("utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert {*metadata.provides_extra} == {*project["optional-dependencies"]}


@pytest.mark.exhaustive
def test_the_installed_wheel_runs(built, tmp_path):
    wheel, _ = built
    there = tmp_path / "installed"
    options = "--no-deps --no-index -q".split()
    run("-m", "pip", "install", *options, f"--target={there}", wheel, cwd=tmp_path)
    shape, paths = run("-c", FIRST_PROGRAM, cwd=tmp_path, path=there).splitlines()
    assert shape == "(1, 1, 4)"
    assert paths.split() == [str(there / name / "__init__.py") for name in PACKAGES]
    shown = run(there / "bin" / "jax-transformer", "--help", cwd=tmp_path, path=there)
    assert shown == run("-m", "jax_transformer", "--help", cwd=ROOT)


ROOMS = ["tests/test_config.py", "tests/text tests/test_public_face.py tests/test_readme.py"]


@pytest.mark.parametrize("rooms", tiered(ROOMS, [], ROOMS[:1]))
def test_the_source_distribution_tests_itself(built, rooms):
    """These rooms; `.ci/matrix` runs all of its tests."""
    _, source = built
    assert files_of(source) == files_of(ROOT)
    run("-m", "pytest", "-q", "-n0", *rooms.split(), cwd=source, path=source)


def test_the_version_is_that_of_the_changelog_and_of_the_citation():
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    versions = re.findall(r"^## (\S+)", changelog, re.MULTILINE)
    assert versions[0] == VERSION
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == VERSION
    assert {"cff-version", "message", "title", "authors", "license"} <= {*citation}
