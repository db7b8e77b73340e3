"""A server of Python's standard library: copy this program, and change it.

    python serve.py runs/0 8000
    curl localhost:8000 -d '{"q": ["nine", "twelve"]}'

A thread for each client submits its texts. They enter the search that runs, and the client gets
the answer as soon as its own texts are translated.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from jax_transformer import Translator

MOST_BYTES = 2**20  # of a request


class Handler(BaseHTTPRequestHandler):
    """Reads {"q": a text, or a list of texts}, and writes {"translatedText": the same}."""

    def do_POST(self) -> None:
        """Answer one request; a bad one gets status 400 and one line."""
        try:
            length = int(self.headers.get("Content-Length", 0))
            if not 0 <= length <= MOST_BYTES:
                raise ValueError(f"a request has at most {MOST_BYTES:,} bytes")
            asked = json.loads(self.rfile.read(length))["q"]
            texts = [asked] if isinstance(asked, str) else asked
            futures = [self.server.executor.submit(text) for text in texts]
            found = [future.result().text for future in futures]
            status, reply = 200, {"translatedText": found[0] if isinstance(asked, str) else found}
        except (ValueError, LookupError, TypeError) as error:
            status, reply = 400, {"error": str(error)}
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(reply).encode())


class Server(ThreadingHTTPServer):
    """Keeps as many clients waiting for a connection as may come at once."""

    request_queue_size = 1024


def make_server(translator: Translator, port: int) -> Server:
    """Return a server of this machine alone; name another host than localhost to let others in."""
    server = Server(("localhost", port), Handler)
    server.executor = translator.executor(overlong="cut")
    return server


if __name__ == "__main__":
    server = make_server(Translator(sys.argv[1]), int(sys.argv[2]))
    print(f"serving on http://localhost:{server.server_port}", flush=True)
    server.serve_forever()
