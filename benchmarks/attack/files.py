"""Tries that change one or two files of a model, a run or a layout, and read them."""

import functools
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import jax_transformer
from benchmarks.attack import stock
from benchmarks.attack.mutations import choose, mutate_file
from benchmarks.attack.outcomes import Attempt, Outcome, WrongResult, command
from jax_transformer import TransformerConfig
from jax_transformer.convert import read_layout, to_params, to_tensors
from jax_transformer.convert.huggingface import load_folder, read_model_config
from jax_transformer.convert.layouts import LAYOUTS
from jax_transformer.porting.compare import compare_record
from jax_transformer.porting.record import read_record
from jax_transformer.porting.report import write_report
from jax_transformer.runs.run_model import read_tokenizer
from jax_transformer.storage import weights as files
from jax_transformer.tokenizers import Tokenizer
from jax_transformer.translation import model_folder

FAMILIES = (
    *("marian", "pegasus", "bart", "mvp", "blenderbot", "mbart", "mbart-50", "m2m100", "nllb"),
    *("t5", "t5-v1.1", "mt5", "umt5"),
)
SAMPLE = ("one hundred and twenty", "", "Ünï\u2028code \U0001f600", "a" * 200)
SECOND = {".safetensors": ("plain",), ".pt": ("plain", "legacy")}  # forms of a second weight file
SLACK = 2**20  # bytes that parameters may have beyond their file's, which may be of half precision


class Subject(NamedTuple):
    """Files, and what the library makes of them.

    Attributes:
        make: Writes the untouched folder.
        use: Reads it, checks what holds of any valid input, and returns a digest of the result.
        digested: Whether the files have digests, so that another result is a fault.
        changed: The end of the names of the files that are changed.
    """

    make: Callable[[Path], object]
    use: Callable[[Path], str]
    digested: bool = False
    changed: str = ""


def digest_of(*values: Any) -> str:
    """Return the sha256 of arrays, bytes and what JSON can hold."""
    digest = hashlib.sha256()
    for leaf in jax.tree_util.tree_leaves_with_path(values):
        path, value = leaf
        digest.update(jax.tree_util.keystr(path).encode())
        if hasattr(value, "dtype"):
            array = np.asarray(value)
            digest.update(f"{array.dtype} {array.shape}".encode() + array.tobytes())
        else:
            digest.update(repr(value).encode())
    return digest.hexdigest()


def check_model(config: TransformerConfig, params: Any, size: int) -> None:
    """Check what holds of every model that was read from files of `size` bytes.

    Raises:
        WrongResult: The parameters are not those of the config, are not finite, or are more than
            the files hold.
    """
    shapes = jax.eval_shape(
        functools.partial(jax_transformer.init_params, config=config), jax.random.key(0)
    )
    found, wanted = (
        {jax.tree_util.keystr(path): leaf.shape for path, leaf in flat}
        for flat in map(jax.tree_util.tree_leaves_with_path, (params, shapes))
    )
    if found != wanted:
        raise WrongResult("the parameters are not those of the config")
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(params)]
    if not all(np.isfinite(leaf.astype(np.float32)).all() for leaf in leaves):
        raise WrongResult("the parameters are not finite")
    if sum(leaf.nbytes for leaf in leaves) > 4 * size + SLACK:
        raise WrongResult("the parameters are larger than the file")


def check_tokenizer(tokenizer: Tokenizer) -> str:
    """Check what holds of every tokenizer; return a digest of what it does.

    Raises:
        WrongResult: An id is outside the vocabulary, or a decoded text is none.
    """
    done = []
    if tokenizer.encode_target(SAMPLE) != tokenizer.encode_target(SAMPLE):
        raise WrongResult("two encodings of a text differ")
    for line in SAMPLE:
        source, target = tokenizer.encode_source([line])[0], tokenizer.encode_target([line])[0]
        for ids, size in ((source, tokenizer.src_vocab_size), (target, tokenizer.tgt_vocab_size)):
            if not all(0 <= token < size for token in ids):
                raise WrongResult(f"a token of {line!r} is outside the vocabulary")
        text = tokenizer.decode(target)
        if not isinstance(text, str):
            raise WrongResult(f"{line!r} is decoded to {type(text)}")
        done.append([list(source), list(target), text])
    return digest_of(tokenizer.digest(), done)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _own(folder: Path) -> str:
    model = model_folder.load(folder)
    check_model(model.config, model.params, _size(folder))
    return digest_of(model_folder.model_digest(model), check_tokenizer(model.tokenizer))


