"""A server of Python's standard library: copy this program, and change it.

    python serve.py runs/0 8000
    curl localhost:8000 -d '{"q": ["nine", "twelve"]}'

A thread for each client puts its texts into one queue. What comes during a translation waits, and
is translated together.
"""

import json
import queue
import sys
import threading
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from jax_transformer import Translator

MOST_BYTES = 2**20  # of a request
Request = tuple[list[str], Future]


def answer(translator: Translator, requests: list[Request]) -> None:
    """Translate the texts of several requests together; what cannot be translated fails alone."""
    try:
        results = translator([text for texts, _ in requests for text in texts], overlong="cut")
        found = [result.text for result in results]
        for texts, future in requests:
            future.set_result([found.pop(0) for _ in texts])
    except Exception as error:
        if len(requests) == 1:
            requests[0][1].set_exception(error)
        for request in requests if len(requests) > 1 else ():
            answer(translator, [request])


def answer_forever(translator: Translator, waiting: queue.Queue[Request]) -> None:
    """Answer requests; those that come during a translation share the next one."""
    while True:
        answer(translator, [waiting.get(), *(waiting.get() for _ in range(waiting.qsize()))])


class Handler(BaseHTTPRequestHandler):
    """Reads {"q": a text, or a list of texts}, and writes {"translatedText": the same}."""

    def do_POST(self) -> None:
        """Answer one request; a bad one gets status 400 and one line."""
        try:
            length = int(self.headers.get("Content-Length", 0))
            if not 0 <= length <= MOST_BYTES:
                raise ValueError(f"a request has at most {MOST_BYTES:,} bytes")
            asked, future = json.loads(self.rfile.read(length))["q"], Future()
            self.server.waiting.put(([asked] if isinstance(asked, str) else list(asked), future))
            found = future.result()
            status, reply = 200, {"translatedText": found[0] if isinstance(asked, str) else found}
        except (ValueError, LookupError, TypeError) as error:
            status, reply = 400, {"error": str(error)}
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(reply).encode())


def make_server(translator: Translator, port: int) -> ThreadingHTTPServer:
    """Return a server of this machine alone; name another host than localhost to let others in."""
    server = ThreadingHTTPServer(("localhost", port), Handler)
    server.waiting = queue.Queue()
    arguments = translator, server.waiting
    threading.Thread(target=answer_forever, args=arguments, daemon=True).start()
    return server


if __name__ == "__main__":
    server = make_server(Translator(sys.argv[1]), int(sys.argv[2]))
    print(f"serving on http://localhost:{server.server_port}", flush=True)
    server.serve_forever()
