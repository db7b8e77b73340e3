"""Translate a large file on the machines of a Ray cluster: copy this program, and change it.

    python ray_translate.py runs/0 --input news.en --output news.de --workers 2

Ray Data gives parts of the file to workers, and returns their results in the order of the file.
Each worker holds a `Translator`. The output has the bytes that `jax-transformer translate` writes.
All machines see the input under one name, and the model under one name or on the Hugging Face hub.
"""

import argparse
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jax_transformer import InputError, Translator
from jax_transformer.model.checks import check_whole_number
from jax_transformer.storage.writing import staged_file
from jax_transformer.text.text_files import MAGICS, decode_line, open_text
from jax_transformer.translation.resumable_file import check_input, check_output

try:
    import ray
except ModuleNotFoundError:
    sys.exit('error: ray_translate.py needs ray: pip install "jax-transformer[ray]"')

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray reports to its makers otherwise

Part = dict[str, Any]  # a row of Ray Data: some lines of the input, or what became of them
OPTIONS: dict[str, Any] = {}  # of each call of the Translator, for example beam_size


def parts(path: Path, lines: int) -> Iterator[Part]:
    """Yield where the parts of a file begin, each of so many lines; only the last has fewer."""
    number = start = 0
    with open_text(path) as file:
        if file.peek(8).startswith(tuple(MAGICS)):
            raise InputError(f"{path}: is compressed, and parts of it cannot be read; unpack it")
        while size := sum(map(len, itertools.islice(file, lines))):
            yield {"path": str(path.absolute()), "number": number, "start": start, "size": size}
            number, start = number + lines, start + size


class TranslatePart:
    """A worker: it keeps the model, and translates one part after the other."""

    def __init__(self, model: str, languages: dict[str, str | None]) -> None:
        self.translator: Translator | None = None
        self.model, self.languages = model, languages

    def __call__(self, part: Part) -> Part:
        """Return the translations of a part, or why there are none, for the reader of all parts.

        Ray repeats the call where the worker was killed.
        """
        path, number = part["path"], part["number"]
        try:
            with open_text(path) as file:
                file.seek(part["start"])
                lines = file.read(part["size"]).removesuffix(b"\n").split(b"\n")
            texts = [decode_line(line, path, number + i) for i, line in enumerate(lines, start=1)]
            self.translator = self.translator or Translator(self.model, **self.languages)
            results = self.translator(texts, **OPTIONS)
            translated = [result.text.replace("\n", " ") + "\n" for result in results]
        except InputError as error:
            return {"text": "", "error": f"{path}, after line {number:,}: {error}"}
        return {"text": "".join(translated), "error": ""}


def translate(
    model: str,
    input: Path,
    output: Path,
    workers: int,
    lines: int = 2048,
    source_lang: str | None = None,
    target_lang: str | None = None,
) -> None:
    """Translate a file; the output has its name only when it is whole.

    Args:
        model: As for `Translator`.
        workers: Number of processes that hold the model.
        lines: Lines of a part: what a worker loses when it is killed.
        source_lang: As for `Translator`.
        target_lang: As for `Translator`.

    Raises:
        InputError: The output exists, or the input or the model cannot be used.
    """
    check_whole_number("workers", workers, least=1)
    check_whole_number("lines", lines, least=1)
    check_output(output, resume=False, overwrite=False)
    rows = list(parts(input, lines))
    check_input(input.stat(), output)
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    languages = {"source_lang": source_lang, "target_lang": target_lang}
    translated = ray.data.from_items(rows, override_num_blocks=max(1, len(rows))).map(
        TranslatePart,
        fn_constructor_args=(model, languages),
        compute=ray.data.ActorPoolStrategy(size=workers),
        num_cpus=1,  # on machines with GPUs: num_gpus=1
    )
    with staged_file(output) as scratch, scratch.open("wb") as file:
        for part in translated.iter_rows():
            if part["error"]:
                raise InputError(part["error"])
            file.write(part["text"].encode())


def main() -> None:
    """Parse the command line; bad input is one line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--input", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--lines", type=int, default=2048)
    parser.add_argument("--source-lang")
    parser.add_argument("--target-lang")
    try:
        translate(**vars(parser.parse_args()))
    except InputError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
