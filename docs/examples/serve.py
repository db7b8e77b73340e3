"""A server of Python's standard library: copy this program, and change it.

    python serve.py runs/0 8000
    curl localhost:8000 -d '{"q": ["nine", "twelve"]}'

A thread for each client submits its texts. They enter the search that runs, and the client gets
the answer as soon as its own texts are translated.
"""

import contextlib
import json
import signal
import socket
import sys
from concurrent.futures import wait
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from jax_transformer import Translator

MOST_BYTES, MOST_TEXTS = 2**20, 1024  # of a request


class Handler(BaseHTTPRequestHandler):
    """Reads {"q": a text, or a list of texts}, and writes {"translatedText": the same}."""

    timeout = 60  # seconds for which a client that sends its request may pause

    def do_POST(self) -> None:
        """Answer one request; a bad one gets status 400 and one line."""
        try:
            asked = self.read()
            found = self.translate([asked] if isinstance(asked, str) else asked)
            status, reply = 200, {"translatedText": found[0] if isinstance(asked, str) else found}
        except (ValueError, RecursionError) as error:
            status, reply = 400, {"error": str(error)}
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(reply).encode())

    def read(self) -> str | list[str]:
        """Return what the request asks for; a ValueError says why it cannot be answered."""
        length = int(self.headers.get("Content-Length", 0))
        if not 0 <= length <= MOST_BYTES:
            raise ValueError(f"a request has at most {MOST_BYTES:,} bytes")
        fields = json.loads(self.rfile.read(length))
        if not isinstance(fields, dict) or "q" not in fields:
            raise ValueError('the request has no "q": send {"q": a text, or a list of texts}')
        texts = fields["q"] if isinstance(fields["q"], list) else [fields["q"]]
        if len(texts) > MOST_TEXTS or not all(isinstance(text, str) for text in texts):
            raise ValueError(f'"q" must be a text, or a list of at most {MOST_TEXTS:,} texts')
        return fields["q"]

    def translate(self, texts: list[str]) -> list[str]:
        """Return the translations of texts; those of a client that leaves are cancelled."""
        futures = [self.server.executor.submit(text) for text in texts]
        try:
            while wait(futures, timeout=1).not_done:
                self.connection.settimeout(0)
                with contextlib.suppress(BlockingIOError):  # the client waits, and says nothing
                    if not self.connection.recv(1, socket.MSG_PEEK):
                        raise ConnectionAbortedError("the client has left")
                self.connection.settimeout(self.timeout)
            return [future.result().text for future in futures]
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


def make_server(translator: Translator, port: int) -> Server:
    """Return a server of this machine alone; name another host than localhost to let others in."""
    server = Server(("localhost", port), Handler)
    server.executor = translator.executor(overlong="cut")
    return server


if __name__ == "__main__":
    with make_server(Translator(sys.argv[1]), int(sys.argv[2])) as server:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: sys.exit())
        print(f"serving on http://localhost:{server.server_port}", flush=True)
        server.serve_forever()