def _weights(suffix: str) -> Callable[[Path], str]:
    def use(folder: Path) -> str:
        path = folder / f"weights{suffix}"
        tensors = files.read(path)
        if suffix == ".safetensors":
            config = TransformerConfig.from_dict(json.loads(files.read_metadata(path)["config"]))
        else:
            config = stock.model().config
        params, _ = to_params(tensors, config, LAYOUTS["reference"])
        check_model(config, params, _size(folder))
        return digest_of(config.to_dict(), params)

    return use


def _converted(suffix: str) -> Callable[[Path], str]:
    def use(folder: Path) -> str:
        weights, output = folder / f"weights{suffix}", folder.parent / "output.safetensors"
        flags = [] if suffix == ".safetensors" else [f"--config={folder / 'config.json'}"]
        command(["convert", str(weights), str(output), *flags])
        found = digest_of(files.read(output), files.read_metadata(output))
        output.unlink()
        return found

    return use


def _family(folder: Path) -> str:
    config, params, tokenizer, generation = load_folder(folder)
    check_model(config, params, _size(folder))
    values = config.to_dict(), params, repr(sorted(generation.items()))
    return digest_of(*values, check_tokenizer(tokenizer))


def _family_converted(folder: Path) -> str:
    output = folder.parent / "output.safetensors"
    command(["convert", str(folder), str(output)])
    found = digest_of(files.read(output))
    output.unlink()
    return found


def _overwritten(folder: Path) -> str:
    """Write a folder of BART over another one, whose files were changed."""
    source = folder.parent / "source"
    if not source.exists():
        stock.own_family_folder(source)
    arguments = ["convert", str(source), str(folder), "--output-layout=bart", "--overwrite"]
    command(arguments)
    return digest_of(files.read(folder / "model.safetensors"))


def _own_overwritten(folder: Path) -> str:
    """Write a model over another one, whose files were changed."""
    model_folder.save(folder, stock.model(1), overwrite=True)
    return _own(folder)


def _config_alone(folder: Path) -> str:
    command(["budget", f"--model={folder / 'config.json'}"])
    return digest_of(read_model_config(folder / "config.json").to_dict())


def _tokenizer(folder: Path) -> str:
    return check_tokenizer(read_tokenizer(folder / "tokenizer.json"))


def _layout(folder: Path) -> str:
    read = read_layout(folder / "layout.toml")
    return digest_of(repr(read.layout), read.config and read.config.to_dict())


def _record(folder: Path) -> str:
    return digest_of(read_record(folder / "record.safetensors"))


def _reported(folder: Path) -> str:
    model, record = stock.model(), read_record(folder / "record.safetensors")
    names = LAYOUTS["reference"]
    comparison = compare_record(model.params, model.config, names, record)
    report = folder.parent / "report.html"
    write_report(report, comparison, model.config, names, overwrite=True)
    content = report.read_text()
    report.unlink()
    if "<script" in content:
        raise WrongResult("the report runs code of the record")
    return digest_of(content)


def _generated(folder: Path) -> str:
    return digest_of(command(["translate", str(folder)], b"one hundred and two\n\nseven\n"))


def _run(folder: Path) -> str:
    from jax_transformer.runs.checkpoints import read_step
    from jax_transformer.runs.state import progress_to_json, settings_to_json
    from tests.runs.kill_resume import named_arrays

    read = read_step(folder / "run", 6)
    progress = progress_to_json(read.progress)
    settings = json.dumps(settings_to_json(read.settings), sort_keys=True)
    return digest_of(settings, json.dumps(progress), named_arrays(read.read()))


def _averaged(folder: Path) -> str:
    output = folder.parent / "averaged"
    command(["average", str(folder), str(output), "--last=2"])
    found = _own(output)
    shutil.rmtree(output)
    return found


def _tokenizer_folder(path: Path) -> None:
    path.mkdir()
    for name, content in stock.tokenizer().contents.items():
        (path / name).write_bytes(content)


