"""The libraries of the optional extras, and what a command says where one is missing."""

import importlib.util

from jax_transformer.errors import InputError

# Module that is imported: the extra of pyproject.toml that installs it.
EXTRA_OF = {
    "orbax": "train",
    "etils": "train",
    "grain": "train",
    "tokenizers": "train",
    "sentencepiece": "train",
    "sacrebleu": "train",
    "rich": "train",
    "matplotlib": "train",
    "yaml": "train",
    "tomli_w": "train",
    "tensorboardX": "tensorboard",
    "torch": "torch",
    "transformers": "hf",
}


def missing_library(command: str, error: ModuleNotFoundError) -> InputError | None:
    """Return what to install for an import that failed; None if no extra has the module.

    Args:
        command: What the user ran, such as "jax-transformer train".
        error: The failed import.
    """
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
