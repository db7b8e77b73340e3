"""Serve a model on Ray Serve under LibreTranslate's JSON: copy this program, and change it.

    serve run ray_serve:app model=runs/0 source=en target=de

`source` and `target` are the codes that clients name, with commas between them. For a model with
language codes of its own, `en=eng_Latn,de=deu_Latn` says which are meant. Requests of different
clients share batches; in float32 that changes no answer.
"""

import asyncio
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from jax_transformer import InputError, Translator
from jax_transformer.commands.compilation_cache import keep_compilations
from jax_transformer.text.text_files import is_blank

try:
    import click
    from ray import serve
    from starlette.requests import Request
    from starlette.responses import JSONResponse
except ModuleNotFoundError as error:
    sys.exit(f'error: ray_serve.py needs {error.name}: pip install "jax-transformer[ray]"')

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray reports to its makers otherwise

# Lines of a batch, which is filled up to one of these numbers: few programs are then compiled. A
# Translator translates at most 64 lines at once.
ROWS = (1, 4, 16, 64)
MOST_LINES, MOST_CHARACTERS = 128, 5_000  # of a request
MOST_BYTES = 2**17  # of a request: a character may be escaped in 12 bytes

Codes = dict[str, str | None]  # of the clients: that of the model; None for a model without codes


