"""An executor whose texts enter a search that already runs; a thread runs it."""

import queue
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from types import TracebackType

from jax_transformer.decoding.generation import NonFiniteError
from jax_transformer.errors import InputError, shorten
from jax_transformer.translation.pools import Pool, slot_length
from jax_transformer.translation.result import TranslationResult
from jax_transformer.translation.sources import Source, encode_sources
from jax_transformer.translation.translate import TextSearch, Translation

MOST_STEPS = 4  # after which texts that have come enter
Submitted = tuple[str, Future[TranslationResult]]


class TranslationExecutor:
    """Translates texts in the order in which they end; `Translator.executor` makes it.

    A text enters the search while others run, and waits for none of them. Its result is that of a
    call, whatever runs beside it. Threads may share an executor.
    """

    def __init__(self, search: TextSearch, prefix: str = "") -> None:
        self._submitted: queue.SimpleQueue[Submitted | None] = queue.SimpleQueue()
        self._is_open, self._lock = True, threading.Lock()
        self._thread = threading.Thread(
            target=_translate_all, args=(search, prefix, self._submitted), daemon=True
        )
        self._thread.start()

    def submit(self, text: str) -> Future[TranslationResult]:
        """Return the future result of a text.

        Until its translation begins the future can be cancelled. The exception of a text that is
        too long, or no source of this model, is an `InputError`; the other texts go on.

        Raises:
            InputError: The text is no string, or the executor was shut down.
        """
        if not isinstance(text, str):
            raise InputError(f"text={shorten(text)} must be a string")
        future: Future[TranslationResult] = Future()
        with self._lock:  # nothing is submitted behind the None of `shutdown`
            if not self._is_open:
                raise InputError("the executor was shut down; make another one")
            self._submitted.put((text, future))
        return future

    def shutdown(self) -> None:
        """Translate what was submitted, and end the thread."""
        with self._lock:
            self._is_open = False
            self._submitted.put(None)
        self._thread.join()

    def __enter__(self) -> "TranslationExecutor":
        """Return the executor; the end of the block shuts it down."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()


def _translate_all(
    search: TextSearch, prefix: str, submitted: "queue.SimpleQueue[Submitted | None]"
) -> None:
    """Complete the futures of all texts until None is submitted."""
    is_open = True
    futures: dict[int, Future[TranslationResult]] = {}  # of the texts in the search

    def texts() -> Iterator[str | None]:
        nonlocal is_open
        number = 0
        while is_open:
            try:
                item = submitted.get(block=not futures)
            except queue.Empty:
                yield None
                continue
            is_open = item is not None
            if is_open and item[1].set_running_or_notify_cancel():
                number += 1
                futures[number] = item[1]
                yield item[0]

    while is_open:
        try:
            for number, found in translate_as_completed(search, texts(), prefix=prefix):
                if isinstance(found, InputError):
                    futures.pop(number).set_exception(found)
                else:
                    futures.pop(number).set_result(TranslationResult(found))
        except Exception as error:  # what is no fault of a text; the next texts begin anew
            for future in futures.values():
                future.set_exception(error)
            futures.clear()


def translate_as_completed(
    search: TextSearch, texts: Iterable[str | None], *, prefix: str = ""
) -> Iterator[tuple[int, list[Translation] | InputError]]:
    """Yield the number of each text, from 1, and its translations as soon as they are complete.

    Each length of slots has a pool, which takes in a text while others run. Its slots have room for
    the longest translation: a text that outgrew its slot would begin again, and be late.

    Args:
        texts: None says that no text is there at present: those that run then take a few steps.
        prefix: Put before every text that is not blank.

    Yields:
        The error in place of translations of a text that is too long or no source of this model.
    """
    model, overlong = search.models[0], search.lines.overlong
    pools: dict[int, Pool] = {}  # by the length of their slots
    left: dict[int, Source] = {}  # the texts that are not complete
    for number, text in _numbered(texts, left):
        if text is not None:
            try:
                (source,) = encode_sources(model, overlong, [Source(text, number)], prefix=prefix)
            except InputError as error:
                yield number, error
                continue
            if not source.ids:
                yield number, search.blank()
                continue
            length = slot_length(len(source.ids), model.config)
            if length not in pools:
                pools[length] = search.pool(length, search.limit(length))
            left[number] = source
            pools[length].waiting.append(number)
            if len(pools[length].waiting) < pools[length].slots.num_free:
                continue  # more of them may be there
        for pool in pools.values():
            for ended in search.advance(pool, left, MOST_STEPS):
                source = left.pop(ended.member)
                try:
                    yield ended.member, search.found(ended, source)
                except NonFiniteError as error:
                    yield ended.member, error


def _numbered(
    texts: Iterable[str | None], left: dict[int, Source]
) -> Iterator[tuple[int, str | None]]:
    """Yield texts and their numbers, and None; behind the last text while any source is left."""
    number = 0
    for text in texts:
        number += text is not None
        yield number, text
    while left:
        yield number, None
