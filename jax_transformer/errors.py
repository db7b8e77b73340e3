"""What a caller can mend: input that cannot be used, and a missing library of an extra."""

import contextlib
import importlib.util
from collections.abc import Iterator

LONGEST_LINE = 1000  # characters of a message
BAD_LINES_NAMED = 5  # lines of a text that a report names
# Module that is imported: the extra of pyproject.toml that installs it.
TRAIN = ("orbax", "grain", "tokenizers", "sentencepiece", "sacrebleu", "rich")
TRAIN += ("matplotlib", "yaml", "tomli_w")
EXTRA_OF = dict.fromkeys(TRAIN, "train")
EXTRA_OF |= {"tensorboardX": "tensorboard", "torch": "torch", "transformers": "hf"}
EXTRA_OF |= {"huggingface_hub": "hub", "flatbuffers": "export", "ctranslate2": "ctranslate2"}
EXTRA_OF |= {"onnxscript": "onnx", "onnxruntime": "onnx", "sentencex": "sentences"}
EXTRA_OF |= dict.fromkeys(("soundfile", "soxr", "jiwer"), "audio")


class InputError(ValueError):
    """Input that cannot be used; the message names the thing, its value and the remedy.

    Programs at the edge (train.py, the command line) print the message as one line and leave
    with exit code 1. Every other exception is a fault of this library and keeps its traceback.
    """

    def __init__(self, *lines: str) -> None:
        """Make each line readable, whatever values it shows; only a report has several lines."""
        super().__init__("\n".join(map(_readable, lines)))


def _readable(line: str) -> str:
    if len(line) > LONGEST_LINE:
        line = f"{line[: LONGEST_LINE - 300]} ... {line[-290:]}"
    if line.isprintable():
        return line
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in line
    )


def shorten(value: object, most: int = 80) -> str:
    """Return any value for a message: in one line, escaped, and at most so many characters."""
    try:
        text = ascii(value[:most] if isinstance(value, str) else value)
    except (ValueError, RecursionError):  # too many digits, or nested too deep
        text = f"a large {type(value).__name__}"
    text = " ".join(text.split()) if "\n" in text else text
    return text if len(text) <= most else f"{text[: most - 3]}..."


def one_line(message: str, most: int = 500) -> str:
    """Return another library's message in one line: it may repeat a file's value."""
    line = " ".join(message[: 4 * most].split())
    line = line if line.isprintable() else ascii(line)[1:-1]
    return line if len(line) <= most else f"{line[: most - 3]}..."


@contextlib.contextmanager
def naming_the_extra(user: str) -> Iterator[None]:
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