class RequestError(Exception):
    """A request that is refused, by status and reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(status, reason)
        self.status, self.reason = status, reason


class Options(NamedTuple):
    """Options of the Translator: lines with the same ones are translated together."""

    source_lang: str | None
    target_lang: str | None
    num_hypotheses: int


class Query(NamedTuple):
    """What a client asks for."""

    texts: list[str]
    is_list: bool
    alternatives: int
    options: Options

    def lines(self) -> list[str]:
        """Return the lines of all texts; each line is translated alone."""
        return [line.removesuffix("\r") for text in self.texts for line in text.split("\n")]


def read_query(
    content_type: str, body: bytes, sources: Codes, targets: Codes, beam_size: int
) -> Query:
    """Return the query of a request to /translate, in JSON or as a form.

    Args:
        beam_size: Hypotheses of a line that are there as alternatives, the best one included.

    Raises:
        RequestError: The request is not such a query, or is too long.
    """
    try:
        if content_type.partition(";")[0].strip().lower() == "application/json":
            fields = json.loads(body)
        else:
            fields = dict(parse_qsl(body.decode(), keep_blank_values=True, errors="strict"))
    except (ValueError, RecursionError) as error:
        raise RequestError(400, "the body is neither JSON nor a form") from error
    if not isinstance(fields, dict):
        raise RequestError(400, "the body must be a JSON object")
    for name in ("q", "source", "target"):
        if not fields.get(name):
            raise RequestError(400, f"{name} is missing")
    source = _code("source", fields["source"], sources)
    target = _code("target", fields["target"], targets)
    if fields.get("format", "text") != "text":
        raise RequestError(400, "format must be text: markup is not translated")
    texts = fields["q"] if isinstance(fields["q"], list) else [fields["q"]]
    if not all(isinstance(text, str) for text in texts):
        raise RequestError(400, "q must be a string or a list of strings")
    if sum(map(len, texts)) > MOST_CHARACTERS:
        raise RequestError(400, f"q has more than {MOST_CHARACTERS:,} characters")
    if any("\ud800" <= character <= "\udfff" for text in texts for character in text):
        raise RequestError(400, "q is not Unicode text: it has half of a surrogate pair")
    alternatives = str(fields.get("alternatives", 0))
    if not (alternatives.isascii() and alternatives.isdigit() and len(alternatives) < 9):
        raise RequestError(400, "alternatives must be a whole number")
    options = Options(source, target, beam_size if int(alternatives) else 1)
    query = Query(texts, isinstance(fields["q"], list), int(alternatives), options)
    if len(query.lines()) > MOST_LINES:
        raise RequestError(400, f"q has more than {MOST_LINES} lines")
    return query


def _code(name: str, code: Any, codes: Codes) -> str | None:
    if isinstance(code, str) and code in codes:
        return codes[code]
    raise RequestError(400, f"{name} must be one of {', '.join(codes)}")


def answer(query: Query, lines: list[list[str]]) -> dict[str, Any]:
    """Return the answer to a query: LibreTranslate's JSON.

    Args:
        lines: The hypotheses of each line of each text, best first, equally many for each.
    """
    texts, rest = [], iter(lines)
    for text in query.texts:
        of_text = [next(rest) for _ in text.split("\n")]
        texts.append(["\n".join(hypothesis) for hypothesis in zip(*of_text, strict=True)])
    best, others = [text[0] for text in texts], [text[1 : 1 + query.alternatives] for text in texts]
    answered = {"translatedText": best if query.is_list else best[0]}
    if query.alternatives:
        answered["alternatives"] = others if query.is_list else others[0]
    return answered


def read_codes(argument: str, translator: Translator) -> Codes:
    """Return the codes that `en=eng_Latn,de=deu_Latn` or `en` names."""
    has_codes = translator.model.tokenizer.languages is not None
    entries = [entry.partition("=") for entry in argument.split(",")]
    return {name: code or (name if has_codes else None) for name, _, code in entries}


@serve.deployment(max_ongoing_requests=4 * ROWS[-1], max_queued_requests=4 * ROWS[-1])
class LibreTranslate:
    """A replica: it holds the model and answers requests."""

    def __init__(self, model: str, source: str, target: str) -> None:
        keep_compilations()
        self.translator = Translator(model)
        self.sources = read_codes(source, self.translator)
        self.targets = read_codes(target, self.translator)
        self.beam_size = self.translator.model.generation.get("beam_size", 1)
        self._warm_up()

    async def __call__(self, request: Request) -> JSONResponse:
        """Answer a request, whatever its path."""
        try:
            return JSONResponse(await self._answer(request))
        except RequestError as error:
            return JSONResponse({"error": error.reason}, error.status)

    async def _answer(self, request: Request) -> Any:
        prefix = request.scope.get("root_path", "")  # Serve's route_prefix
        match request.method, request.scope["path"].removeprefix(prefix):
            case "POST", "/translate":
                content = request.headers.get("content-type", ""), await _read(request)
                query = read_query(*content, self.sources, self.targets, self.beam_size)
                items = [(line, query.options) for line in query.lines()]
                translated = await asyncio.gather(*map(self.translate, items))
                for number, hypotheses in enumerate(translated, start=1):
                    if isinstance(hypotheses, InputError):
                        fault = str(hypotheses).removeprefix("line 1 ")
                        raise RequestError(400, f"line {number} of q {fault}")
                return answer(query, translated)
            case "GET", "/languages":
                targets = list(self.targets)
                both = dict.fromkeys([*self.sources, *targets])
                return [
                    {"code": code, "name": code, "targets": targets if code in self.sources else []}
                    for code in both
                ]
            case "POST", "/detect":
                raise RequestError(400, "this server detects no language; name the source")
        raise RequestError(404, "there are POST /translate and GET /languages")

    @serve.batch(max_batch_size=ROWS[-1])
    async def translate(self, items: list[tuple[str, Options]]) -> list[list[str] | InputError]:
        """Return the hypotheses of lines of any requests; while they are made, others queue."""
        results: list[list[str] | InputError] = [[]] * len(items)
        for options in {options for _, options in items}:
            members = [index for index, item in enumerate(items) if item[1] == options]
            lines = [items[index][0] for index in members]
            translated = await asyncio.to_thread(self.translate_lines, lines, options)
            for index, result in zip(members, translated, strict=True):
                results[index] = result
        return results

    def translate_lines(self, lines: list[str], options: Options) -> list[list[str] | InputError]:
        """Return the hypotheses of each line, or why it has none."""
        rows = next(rows for rows in ROWS if rows >= len(lines))
        # The longest line takes the place of what is blank.
        longest = max(lines, key=lambda line: 0 if is_blank(line) else len(line.strip()))
        filled = [longest if is_blank(line) else line for line in lines]
        filled += [longest] * (rows - len(lines))
        try:
            results = list(self.translator(filled, **options._asdict()))
        except InputError as error:  # of one line; none was translated
            if len(lines) == 1:
                return [error]
            half = len(lines) // 2
            halves = lines[:half], lines[half:]
            return [result for part in halves for result in self.translate_lines(part, options)]
        return [
            ["" if is_blank(line) else other.text for other in result.hypotheses]
            for line, result in zip(lines, results, strict=False)
        ]

    def _warm_up(self) -> None:
        """Compile what batches need: their lengths are powers of two."""
        languages = next(iter(self.sources.values())), next(iter(self.targets.values()))
        for hypotheses in {1, self.beam_size}:
            options = Options(*languages, hypotheses)
            for line in self._lines_of_each_length(options):
                for rows in ROWS:
                    self.translate_lines([line] * rows, options)

    def _lines_of_each_length(self, options: Options) -> list[str]:
        languages = options.source_lang, options.target_lang
        model = self.translator.model.with_languages(*languages, self.translator.name)
        longest = {}
        for words in range(1, model.config.max_length + 1):
            line = " ".join(["a"] * words)
            length = len(model.tokenizer.encode_source([line])[0])
            if length > model.config.max_length:
                break
            longest[(length - 1).bit_length()] = line
        return list(longest.values())


async def _read(request: Request) -> bytes:
    """Return the body of a request; one that is too long is not kept."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BYTES:
            raise RequestError(413, f"the body has more than {MOST_BYTES:,} bytes")
    return body


def check(model: str, source: str, target: str) -> None:
    """Refuse what no replica can be made of.

    Raises:
        InputError: The model cannot be read, or has not these languages.
    """
    translator = Translator(model)
    for source_lang in read_codes(source, translator).values():
        for target_lang in read_codes(target, translator).values():
            translator.model.with_languages(source_lang, target_lang, translator.name)


def app(arguments: dict[str, str]) -> serve.Application:
    """Return the application; what it cannot be made of is one line, before a replica starts."""
    if arguments.keys() != {"model", "source", "target"}:
        raise click.ClickException("name model=, source= and target=, and nothing else")
    try:  # in a process of its own, which keeps no memory of a GPU
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            process.submit(check, **arguments).result()
    except (InputError, ModuleNotFoundError) as error:
        raise click.ClickException(str(error)) from error
    return LibreTranslate.bind(**arguments)
