"""docs/examples/serve.py: clients at once, bad requests, clients that leave, pages, signals."""

import http.client
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.examples.processes import EXAMPLES, ROOT
from tests.translation.streams import HeldSearch

sys.path.insert(0, str(EXAMPLES))
import serve

TEXTS = ["abba", "a", "cab cab", "b", "bacab", "dab", "dead", "fade a bed", "", "cafe"] * 2
NO_TEXTS = '"q" must be a text, or a list of at most 1,024 texts'
NO_Q = 'the request has no "q": send {"q": a text, or a list of texts}'


@pytest.fixture
def server(translator):
    server = serve.make_server(translator, 0)
    # Looks every 0.01 s whether it shall end, in the place of 0.5 s.
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()
    of_texts(server).shutdown()


def of_texts(server):
    """Return the executor of requests that name no option."""
    return server.executor(beam_size=None, alignments=False)


def answer_to(port, method, path="/", body=None, headers=()):
    """Return the status, the headers and the content of an answer."""
    client = http.client.HTTPConnection("localhost", port, timeout=60)
    client.request(method, path, body, dict(headers))
    answer = client.getresponse()
    return answer.status, answer.headers, answer.read().decode()


def ask(port, body, headers=()):
    """Return the status and the content of an answer to a text."""
    status, _, content = answer_to(port, "POST", body=body, headers=headers)
    return status, json.loads(content)


@pytest.mark.exhaustive
def test_clients_at_once_get_the_translations_of_their_texts(server, translator):
    expected = [result.text for result in translator(TEXTS)]
    with ThreadPoolExecutor(20) as pool:
        bodies = [json.dumps({"q": text}).encode() for text in TEXTS]
        answers = list(pool.map(lambda body: ask(server.server_port, body), bodies))
    assert answers == [(200, {"translatedText": text}) for text in expected]
    several = json.dumps({"q": TEXTS}).encode()
    assert ask(server.server_port, several) == (200, {"translatedText": expected})


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting property name"),
        (b"\xff", "'utf-8' codec can't decode byte 0xff"),
        (b"[" * 100_000, ""),  # in words of Python
        (b"[1]", NO_Q),
        (b'{"p": "a"}', NO_Q),
        (b'"q"', NO_Q),
        (b'{"q": 3}', NO_TEXTS),
        (b'{"q": null}', NO_TEXTS),
        (b'{"q": {"cab": 1}}', NO_TEXTS),
        (b'{"q": ["a", 3]}', NO_TEXTS),
        (json.dumps({"q": [""] * 1025}).encode(), NO_TEXTS),
        (b'{"q": "a\\ud800"}', "the tokenizer cannot split the line 'a\\ud800'"),
        (b'{"q": "a", "beam": 4}', '"beam" is none of "q", "beams", "details"'),
        (b'{"q": "a", "\\n": 4}', '"\\n" is none of'),
        (b'{"q": "a", "beams": 0}', '"beams" must be a whole number from 1 to 8'),
        (b'{"q": "a", "beams": 9}', '"beams" must be a whole number from 1 to 8'),
        (b'{"q": "a", "beams": "4"}', '"beams" must be a whole number from 1 to 8'),
        (b'{"q": "a", "beams": [4]}', '"beams" must be a whole number from 1 to 8'),
        (b'{"q": "a", "details": {}}', '"details" must be true or false'),
        (b'{"q": ["a"], "details": true}', '"details" must be true or false, and false for a'),
    ],
)
def test_a_bad_request_is_one_line(server, body, reason):
    status, reply = ask(server.server_port, body)
    assert (status, list(reply)) == (400, ["error"])
    assert reply["error"].startswith(reason)
    assert "\n" not in reply["error"]


@pytest.mark.parametrize("length", [-1, 2**20 + 1, "x"])
def test_a_bad_length_is_refused_before_the_body_is_read(server, length):
    status, reply = ask(server.server_port, b"{", {"Content-Length": str(length)})
    assert (status, list(reply)) == (400, ["error"])


def test_no_text_and_texts_of_blanks_are_answered(server):
    for texts in ([], [""] * 1024):
        body = json.dumps({"q": texts}).encode()
        assert ask(server.server_port, body) == (200, {"translatedText": texts})


def test_beams_and_details_are_those_of_a_call(server, translator):
    body = json.dumps({"q": "cab", "beams": 3, "details": True}).encode()
    status, reply = ask(server.server_port, body)
    expected = translator("cab", beam_size=3, alignments=True)
    assert expected.text != translator("cab").text
    assert (status, reply["translatedText"]) == (200, expected.text)
    assert reply["score"] == pytest.approx(expected.score, abs=1e-4)
    assert [reply["source"], reply["target"]] == list(expected.alignment[1:3])
    assert np.allclose(reply["weights"], expected.alignment.weights, atol=1e-4)
    blank = {"translatedText": "", "score": 0.0}
    assert ask(server.server_port, b'{"q": " ", "details": true}') == (200, blank)


