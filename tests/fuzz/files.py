"""Changes one or two files of a model, a run, a layout or a published folder, and reads them."""

import functools
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from hypothesis import strategies as st

from jax_transformer import TransformerConfig, convert
from jax_transformer.storage import weights
from jax_transformer.tokenizers import Tokenizer
from jax_transformer.translation import model_folder
from jax_transformer.translation.model_folder import TrainedModel
from tests.fuzz import stock
from tests.fuzz.mutations import Draw, change_file
from tests.fuzz.outcomes import OTHER, SAME, Attempt, Fault, command
from tests.models import shapes
from tests.published.folder import write_folder
from tests.published.rows import ROWS

SAMPLE = ("one hundred and twenty", "", "Ünï\u2028code \U0001f600", "a" * 200)
SPECIAL = 3  # ids of a line that are not of its text
SLACK = 2**20  # bytes that parameters may have beyond their file's, which may be of half precision
PUBLISHED = {row.name: row for row in ROWS if not row.expected}
GENERATING = ("Helsinki-NLP/opus-mt-en-de", "facebook/bart-base", "t5-small")


def check_model(config: TransformerConfig, params: Any, folder: Path) -> None:
    """Check that parameters are those of the config, finite, and no more than the files hold."""
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    found, wanted = (
        jax.tree.map(lambda leaf: leaf.shape, tree) for tree in (params, shapes(config))
    )
    if found != wanted:
        raise Fault("the parameters are not those of the config")
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(params)]
    if not all(np.isfinite(leaf.astype(np.float32)).all() for leaf in leaves):
        raise Fault("the parameters are not finite")
    if sum(leaf.nbytes for leaf in leaves) > 4 * size + SLACK:
        raise Fault("the parameters are larger than the file")


def check_tokenizer(
    tokenizer: Tokenizer, lines: Sequence[str] = SAMPLE, longest: int | None = None
) -> str:
    """Check the ids and the texts of lines; return a digest of them."""
    done = []
    for encode, size in (
        (tokenizer.encode_source, tokenizer.src_vocab_size),
        (tokenizer.encode_target, tokenizer.tgt_vocab_size),
    ):
        for line, ids in zip(lines, encode(lines, longest), strict=True):
            if list(ids) != list(encode([line], longest)[0]):
                raise Fault(f"{line!r} alone has other ids than among others")
            if not all(0 <= token < size for token in ids):
                raise Fault(f"a token of {line!r} is outside the vocabulary")
            if longest is not None and len(ids) > max(longest, SPECIAL):
                raise Fault(f"{len(ids)} ids, though max_length={longest}")
            done.append([list(ids), tokenizer.decode(ids).encode()])
    return stock.digest_of(tokenizer.digest(), done)


def _own(folder: Path) -> str:
    model = model_folder.load(folder)
    check_model(model.config, model.params, folder)
    return stock.digest_of(model_folder.model_digest(model), check_tokenizer(model.tokenizer))


def _own_overwritten(folder: Path) -> str:
    model_folder.save(folder, stock.model(1), overwrite=True)
    return _own(folder)


def _converted(folder: Path, name: str = "", *flags: str) -> str:
    output = folder.parent / "converted.safetensors"
    command(["convert", str(folder / name), str(output), *flags])
    found = stock.digest_of(weights.read(output))
    output.unlink()
    return found


def _converted_pt(folder: Path) -> str:
    return _converted(folder, "weights.pt", f"--config={folder / 'config.json'}")


def _bart_overwritten(folder: Path) -> str:
    stock.bart_folder(folder, overwrite=True)
    return stock.digest_of(weights.read(folder / "model.safetensors"))


def _budget(folder: Path) -> str:
    return stock.digest_of(command(["budget", f"--model={folder / 'config.json'}"]))


def _layout(folder: Path) -> str:
    read = convert.read_layout(folder / "layout.toml")
    return stock.digest_of(repr(read.layout), read.config and read.config.to_dict())