QUICK = {
    "own model": Subject(stock.own_folder, _own, True),
    "own model, overwritten": Subject(stock.own_folder, _own_overwritten),
    "weights.safetensors": Subject(
        stock.weight_file(".safetensors"), _weights(".safetensors"), True
    ),
    "weights.safetensors, converted": Subject(
        stock.weight_file(".safetensors"), _converted(".safetensors"), True
    ),
    "config of BART": Subject(stock.own_family_folder, _config_alone),
    "folder of BART, overwritten": Subject(stock.own_family_folder, _overwritten),
    "tokenizer.json": Subject(_tokenizer_folder, _tokenizer),
    "layout.toml": Subject(stock.layout_file, _layout),
    "record": Subject(stock.record_folder, _record),
    "record, reported": Subject(stock.record_folder, _reported),
}
WITH_TORCH = {
    "weights.pt": Subject(stock.weight_file(".pt"), _weights(".pt"), True),
    "weights.pt, converted": Subject(stock.weight_file(".pt"), _converted(".pt")),  # by config.json
}
OF_RUNS = {
    "checkpoint of a run": Subject(stock.run_folder, _run, True),
    "average of a run": Subject(stock.run_folder, _averaged, True),
}
OF_FAMILIES = {
    name: subject
    for family in FAMILIES
    for name, subject in (
        (f"folder of {family}", Subject(stock.family_folder(family), _family)),
        (f"folder of {family}, converted", Subject(stock.family_folder(family), _family_converted)),
    )
}


OF_FAMILIES |= {
    f"folder of {family}, generating": Subject(
        stock.family_folder(family), _generated, changed="generation_config.json"
    )
    for family in ("marian", "bart", "t5")
}


def subjects(quick: bool) -> dict[str, Subject]:
    """Return what can be attacked here, by name."""
    if quick:
        return QUICK
    found = QUICK | OF_RUNS
    if stock.has("torch"):
        found |= WITH_TORCH
    if stock.has("transformers", "sentencepiece"):
        found |= OF_FAMILIES
    return found


def _untouched(stock_folder: Path, scratch: Path, name: str, subject: Subject) -> str:
    """Return the digest of what the untouched files give."""
    if name not in _EXPECTED:
        folder = scratch / "untouched" / "input"
        shutil.copytree(_source(stock_folder, name, subject), folder)
        _EXPECTED[name] = subject.use(folder)
        shutil.rmtree(scratch / "untouched")
    return _EXPECTED[name]


_EXPECTED: dict[str, str] = {}


def _source(stock_folder: Path, name: str, subject: Subject) -> Path:
    return stock.stocked(stock_folder, name.partition(",")[0].replace(" ", "-"), subject.make)


def prepare(draw: np.random.Generator, folder: Path, stock_folder: Path, quick: bool) -> Attempt:
    """Return a try on changed files.

    Args:
        draw: Chooses the files and the changes.
        folder: The folder of the try, empty.
        stock_folder: Where the untouched files are kept.
        quick: Whether to choose among files that are made within a second.
    """
    chosen = subjects(quick)
    name = choose(draw, list(chosen))
    subject = chosen[name]
    expected = _untouched(stock_folder, folder, name, subject)
    target = folder / "input"
    shutil.copytree(_source(stock_folder, name, subject), target)
    done = []
    for _ in range(int(choose(draw, (1, 1, 1, 2)))):
        paths = [path for path in sorted(target.rglob("*")) if path.is_file() and _small(path)]
        changed = [path for path in paths if path.name.endswith(subject.changed)]
        if changed:
            path = choose(draw, changed)
            others = [other for other in paths if other != path]
            is_second = path.suffix in SECOND and draw.random() < 0.2
            how = _second_file(draw, path) if is_second else mutate_file(draw, path, others)
            done.append(f"{path.relative_to(target)}: {how}")

    def run() -> Outcome:
        found = subject.use(target)
        if found == expected:
            return Outcome.SAME
        if subject.digested:
            raise WrongResult(f"{name}: changed files gave another result, without a word")
        return Outcome.OTHER

    if "overwritten" in name and name.startswith("folder"):
        stock.own_family_folder(folder / "source")
    return Attempt(f"{name}; {', '.join(done)}", run, (folder,))


def _second_file(draw: np.random.Generator, path: Path) -> str:
    """Put the weights of another model before or behind those of a file, so that it is two."""
    form = choose(draw, SECOND[path.suffix])
    other = path.with_name(f"second{path.suffix}")
    tensors, _ = to_tensors(stock.model(1).params, stock.model(1).config, LAYOUTS["reference"])
    if form == "legacy":
        import torch

        loaded = {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}
        torch.save(loaded, other, _use_new_zipfile_serialization=False)
    else:
        files.write(other, tensors)
    place = choose(draw, ("before", "behind"))
    contents = [other.read_bytes(), path.read_bytes()]
    other.unlink()
    path.write_bytes(b"".join(contents if place == "before" else contents[::-1]))
    return f"another {form} file {place} it"


def _small(path: Path) -> bool:
    return path.stat().st_size < 2**26