def test_the_page_is_one_short_file(server):
    status, headers, page = answer_to(server.server_port, "GET")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert page == (EXAMPLES / "serve.html").read_text("utf-8")
    assert page.count("\n") <= 80
    assert set(re.findall(r'(?:src|href)="(.*?)"|(?:url|import)\(', page)) == {"data:,"}
    status, _, reply = answer_to(server.server_port, "GET", "/serve.py")
    assert (status, list(json.loads(reply))) == (404, ["error"])


ORIGIN = "https://example.org"


@pytest.mark.parametrize("body", ['{"q": ""}', "{}"])
@pytest.mark.parametrize("origin", [ORIGIN, "https://example.com", "null", None])
def test_pages_of_one_other_origin_may_ask(server, monkeypatch, body, origin):
    headers = {} if origin is None else {"Origin": origin}
    for allowed in (None, ORIGIN):
        monkeypatch.setattr(server, "allow_origin", allowed)
        for method in ("OPTIONS", "POST"):
            status, answered, _ = answer_to(server.server_port, method, body=body, headers=headers)
            assert status == (204 if method == "OPTIONS" else 200 if "q" in body else 400)
            expected = (ORIGIN, "Content-Type") if origin == allowed == ORIGIN else (None, None)
            names = ("Access-Control-Allow-Origin", "Access-Control-Allow-Headers")
            assert tuple(answered[name] for name in names) == expected


def request(texts):
    """Return the bytes of a request."""
    body = json.dumps({"q": texts}).encode()
    return b"POST / HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def leave(server, sent, is_reset):
    """Send a part of a request and close the connection, in order or not."""
    with socket.create_connection(server.server_address) as client:
        client.sendall(sent)
        if is_reset:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_client_that_leaves_is_no_error_of_the_server(server, capfd, is_reset):
    whole = request("abba")
    for part in (b"", whole[:5], whole[:-3], whole):
        leave(server, part, is_reset)
    assert ask(server.server_port, b'{"q": "abba"}')[0] == 200
    server.shutdown()
    server.server_close()  # waits for all
    said = capfd.readouterr().err
    assert "Traceback" not in said
    assert "POST" in said


def test_another_error_is_shown(server, capfd, monkeypatch):
    monkeypatch.setattr(of_texts(server), "submit", None)
    with pytest.raises(ConnectionError):
        ask(server.server_port, b'{"q": "abba"}')
    server.shutdown()
    server.server_close()
    assert "TypeError" in capfd.readouterr().err


def test_texts_of_a_client_that_leaves_are_cancelled(server, monkeypatch):
    submitted, held, submit = [], HeldSearch(monkeypatch), of_texts(server).submit
    monkeypatch.setattr(
        of_texts(server), "submit", lambda text: submitted.append(submit(text)) or submitted[-1]
    )
    running = submit("abba")
    assert held.begun.wait(60)
    with ThreadPoolExecutor(1) as others:
        stays = others.submit(ask, server.server_port, b'{"q": "abba"}')
        while not submitted:
            time.sleep(0.01)
        leave(server, request(["cab"] * 9), is_reset=False)
        end = time.monotonic() + 30
        while sum(future.cancelled() for future in submitted) < 9 and time.monotonic() < end:
            time.sleep(0.05)
        cancelled = [future.cancelled() for future in submitted]
        held.goes_on.set()
        assert cancelled == [False, *[True] * 9]
        assert stays.result() == (200, {"translatedText": running.result(60).text})


def start(folder, *options):
    """Return a process that serves a model, and its port."""
    process = subprocess.Popen(
        [sys.executable, EXAMPLES / "serve.py", folder, "0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        text=True,
    )
    return process, int(process.stdout.readline().rpartition(":")[2])


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_behind_the_answers_to_those_who_asked(folder, translator, number):
    process, port = start(folder)
    body = json.dumps({"q": TEXTS * 20}).encode()
    expected = [each.text for each in translator(TEXTS)]
    with ThreadPoolExecutor(8) as clients:
        answers = [clients.submit(ask, port, body) for _ in range(8)]
        time.sleep(1)  # the search is being compiled
        process.send_signal(number)
        said = process.communicate(timeout=120)[1]
        assert not any(future.exception() for future in answers), said
    assert {future.result()[0] for future in answers} == {200}
    assert all(future.result()[1]["translatedText"] == expected * 20 for future in answers)
    assert process.returncode == 0
    assert "Traceback" not in said


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_server_at_once(folder, number):
    process, port = start(folder, "--allow-origin", ORIGIN)
    _, headers, _ = answer_to(port, "OPTIONS", headers={"Origin": ORIGIN})
    assert headers["Access-Control-Allow-Origin"] == ORIGIN
    with socket.create_connection(("localhost", port)):  # and says nothing
        time.sleep(0.5)
        process.send_signal(number)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(number)
        said = process.communicate(timeout=5)[1]
    assert process.returncode == -number
    assert "Traceback" not in said
