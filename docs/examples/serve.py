"""A server of Python's standard library: copy this program and its page, and change them.

    python serve.py runs/0 8000
    curl localhost:8000 -d '{"q": ["nine", "twelve"]}'

A browser shows the page, serve.html, at http://localhost:8000. A thread for each client submits
its texts. They enter the search that runs, and the client gets the answer as soon as its own texts
are translated.
"""

import argparse
import contextlib
import json
import signal
import socket
import sys
import threading
from concurrent.futures import wait
from functools import cache, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from jax_transformer import Translator
from jax_transformer.translation.result import TranslationResult

MOST_BYTES, MOST_TEXTS, MOST_BEAMS = 2**20, 1024, 8  # of a request
PAGE = Path(__file__).with_name("serve.html")


class Handler(BaseHTTPRequestHandler):
    """Reads {"q": a text, or a list of texts}, and writes {"translatedText": the same}.

    "beams" is the size of the beam; "details": true adds the score and the alignment of one text.
    """

    timeout = 10  # seconds for which a client that sends its request may pause

    def do_GET(self) -> None:
        """Answer the page."""
        if self.path == "/":
            self.answer(200, PAGE.read_bytes(), "text/html; charset=utf-8")
        else:
            self.answer(404, b'{"error": "the page is at /"}')

    def do_OPTIONS(self) -> None:
        """Tell a browser whether a page of another origin may send a request."""
        self.answer(204, b"")

    def do_POST(self) -> None:
        """Answer one request; a bad one gets status 400 and one line."""
        try:
            status, reply = 200, self.reply(**self.read())
        except (ValueError, RecursionError) as error:
            status, reply = 400, {"error": str(error)}
        self.answer(status, json.dumps(reply).encode())

    def answer(self, status: int, content: bytes, kind: str = "application/json") -> None:
        """Write an answer, which pages of the allowed origin may read."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        if (origin := self.server.allow_origin) and self.headers.get("Origin") == origin:
            self.send_header("Access-Control-Allow-Origin", origin)
            self.send_header("Access-Control-Allow-Headers", "Content-Type")
        self.end_headers()
        self.wfile.write(content)

    def read(self) -> dict[str, Any]:
        """Return the fields of the request; a ValueError says why it cannot be answered."""
        length = int(self.headers.get("Content-Length", 0))
        if not 0 <= length <= MOST_BYTES:
            raise ValueError(f"a request has at most {MOST_BYTES:,} bytes")
        fields = json.loads(self.rfile.read(length))
        if not isinstance(fields, dict) or "q" not in fields:
            raise ValueError('the request has no "q": send {"q": a text, or a list of texts}')
        for name in fields.keys() - {"q", "beams", "details"}:
            raise ValueError(f'{json.dumps(name[:60])} is none of "q", "beams", "details"')
        is_one = not isinstance(fields["q"], list)
        texts = [fields["q"]] if is_one else fields["q"]
        if len(texts) > MOST_TEXTS or not all(isinstance(text, str) for text in texts):
            raise ValueError(f'"q" must be a text, or a list of at most {MOST_TEXTS:,} texts')
        if fields.get("beams") not in (None, *range(1, MOST_BEAMS + 1)):
            raise ValueError(f'"beams" must be a whole number from 1 to {MOST_BEAMS}')
        if fields.get("details", False) not in (False, is_one):
            raise ValueError('"details" must be true or false, and false for a list of texts')
        return fields

    def reply(self, q: str | list[str], beams: int | None = None, details: bool = False) -> dict:
        """Return what is answered to the fields of a request."""
        options, is_one = {"beam_size": beams, "alignments": details}, isinstance(q, str)
        found = self.translate([q] if is_one else q, **options)
        reply = {"translatedText": found[0].text if is_one else [each.text for each in found]}
        if details:
            reply["score"], aligned = found[0].score, found[0].alignment
            if aligned is not None:  # the text is not blank
                reply["source"], reply["target"] = aligned.source, aligned.target
                reply["weights"] = aligned.weights.astype(float).round(4).tolist()
        return reply

    def translate(self, texts: list[str], **options: Any) -> list[TranslationResult]:
        """Return the translations of texts; those of a client that leaves are cancelled."""
        with self.server.lock:  # texts of equal options share a search
            executor = self.server.executor(**options)
        futures = [executor.submit(text) for text in texts]
        try:
            while wait(futures, timeout=1).not_done:
                self.connection.settimeout(0)
                with contextlib.suppress(BlockingIOError):  # the client waits, and says nothing
                    if not self.connection.recv(1, socket.MSG_PEEK):
                        raise ConnectionAbortedError("the client has left")
                self.connection.settimeout(self.timeout)
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()


class Server(ThreadingHTTPServer):
    """Keeps as many clients waiting for a connection as may come at once."""

    request_queue_size = 1024
    daemon_threads = False  # the end of the server waits for the answers to those who have asked

    def handle_error(self, *request: Any) -> None:
        """Say what went wrong, but for a client that has left."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(*request)


def make_server(translator: Translator, port: int, allow_origin: str | None = None) -> Server:
    """Return a server of this machine alone; name another host than localhost to let others in."""
    server = Server(("localhost", port), Handler)
    server.allow_origin, server.lock = allow_origin, threading.Lock()
    server.executor = cache(partial(translator.executor, overlong="cut", num_hypotheses=1))
    server.executor(beam_size=None, alignments=False)  # which checks the model
    return server


def end(number: int, _: Any) -> None:
    """End the server behind its answers; the same signal ends it at once then."""
    signal.signal(number, signal.SIG_DFL)
    print("\nending after the running requests; once more ends at once", flush=True)
    sys.exit()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="its folder")
    parser.add_argument("port", type=int)
    parser.add_argument("--allow-origin", help="whose pages may ask, as https://example.org")
    given = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    with make_server(Translator(given.model), given.port, given.allow_origin) as server:
        print(f"serving on http://localhost:{server.server_port}", flush=True)
        server.serve_forever()
