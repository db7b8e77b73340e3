"""Which files of a folder are a model of Marian: weights, vocabularies, decoder.yml."""

import os
from pathlib import Path
from typing import Any, NamedTuple

from jax_transformer.errors import InputError
from jax_transformer.storage.folder import CONFIG_FILE
from jax_transformer.storage.weights.formats import NPZ
from jax_transformer.storage.yaml_file import read_yaml

DECODER = "decoder.yml"
SPM, MAPPINGS = ".spm", (".yml", ".yaml", ".json")
SPLITTERS = ("source.spm", "target.spm")  # beside vocabularies of the pieces
_OF_TRAINING = (".optimizer.npz", ".orig.npz", ".avg.npz")  # beside the weights, no models
_SIDES = (("src", "source"), ("trg", "tgt", "target"))


class MarianFiles(NamedTuple):
    """The files of a model of Marian.

    Attributes:
        weights: The .npz with the options in it.
        vocabularies: Of the source and of the target, or none.
        decoder: The content of decoder.yml.
        decoder_path: That file; None where there is none.
    """

    weights: Path
    vocabularies: list[Path]
    decoder: dict[str, Any]
    decoder_path: Path | None


def is_marian(path: Path) -> bool:
    """Return whether a path is an .npz, or a folder with one or decoder.yml and no config.json."""
    if path.suffix == NPZ:
        return os.path.isfile(path)  # unlike Path.is_file, it takes a name of any length
    if not os.path.isdir(path) or os.path.lexists(path / CONFIG_FILE):
        return False
    return (path / DECODER).exists() or bool(_models_in(path))


def find_files(path: Path) -> MarianFiles:
    """Return the files of a folder, or those beside the .npz that is named."""
    folder, models = (path, _models_in(path)) if path.is_dir() else (path.parent, [path])
    names = [DECODER, *(f"{model.name}.{DECODER}" for model in models)]
    found = [folder / name for name in names if (folder / name).exists()]
    decoder = read_yaml(found[0]) if found else {}
    if not isinstance(decoder, dict):
        raise InputError(f"{found[0]}: must hold options by their names")
    if len(models) > 1:
        named = decoder.get("models")
        chosen = {Path(str(name)).name for name in named} if isinstance(named, list) else ()
        several = ", ".join(model.name for model in models[:3])
        models = [model for model in models if model.name in chosen]
        if len(models) != 1:
            raise InputError(f"{folder}: holds several models, {several}: name one of the files")
    if not models:
        raise InputError(
            f"{folder}: holds no {NPZ}; a .bin of Marian is packed or quantised: take the model "
            "that it was made of"
        )
    vocabularies = _vocabularies_in(folder, decoder.get("vocabs"))
    return MarianFiles(models[0], vocabularies, decoder, found[0] if found else None)


def vocabularies_of(path: Path) -> list[Path]:
    """Return the vocabularies of the source and the target of a model; refuse one without any."""
    if found := find_files(path).vocabularies:
        return found
    raise InputError(f"{path}: holds no vocabulary in {', '.join((SPM, *MAPPINGS))}")


def _models_in(folder: Path) -> list[Path]:
    paths = sorted(folder.glob(f"*{NPZ}"))
    return [path for path in paths if not path.name.endswith(_OF_TRAINING)]


def _vocabularies_in(folder: Path, named: Any) -> list[Path]:
    """Return the vocabularies of the source and the target, which may be one; `named` are some."""
    if isinstance(named, list) and named:
        return [folder / Path(str(name)).name for name in (named[0], named[-1])]
    names = sorted(path.name for path in folder.iterdir() if path.name not in SPLITTERS)
    found = [name for name in names if name.endswith(SPM)]
    found = found or [name for name in names if name.endswith(MAPPINGS) and "vocab" in name]
    if len(found) > 1:
        sides = [[name for name in found if any(s in name for s in side)] for side in _SIDES]
        if [len(side) for side in sides] != [1, 1]:
            raise InputError(
                f"{folder}: holds several vocabularies, {', '.join(found[:3])}: name those of the "
                f"source and the target in {DECODER}, under vocabs"
            )
        found = [side[0] for side in sides]
    return [folder / name for name in (found * 2)[:2]]
