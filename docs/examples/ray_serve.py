"""Serve a model on Ray Serve under LibreTranslate's JSON: copy this program, and change it.

    serve run ray_serve:app model=runs/0 source=en target=de

`source` and `target` are the codes that clients name, with commas between them. For a model with
language codes of its own, `en=eng_Latn,de=deu_Latn` says which are meant. Lines of all clients
enter one search that runs; in float32 that changes no answer.
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
from jax_transformer.translation.executor import TranslationExecutor

try:
    import click
    from ray import serve
    from starlette.requests import Request
    from starlette.responses import JSONResponse
except ModuleNotFoundError as error:
    sys.exit(f'error: ray_serve.py needs {error.name}: pip install "jax-transformer[ray]"')

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray reports to its makers otherwise

MOST_REQUESTS = 256  # at a replica at a time
MOST_LINES, MOST_CHARACTERS = 128, 5_000  # of a request
MOST_BYTES = 2**17  # of a request: a character may be escaped in 12 bytes

Codes = dict[str, str | None]  # of the clients: that of the model; None for a model without codes


class RequestError(Exception):
    """A request that is refused, by status and reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(status, reason)
        self.status, self.reason = status, reason


class Languages(NamedTuple):
    """Those of the Translator: lines of the same languages are translated in one search."""

    source_lang: str | None
    target_lang: str | None


class Query(NamedTuple):
    """What a client asks for."""

    texts: list[str]
    is_list: bool
    alternatives: int
    languages: Languages

    def lines(self) -> list[str]:
        """Return the lines of all texts; each line is translated alone."""
        return [line.removesuffix("\r") for text in self.texts for line in text.split("\n")]


def read_query(content_type: str, body: bytes, sources: Codes, targets: Codes) -> Query:
    """Return the query of a request to /translate, in JSON or as a form.

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
    languages = Languages(source, target)
    query = Query(texts, isinstance(fields["q"], list), int(alternatives), languages)
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


@serve.deployment(max_ongoing_requests=MOST_REQUESTS, max_queued_requests=MOST_REQUESTS)
class LibreTranslate:
    """A replica: it holds the model and answers requests."""

    def __init__(self, model: str, source: str, target: str) -> None:
        keep_compilations()
        self.translator = Translator(model)
        self.sources = read_codes(source, self.translator)
        self.targets = read_codes(target, self.translator)
        self.executors: dict[Languages, TranslationExecutor] = {}
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
                query = read_query(*content, self.sources, self.targets)
                lines = [self.translate(line, query.languages) for line in query.lines()]
                translated = await asyncio.gather(*lines, return_exceptions=True)
                for number, hypotheses in enumerate(translated, start=1):
                    if isinstance(hypotheses, InputError):
                        raise RequestError(400, f"line {number} of q: {hypotheses}")
                    if isinstance(hypotheses, BaseException):
                        raise hypotheses
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

    async def translate(self, line: str, languages: Languages) -> list[str]:
        """Return the hypotheses of a line, as many as the beam size."""
        future = self.executor(languages).submit(line)
        return [other.text for other in (await asyncio.wrap_future(future)).hypotheses]

    def executor(self, languages: Languages) -> TranslationExecutor:
        """Return the executor of languages, which is kept."""
        if languages not in self.executors:
            beam_size = self.translator.model.generation.get("beam_size", 1)
            options = {"num_hypotheses": beam_size, **languages._asdict()}
            self.executors[languages] = self.translator.executor(**options)
        return self.executors[languages]

    def _warm_up(self) -> None:
        """Compile what lines of all lengths need: their lengths are powers of two."""
        languages = Languages(next(iter(self.sources.values())), next(iter(self.targets.values())))
        for line in self._lines_of_each_length(languages):
            self.executor(languages).submit(line).result()

    def _lines_of_each_length(self, languages: Languages) -> list[str]:
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
