"""The libraries of the optional extras, and what is said where one is missing."""

import contextlib
import importlib.util
from collections.abc import Iterator

# Module that is imported: the extra of pyproject.toml that installs it.
TRAIN = ("orbax", "etils", "grain", "tokenizers", "sentencepiece", "sacrebleu", "rich")
TRAIN += ("matplotlib", "yaml", "tomli_w")
EXTRA_OF = dict.fromkeys(TRAIN, "train")
EXTRA_OF |= {"tensorboardX": "tensorboard", "torch": "torch", "transformers": "hf"}
EXTRA_OF |= {"flatbuffers": "export"}


@contextlib.contextmanager
def extras_named(user: str) -> Iterator[None]:
    """Say what to install where an import fails; `user` is what needs the library."""
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in EXTRA_OF:
            raise
        raise ModuleNotFoundError(
            f"{user} needs {module}, which is not installed: "
            f'pip install "jax-transformer[{EXTRA_OF[module]}]"',
            name=module,
        ) from error


def check_installed(module: str) -> None:
    """Refuse to start where a library is missing that is imported only later."""
    if importlib.util.find_spec(module) is None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)
