"""An executor whose texts enter a search that already runs; a thread runs it."""

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from types import TracebackType

from jax_transformer.errors import InputError, shorten
from jax_transformer.translation.as_completed import translate_as_completed
from jax_transformer.translation.result import TranslationResult
from jax_transformer.translation.translate import TextSearch

Submitted = tuple[str, Future[TranslationResult]]


class TranslationExecutor:
    """Translates texts in the order in which they end; `Translator.executor` makes it.

    A text enters the search while others run, and waits for none of them. Its result is that of a
    call, whatever runs beside it. Threads may share an executor.
    """

    def __init__(self, search: TextSearch, prefix: str = "") -> None:
        self._submitted: queue.SimpleQueue[Submitted | None] = queue.SimpleQueue()
        self._is_open, self._lock = True, threading.Lock()
        given = search, prefix, self._submitted
        self._thread = threading.Thread(target=_translate_all, args=given, daemon=True)
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
