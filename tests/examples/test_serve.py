"""docs/examples/serve.py: twenty clients at once, and requests that are refused."""

import json
import sys
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from jax_transformer import Translator
from tests.examples.processes import EXAMPLES
from tests.models import tiny_model, unchecked

sys.path.insert(0, str(EXAMPLES))
import serve

TEXTS = ["abba", "a", "cab cab", "b", "bacab", "dab", "dead", "fade a bed", "", "cafe"] * 2


@pytest.fixture(scope="module")
def translator():
    return Translator(tiny_model(["abc cab fed dab bead"], vocab_size=16, seed=128, max_length=40))


@pytest.fixture
def ask(translator):
    server = serve.make_server(translator, 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def ask(body):
        try:
            address = f"http://localhost:{server.server_port}"
            with urllib.request.urlopen(address, body, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as refused:
            return refused.code, json.load(refused)

    yield ask
    server.shutdown()
    server.server_close()


@pytest.mark.exhaustive
def test_clients_at_once_get_the_translations_of_their_texts(ask, translator):
    expected = [result.text for result in translator(TEXTS)]
    with ThreadPoolExecutor(20) as pool:
        bodies = [json.dumps({"q": text}).encode() for text in TEXTS]
        answers = list(pool.map(ask, bodies))
    assert answers == [(200, {"translatedText": text}) for text in expected]
    several = json.dumps({"q": TEXTS}).encode()
    assert ask(several) == (200, {"translatedText": expected})


def test_a_bad_request_is_one_line_and_others_are_answered(ask):
    for body in (b"", b"{", b"[1]", b'{"p": "a"}', b'{"q": 3}', b'{"q": [3]}', b"\xff"):
        with unchecked():
            status, reply = ask(body)
        assert status == 400
        assert reply.keys() == {"error"}
        assert "\n" not in reply["error"]
    assert ask(b'{"q": []}') == (200, {"translatedText": []})
