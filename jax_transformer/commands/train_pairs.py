"""Training on pairs of texts in Python: the same run as that of `jax-transformer train`."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jax_transformer.commands.train import train_as_named, training_console
from jax_transformer.commands.train_arguments import named_values
from jax_transformer.errors import InputError, shorten
from jax_transformer.storage.writing import replace_file
from jax_transformer.text.store import default_store, one_line_faults
from jax_transformer.translation.translator import Translator


def train(
    pairs: Iterable[tuple[str, str]],
    output: str | Path,
    validation: Iterable[tuple[str, str]] | None = None,
    **settings: Any,
) -> Translator:
    """Train a model on pairs of source and target, and return it.

        translator = train([("one", "eins"), ("two", "zwei"), ...], "runs/numbers", steps=500)

    It is the run of `jax-transformer train`, in the main thread: the text of the pairs is kept
    beside the prepared text, `output` has the run and its model, and a run that was stopped goes on
    with the same call and `resume=True`.

    Args:
        pairs: Texts and their translations.
        output: Folder of the run and its model.
        validation: Pairs to select the best parameters by; by default some of `pairs` are held out.
        settings: The arguments of `jax-transformer train`, by their names with underscores, for
            example `steps=500`, `d_model=64` or `init="runs/other"`.

    Returns:
        The trained model, read from `output`.

    Raises:
        InputError: A pair is not two texts, or a setting cannot be used.
        Stopped: A signal has ended the run, which is saved.
    """
    if taken := {"columns", "source", "target", "valid_source", "valid_target"} & settings.keys():
        raise InputError(f"{min(taken)}: the pairs are in memory; leave it out")
    named = {"output": Path(output), "columns": ("source", "target")}
    folder = Path(settings.get("prepared") or default_store()) / "pairs"
    named["source"] = (_written(pairs, "pairs", folder),)
    if validation is not None:
        named["valid_source"] = (_written(validation, "validation", folder),)
    return Translator(train_as_named(named_values(settings | named), training_console()))


def _written(pairs: Iterable[tuple[str, str]], name: str, folder: Path) -> Path:
    """Write pairs as a table named by their digest; return its path."""
    records = []
    for number, pair in enumerate(pairs):
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2
        if not (is_pair and all(isinstance(side, str) for side in pair)):
            raise InputError(f"{name}[{number}] = {shorten(pair)} is not a source and a target")
        records.append(json.dumps(dict(zip(("source", "target"), pair, strict=True))) + "\n")
    content = "".join(records).encode()
    path = folder / f"{hashlib.sha256(content).hexdigest()}.jsonl"
    with one_line_faults(folder.parent):
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            replace_file(path, content)
    return path
