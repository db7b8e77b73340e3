"""Folders among the user's caches: that of this library, and those of models of the hub.

A model of the Hugging Face hub is downloaded where it is missing.
"""

import contextlib
import os
import re
from pathlib import Path
from types import ModuleType

from jax_transformer.errors import InputError, naming_the_extra, one_line

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")  # owner/name
SETTINGS = ("*.json", "*.model", "*.spm", "*.txt")  # configs and the files of tokenizers
WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")  # the first kind that there is


def user_cache() -> Path | None:
    """Return this library's cache, by the XDG specification; None without a home folder."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if named.is_absolute():  # the specification ignores a relative path
        return named / "jax-transformer"
    try:
        return Path.home() / ".cache" / "jax-transformer"
    except RuntimeError:  # neither HOME nor an entry of the user in the system's list
        return None


def local_folder(model: str | Path) -> Path:
    """Return the folder of a model: a path, or that of a name such as Helsinki-NLP/opus-mt-en-de.

    If the folder around a path exists, it is a path and not a name of the hub. What the hub's cache
    holds is used without the network. Otherwise what a model needs is downloaded: settings,
    tokenizer, and weights in one format.

    Raises:
        ModuleNotFoundError: huggingface_hub is not installed.
        InputError: The hub cannot be reached, or does not have the model with weights.
    """
    path, model = Path(model), str(model)
    if path.parent.exists() or not HUB_ID.fullmatch(model):
        return path
    with naming_the_extra(f"{model} is no folder here, and the Hugging Face hub"):
        import huggingface_hub
    try:
        folder = None
        with contextlib.suppress(FileNotFoundError):
            folder = _snapshot(huggingface_hub, model, offline=True)
        folder = folder or _snapshot(huggingface_hub, model, offline=False)
    except (OSError, ValueError) as error:  # of the network, the disk and the id
        raise InputError(
            f"{model}: is no folder here, and the Hugging Face hub does not give it "
            f"({one_line(str(error), 200)}); check the name and the network, or fetch it with "
            f"`hf download {model}`"
        ) from error
    if folder is None:
        raise InputError(f"{model}: has neither of the weights {' or '.join(WEIGHTS)} on the hub")
    return folder


def _snapshot(hub: ModuleType, model: str, *, offline: bool) -> Path | None:
    """Return the folder of a model with its weights; None where there are none."""
    for weights in WEIGHTS:
        patterns = [*SETTINGS, weights]
        folder = hub.snapshot_download(model, allow_patterns=patterns, local_files_only=offline)
        if any(Path(folder).glob(weights)):
            return Path(folder)
    return None
