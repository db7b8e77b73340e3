"""The libraries of the optional extras, and what a command says where one is missing."""

import importlib.util

from jax_transformer.errors import InputError

# Module that is imported: the extra of pyproject.toml that installs it.
TRAIN = ("orbax", "etils", "grain", "tokenizers", "sentencepiece", "sacrebleu", "rich")
TRAIN += ("matplotlib", "yaml", "tomli_w")
EXTRA_OF = dict.fromkeys(TRAIN, "train")
EXTRA_OF |= {"tensorboardX": "tensorboard", "torch": "torch", "transformers": "hf"}


def missing_library(command: str, error: ModuleNotFoundError) -> InputError | None:
    """Return what to install for an import that failed; None if no extra has the module."""
    module = (error.name or "").partition(".")[0]
    if module not in EXTRA_OF:
        return None
    return InputError(
        f"{command} needs {module}, which is not installed: "
        f'pip install "jax-transformer[{EXTRA_OF[module]}]"'
    )


def check_installed(module: str) -> None:
    """Refuse to start where a library is missing that is imported only later."""
    if importlib.util.find_spec(module) is None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)
