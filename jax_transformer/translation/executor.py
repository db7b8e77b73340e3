"""An executor whose texts enter a search that already runs; a thread runs it."""

import atexit
import contextlib
import itertools
import logging
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future

import jax

from jax_transformer.decoding.slots import SlotSearch
from jax_transformer.errors import InputError, shorten
from jax_transformer.text.text_files import is_blank
from jax_transformer.translation.alignment_plot import alignments
from jax_transformer.translation.pools import slot_length
from jax_transformer.translation.result import TranslationResult
from jax_transformer.translation.sources import Source, encode_sources
from jax_transformer.translation.translate import TextSearch, Translation

MOST_STEPS = 4  # after which texts that have come enter
Submitted = tuple[Source, Future[TranslationResult]]


class TranslationExecutor(Executor):
    """Translates texts in the order in which they end; `Translator.executor` makes it.

    It is an executor of Python's `concurrent.futures` that takes texts, and no functions. A text
    enters the search while others run, and waits for none of them. Its result is that of a call,
    whatever runs beside it. Threads may share an executor. The end of the process waits for what
    was submitted, where `os._exit` or a signal does not end it.
    """

    def __init__(self, search: TextSearch, prefix: str = "", with_alignments: bool = False) -> None:
        self._search, self._prefix, self._numbers = search, prefix, itertools.count(1)
        self._submitted: queue.SimpleQueue[Submitted | None] = queue.SimpleQueue()
        self._is_open, self._lock = True, threading.Lock()
        self._thread = threading.Thread(
            target=_translate_all, args=(search, self._submitted, with_alignments), daemon=True
        )
        self._thread.start()
        atexit.register(self.shutdown)  # which a thread that is no daemon would never let begin

    def submit(self, text: str) -> Future[TranslationResult]:
        """Return the future result of a text.

        Until its translation begins the future can be cancelled. The exception of a text that is
        too long, or no source of this model, is an `InputError`; the other texts go on.

        Raises:
            InputError: The text is no string, or the executor was shut down, or `os.fork` has made
                this process, without the thread of the executor.
        """
        if not isinstance(text, str):
            raise InputError(f"text={shorten(text)} must be a string")
        if self._is_open and not self._thread.is_alive():
            raise InputError("os.fork has left the executor behind; make one in each process")
        future: Future[TranslationResult] = Future()
        line = text if is_blank(text) else self._prefix + text
        source = Source(line, next(self._numbers), name=f"text={shorten(text)}")
        model, overlong = self._search.models[0], self._search.lines.overlong
        try:  # here, in the thread of the caller: no text holds up the search
            (source,) = encode_sources(model, overlong, [source])
            if not source.ids:
                future.set_result(TranslationResult(self._search.blank()))
        except InputError as error:
            future.set_exception(error)
        with self._lock:  # nothing is submitted behind the None of `shutdown`
            if not self._is_open:
                raise InputError("the executor was shut down; make another one")
            if not future.done():
                self._submitted.put((source, future))
        return future

    def map(
        self, texts: Iterable[str], timeout: float | None = None
    ) -> Iterator[TranslationResult]:
        """Submit texts, and return an iterator over their results, in the order of the texts.

        The end of the iterator cancels the texts that have not begun: an error of a text ends it,
        and so does a TimeoutError, where a result is not there `timeout` seconds after the call.
        """
        end = None if timeout is None else time.monotonic() + timeout
        return _results([self.submit(text) for text in texts], end)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more texts; the thread ends when those that were submitted are translated.

        Args:
            wait: Whether to wait for that end. A callback of a future never waits.
            cancel_futures: Whether texts that have not begun are cancelled.
        """
        dropped: list[Submitted | None] = []
        with self._lock, contextlib.suppress(queue.Empty):
            self._is_open = False
            while cancel_futures:
                dropped.append(self._submitted.get_nowait())
        self._submitted.put(None)
        for _, future in filter(None, dropped):
            _complete(future, None)
            future.set_running_or_notify_cancel()
        if wait and self._thread is not threading.current_thread():
            self._thread.join()
            atexit.unregister(self.shutdown)


def _results(
    futures: list[Future[TranslationResult]], end: float | None
) -> Iterator[TranslationResult]:
    try:
        for future in futures:
            yield future.result(None if end is None else end - time.monotonic())
    finally:
        for future in futures:
            future.cancel()


def _complete(
    future: Future[TranslationResult], found: TranslationResult | BaseException | None
) -> None:
    """Give a future what was found; None cancels it. No callback of it ends the thread."""
    try:
        if found is None:
            future.cancel()
        elif isinstance(found, BaseException):
            future.set_exception(found)
        else:
            future.set_result(found)
    except BaseException:  # SystemExit: other exceptions of callbacks are logged by the future
        logging.getLogger("concurrent.futures").exception("calling the callbacks of %r", future)


def _translate_all(
    search: TextSearch, submitted: "queue.SimpleQueue[Submitted | None]", with_alignments: bool
) -> None:
    """Complete the futures of all sources until None is submitted."""
    is_open = True
    running: dict[int, Submitted] = {}  # the sources in the search

    def sources() -> Iterator[Source | None]:
        nonlocal is_open
        while is_open:
            try:
                item = submitted.get(block=not running)
            except queue.Empty:
                yield None
                continue
            is_open = item is not None
            if is_open and item[1].set_running_or_notify_cancel():
                running[item[0].line] = item
                yield item[0]

    def result(
        source: Source, found: list[Translation] | InputError
    ) -> TranslationResult | InputError:
        if isinstance(found, InputError):
            return found
        aligned = None
        if with_alignments:
            (aligned,) = alignments(search.models[0], [source.text], [found], skip=source.line - 1)
        return TranslationResult(found, aligned)

    while is_open:
        try:
            for number, found in translate_as_completed(search, sources()):
                completed = result(running[number][0], found)
                _complete(running.pop(number)[1], completed)
        except BaseException as error:  # what is no fault of a text; the next texts begin anew
            for _, future in running.values():
                _complete(future, error)
            running.clear()


def translate_as_completed(
    search: TextSearch, sources: Iterable[Source | None]
) -> Iterator[tuple[int, list[Translation] | InputError]]:
    """Yield the line of each source, and its translations as soon as they are complete.

    Each length of slots has a pool, which takes in a source while others run. Its slots have room
    for the longest translation: one that outgrew its slot would begin again, and be late.

    Args:
        sources: With ids, and each with another line. None says that no source is there at present:
            those that run then take a few steps.

    Yields:
        The error in place of translations whose logits are not finite.
    """
    pools: dict[int, SlotSearch] = {}  # by the length of their slots
    left: dict[int, Source] = {}  # the sources that are not complete
    for entering in _while_left(sources, left):
        if entering is not None:
            length = slot_length(len(entering.ids), search.models[0].config)
            if length not in pools:
                pools[length] = search.pool(length, search.limit(length))
            left[entering.line] = entering
            pools[length].waiting.append(entering.line)
            if len(pools[length].waiting) < pools[length].num_free:
                continue  # more of them may be there
        for pool in pools.values():
            with jax.set_mesh(search.mesh):
                all_ended = pool.advance(search.next_group(pool, left), MOST_STEPS)
            for ended in all_ended:
                source = left.pop(ended.member)
                try:
                    yield ended.member, search.found(ended, source)
                except InputError as error:
                    yield ended.member, error


def _while_left(
    sources: Iterable[Source | None], left: Mapping[int, Source]
) -> Iterator[Source | None]:
    """Yield sources, and behind the last one None while any is left."""
    yield from sources
    while left:
        yield None
