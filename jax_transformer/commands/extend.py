"""`jax-transformer extend`: a language, characters and words that a model does not have."""

import dataclasses
from pathlib import Path

from jax_transformer.convert.extension import extend as extend_folder
from jax_transformer.errors import InputError
from jax_transformer.text.text_files import decode_lines, is_blank, open_text


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Write a folder of transformers whose tokenizer and tables have more tokens, to be trained.

    The ids that the model has stay, and so do those of text without the new characters and tokens.

    Attributes:
        folder: Folder of transformers.
        output: Folder to write.
        language: New language codes, each alone or with a code of the model whose row it begins
            with, for example xho_Latn=zul_Latn; alone it begins with the mean of all codes.
        tokens: File of texts that become one token each, one a line.
        characters: Text in the new language: the characters that the tokenizer lacks become tokens.
        sentencepiece: Size of a sentencepiece model to train on --characters; its pieces that have
            such a character become tokens too.
        overwrite: Replace files of the same names.
    """

    folder: Path
    output: Path
    language: tuple[str, ...] = ()
    tokens: Path | None = None
    characters: Path | None = None
    sentencepiece: int | None = None
    overwrite: bool = False


def extend(arguments: Arguments) -> None:
    """Extend the model of a folder; print the ids of what was added."""
    if arguments.sentencepiece is not None and arguments.characters is None:
        raise InputError("--sentencepiece is trained on a text; name it by --characters")
    pairs = [code.partition("=") for code in arguments.language]
    extension = extend_folder(
        arguments.folder,
        arguments.output,
        languages={code: relative or None for code, _, relative in pairs},
        tokens=_lines(arguments.tokens),
        text=_lines(arguments.characters),
        sentencepiece=arguments.sentencepiece,
        overwrite=arguments.overwrite,
    )
    ids = [*extension.ids.values()]
    print(f"{len(ids):,} tokens were added, with the ids {min(ids)} to {max(ids)}")
    if arguments.characters is not None:
        before, after = (f"{100 * share:.1f} %" for share in extension.unknown)
        print(f"unknown tokens of {arguments.characters}: {before} before, {after} now")
    if extension.left:
        print(f"not carried over: {', '.join(extension.left)}")
    print(f"{arguments.output} written")


def _lines(path: Path | None) -> list[str]:
    """Return the lines of a file that are not blank; [] of None."""
    if path is None:
        return []
    with open_text(path) as file:
        lines = [line for line in decode_lines(file, str(path)) if not is_blank(line)]
    if not lines:
        raise InputError(f"{path}: has no line of text; name another file")
    return lines