def _averaged(folder: Path) -> str:
    output = folder.with_name("averaged")
    command(["average", str(folder), str(output), "--last=2"])
    found = _own(output)
    shutil.rmtree(output)
    return found


def load(folder: Path, row: str) -> TrainedModel:
    """Return the model of the folder of a row."""
    source, target = PUBLISHED[row].languages or (None, None)
    return model_folder.load(folder, source_lang=source, target_lang=target)


def _published(folder: Path, row: str) -> str:
    config, params, tokenizer, generation, *_ = load(folder, row)
    check_model(config, params, folder)
    values = config.to_dict(), params, repr(sorted(generation.items()))
    return stock.digest_of(*values, check_tokenizer(tokenizer))


def _generated(folder: Path) -> str:
    return stock.digest_of(command(["translate", str(folder)], b"one hundred and two\n\nseven\n"))


FIXED: dict[str, tuple[Callable[[Path], object], Callable[[Path], str]]] = {
    "own model": (stock.own_folder, _own),
    "own model, overwritten": (stock.own_folder, _own_overwritten),
    "weights.safetensors": (
        functools.partial(stock.weight_file, suffix=".safetensors"),
        functools.partial(_converted, name="weights.safetensors"),
    ),
    "weights.pt": (functools.partial(stock.weight_file, suffix=".pt"), _converted_pt),
    "config of BART": (stock.bart_folder, _budget),
    "folder of BART, overwritten": (stock.bart_folder, _bart_overwritten),
    "layout": (stock.layout_file, _layout),
    "average of a run": (stock.run_folder, _averaged),
}
# Their files have digests: another result is a fault.
DIGESTED = ("own model", "weights.safetensors", "average of a run")
PUBLISHED_NAMES = [f"{how} {row}" for row in PUBLISHED for how in ("read", "convert")]
PUBLISHED_NAMES += [f"generate {row}" for row in GENERATING]
# Half of the attempts are on the files of this library, most of these on those with digests.
OWN_NAMES = [*FIXED, *3 * DIGESTED]
NAMES = st.booleans().flatmap(lambda own: st.sampled_from(OWN_NAMES if own else PUBLISHED_NAMES))


def published(stock_folder: Path, row: str) -> Path:
    """Return the untouched folder of a row of `tests.published`."""
    return stock.stocked(stock_folder, row, functools.partial(write_folder, PUBLISHED[row]))


@functools.cache
def untouched(stock_folder: Path, name: str) -> tuple[Path, Callable[[Path], str], str]:
    """Return an untouched folder, what uses it, and the digest that this gives."""
    if name in FIXED:
        make, use = FIXED[name]
        source = stock.stocked(stock_folder, name, make)
    else:
        how, _, row = name.partition(" ")
        read = functools.partial(_published, row=row)
        use = {"read": read, "convert": _converted, "generate": _generated}[how]
        source = published(stock_folder, row)
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(source, Path(copy) / "input")
        return source, use, use(Path(copy) / "input")


def prepare(draw: Draw, folder: Path, stock_folder: Path) -> Attempt:
    """Return an attempt: some files are changed and then used."""
    name, target = draw(NAMES), folder / "input"
    source, use, expected = untouched(stock_folder, name)
    shutil.copytree(source, target)
    changed = "generation_config.json" if use is _generated else ""
    for _ in range(draw(st.sampled_from((1, 1, 1, 2)))):
        paths = [path for path in sorted(target.rglob("*")) if path.is_file()]
        paths = [path for path in paths if path.stat().st_size < 2**26]
        if paths := [path for path in paths if path.name.endswith(changed)]:
            change_file(draw, draw(st.sampled_from(paths)))

    def run() -> str:
        found = use(target)
        if found != expected and name in DIGESTED:
            raise Fault(f"{name}: changed files gave another result, without a word")
        return SAME if found == expected else OTHER

    return run, (target,)
