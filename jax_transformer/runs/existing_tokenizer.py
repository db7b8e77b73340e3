"""An existing tokenizer, for training a new model: from a file or a folder of any known kind."""

import os
from pathlib import Path

from jax_transformer.convert import huggingface
from jax_transformer.convert.families import FAMILIES
from jax_transformer.convert.huggingface import is_huggingface, read_config
from jax_transformer.errors import InputError
from jax_transformer.storage.folder import CONFIG_FILE, model_folder_of
from jax_transformer.tokenizers import Tokenizer, parse_byte_pair, read_files, separate
from jax_transformer.tokenizers.readers.library import read_usual_names
from jax_transformer.tokenizers.readers.sentencepiece import read_marian
from jax_transformer.translation.model_folder import load_tokenizer

TOKENIZER_FILE = "tokenizer.json"
SENTENCEPIECE_FILE = "source.spm"


def run_tokenizer(source: Path | None, target: Path | None) -> Tokenizer | None:
    """Return the tokenizer of a run from files or folders; None if the run trains one.

    The target is that of a second tokenizer, of the targets, where there are two.
    """
    if source is None and target is not None:
        raise InputError(
            f"tokenizer=None: name that of the sources beside target_tokenizer={target}"
        )
    if source is None:
        return None
    tokenizer = read_tokenizer(source)
    return tokenizer if target is None else separate(tokenizer, read_tokenizer(target))


def read_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer in a file or a folder; weights are not read.

    The file is a tokenizer.json whose special tokens have usual names. The folder has such a file,
    or source.spm, target.spm and vocab.json, or is that of a model of this library or of a known
    family of Hugging Face.
    """
    if not os.path.isdir(path):  # unlike Path.is_dir, it takes a name of any length
        return _read_file(path.parent, path.name)
    path = model_folder_of(path)
    if (path / CONFIG_FILE).exists():
        if not is_huggingface(path):
            return load_tokenizer(path)
        family = FAMILIES.get(read_config(path)["model_type"])
        if family is not None and family.tokenizer is not None:
            _, tokenizer = huggingface.load_tokenizer(path)
            return tokenizer
    if (path / SENTENCEPIECE_FILE).exists():
        return read_marian(path)
    if (path / TOKENIZER_FILE).exists():
        return _read_file(path, TOKENIZER_FILE)
    raise InputError(
        f"{path}: holds no tokenizer: neither {TOKENIZER_FILE} nor {SENTENCEPIECE_FILE}; name the "
        "folder of a model or of a tokenizer, or a tokenizer.json"
    )


def _read_file(folder: Path, name: str) -> Tokenizer:
    """Return the tokenizer in a tokenizer.json, which may have another name."""
    content = read_files(folder, [name])[name]
    try:
        return parse_byte_pair(content, str(folder / name))
    except InputError:  # a tokenizer of another program, or a damaged one
        return read_usual_names(content, str(folder / name))
