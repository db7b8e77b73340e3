"""docs/examples/ray_serve.py: requests become answers; a real server, its client and a kill."""

import asyncio
import json
import os
import random
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlencode

import pytest

from jax_transformer import InputError
from jax_transformer.translation.executor import TranslationExecutor
from jax_transformer.translation.translate import translate
from tests.examples.processes import EXAMPLES, REPLICA, ROOT, descendants, finished
from tests.tiers import tiered_rows
from tests.translation.streams import HeldSearch, varied_model

pytest.importorskip("ray.serve")
sys.path.insert(0, str(EXAMPLES))
import ray_serve
from ray_serve import Languages, RequestError, answer, read_query
from starlette.requests import Request

CODES = {"en": None}, {"de": None, "fr": None}
JSON = "application/json; charset=utf-8"
PLAIN = {"q": "abba", "source": "en", "target": "de"}
LINES = ["abba", "a", "cab cab cab", "b", "bacab", "fed dab", "dead", "fade a bed", "", "cafe"]


@pytest.fixture(scope="module")
def model():
    return varied_model()._replace(generation={"beam_size": 3})


@pytest.fixture(scope="module")
def expected(model):
    return {
        line: [best.text for best in hypotheses]
        for line, hypotheses in zip(LINES, translate(model, LINES, num_hypotheses=3), strict=True)
    }


@pytest.fixture
def replica(translator):
    """A replica without Ray: what it does to lines and to requests."""
    served = object.__new__(ray_serve.LibreTranslate.func_or_class)
    served.translator, served.executors = translator, {}
    served.sources, served.targets = CODES
    yield served
    for executor in served.executors.values():
        executor.shutdown()


def request_of(fields, method="POST", path="/translate", form=False, body=None):
    encoded = urlencode(fields) if form else json.dumps(fields)
    parts = [encoded.encode()] if body is None else body
    kind = "application/x-www-form-urlencoded" if form else JSON
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages.append({"type": "http.request", "body": b"", "more_body": False})

    async def receive():
        return messages.pop(0)

    scope = {"type": "http", "method": method, "path": path, "query_string": b""}
    scope["headers"] = [(b"content-type", kind.encode())]
    return Request(scope, receive)


def asked(replica, *request, **options):
    """Return the status and the content of the answer to a request."""
    response = asyncio.run(replica(request_of(*request, **options)))
    return response.status_code, json.loads(response.body)


def test_a_form_and_json_ask_the_same(replica, expected):
    for form in (False, True):
        said = {"translatedText": expected["abba"][0]}
        assert asked(replica, PLAIN, form=form) == (200, said)
        alternatives = PLAIN | {"alternatives": 9, "api_key": "x", "format": "text"}
        said["alternatives"] = expected["abba"][1:]
        assert len(said["alternatives"]) == 2
        assert asked(replica, alternatives, form=form) == (200, said)


def test_lines_of_texts_are_translated_alone_and_put_together_again(replica, expected):
    texts = ["abba\ncab cab cab\r\n", "", "b\n\nbacab"]
    shown = [["abba", "cab cab cab", ""], [""], ["b", "", "bacab"]]
    code, content = asked(replica, PLAIN | {"q": texts, "alternatives": "1"})
    assert code == 200
    for rank, said in enumerate(
        [content["translatedText"], [text[0] for text in content["alternatives"]]]
    ):
        assert said == ["\n".join(expected[line][rank] for line in lines) for lines in shown]


def test_lines_end_as_those_of_a_file_do():
    body = json.dumps(PLAIN | {"q": ["a\r\nb\rc", "d\u2028e"]}).encode()
    assert read_query(JSON, body, *CODES).lines() == ["a", "b\rc", "d\u2028e"]


def test_languages_are_those_of_the_arguments(replica):
    code, content = asked(replica, {}, "GET", "/languages")
    assert code == 200
    assert {one["code"]: one["targets"] for one in content} == {
        "en": ["de", "fr"],
        "de": [],
        "fr": [],
    }
    assert all(one["name"] for one in content)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"source": "en", "target": "de"}, "q is missing"),
        (PLAIN | {"q": ""}, "q is missing"),
        (PLAIN | {"target": None}, "target is missing"),
        (PLAIN | {"source": "auto"}, "source must be one of en"),
        (PLAIN | {"target": ["de"]}, "target must be one of de, fr"),
        (PLAIN | {"format": "html"}, "format must be text"),
        (PLAIN | {"q": ["a", 7]}, "q must be a string or a list of strings"),
        (PLAIN | {"q": {"a": "b"}}, "q must be a string or a list of strings"),
        (PLAIN | {"q": "a" * 5001}, "q has more than 5,000 characters"),
        (PLAIN | {"q": ["a" * 2501] * 2}, "q has more than 5,000 characters"),
        (PLAIN | {"q": "\n" * 128}, "q has more than 128 lines"),
        (PLAIN | {"q": "a\ud800"}, "q is not Unicode text"),
        (PLAIN | {"alternatives": -1}, "alternatives must be a whole number"),
        (PLAIN | {"alternatives": "1" * 5000}, "alternatives must be a whole number"),
        (PLAIN | {"q": "abba\n" + "abc " * 40}, "line 2 of q: text='abc abc"),
        ([], "the body must be a JSON object"),
        (7, "the body must be a JSON object"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_one_line(replica, fields, reason):
    code, content = asked(replica, fields)
    assert (code, list(content)) == (400, ["error"])
    assert content["error"].startswith(reason)
    assert "\n" not in content["error"]


@pytest.mark.parametrize(
    ("kind", "body"),
    [(JSON, b"{"), (JSON, b"\xff"), (JSON, b"[" * 100_000), ("", b"q=%ff"), ("", b"\xff=a")],
)
def test_a_body_of_another_kind_is_refused(kind, body):
    with pytest.raises(RequestError) as refused:
        read_query(kind, body, *CODES)
    said = 400, "the body is neither JSON nor a form"
    assert (refused.value.status, refused.value.reason) == said


def test_other_paths_and_endless_bodies_are_refused(replica):
    assert asked(replica, {}, "POST", "/detect")[0] == 400
    assert asked(replica, {}, "GET", "/translate")[0] == 404
    assert asked(replica, {}, "GET", "/translate/languages")[0] == 404
    assert asked(replica, {}, body=[b"a" * 2**16] * 3)[0] == 413


def test_clients_share_one_search_and_a_bad_line_spoils_no_other(replica, expected):
    lines = [LINES[number % len(LINES)] for number in range(160)]
    lines[5] = "abc " * 40

    async def all_lines():
        asked = [replica.translate(line, Languages(None, None)) for line in lines]
        return await asyncio.gather(*asked, return_exceptions=True)

    for line, result in zip(lines, asyncio.run(all_lines()), strict=True):
        if line in expected:
            assert result == expected[line]
        else:
            assert isinstance(result, InputError)
    assert len(replica.executors) == 1


def test_texts_of_a_client_that_leaves_are_cancelled(replica, monkeypatch):
    executor = replica.executor(Languages(None, None))
    held, submitted = HeldSearch(monkeypatch), []

    def submit(text):
        submitted.append(TranslationExecutor.submit(executor, text))
        return submitted[-1]

    async def leaves():
        answering = asyncio.create_task(replica(request_of(PLAIN | {"q": "cab\n" * 9})))
        while len(submitted) < 11:
            await asyncio.sleep(0)
        answering.cancel()  # as Serve does
        await asyncio.wait([answering])

    monkeypatch.setattr(executor, "submit", submit)
    submit("abba")
    assert held.begun.wait(60)
    asyncio.run(leaves())
    cancelled = [future.cancelled() for future in submitted]
    held.goes_on.set()
    assert cancelled == [False, *[True] * 9, False]  # the last line is blank


def test_codes_of_the_clients_are_those_of_the_model(translator):
    assert ray_serve.read_codes("en,de", translator) == {"en": None, "de": None}
    assert ray_serve.read_codes("en=eng_Latn,de", translator) == {"en": "eng_Latn", "de": None}
    query = read_query("", urlencode(PLAIN).encode(), {"en": "eng_Latn"}, {"de": "deu_Latn"})
    assert query.languages == Languages("eng_Latn", "deu_Latn")
    assert answer(query, [["x"]]) == {"translatedText": "x"}


@pytest.fixture(scope="module")
def server(folder):
    """The address of two replicas on a Ray of this machine."""
    import ray
    from ray import serve

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    several = ray_serve.LibreTranslate.options(num_replicas=2, ray_actor_options={"num_cpus": 0})
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", os.pathsep.join([str(EXAMPLES), str(ROOT)]))
        ray.init(include_dashboard=False, log_to_driver=False)
        serve.start(http_options={"port": port, "request_timeout_s": 60})
        serve.run(several.bind(str(folder), "en", "de"))
        yield f"http://127.0.0.1:{port}"
        serve.shutdown()
        ray.shutdown()


def ask(url, line, timeout=60):
    """Return the status and the text of an answer."""
    body = json.dumps(PLAIN | {"q": line}).encode()
    request = urllib.request.Request(f"{url}/translate", body, {"Content-Type": JSON})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return response.status, json.load(response)["translatedText"]
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.exhaustive
def test_the_client_of_libretranslate_is_understood(server, expected):
    library = pytest.importorskip("libretranslatepy")
    client = library.LibreTranslateAPI(server, api_key="none")
    for line in filter(None, LINES):
        assert client.translate(line, "en", "de") == expected[line][0]
    assert [one["code"] for one in client.languages()] == ["en", "de"]
    for call in (client.detect, lambda text: client.translate(text, "en", "xx")):
        with pytest.raises(urllib.error.HTTPError) as refused:
            call("abba")
        assert refused.value.code == 400
        assert list(json.load(refused.value)) == ["error"]


@pytest.mark.exhaustive
def test_a_replica_that_is_killed_hangs_no_request_and_changes_no_answer(server, expected):
    replicas = descendants(os.getpid(), REPLICA)
    assert len(replicas) == 2
    end, killed = time.monotonic() + 15, []

    def client(seed):
        chosen, answers = random.Random(seed), []
        while (begun := time.monotonic()) < end:
            line = chosen.choice(LINES[:8])
            code, said = ask(server, line)
            answers.append((begun, code, said == expected[line][0]))
        return answers

    with ThreadPoolExecutor(20) as threads:
        clients = [threads.submit(client, seed) for seed in range(20)]
        time.sleep(3)
        os.kill(replicas[0], signal.SIGKILL)
        killed = time.monotonic()
        answers = [answer for one in clients for answer in one.result()]
    assert {code for _, code, _ in answers} <= {200, 500, 503}
    assert all(is_right for _, code, is_right in answers if code == 200)
    failed = [begun for begun, code, _ in answers if code != 200]
    assert len(failed) <= 20  # those in flight, and none of those that came a second later
    assert all(begun < killed + 1 for begun in failed)
    assert sum(begun > killed for begun, code, _ in answers if code == 200) > 20


@pytest.mark.exhaustive
def test_a_full_queue_says_503(server, folder):
    from ray import serve

    full = ray_serve.LibreTranslate.options(
        max_ongoing_requests=1, max_queued_requests=1, ray_actor_options={"num_cpus": 0}
    )
    serve.run(full.bind(str(folder), "en", "de"), name="full", route_prefix="/full")
    with ThreadPoolExecutor(30) as threads:
        answers = list(threads.map(lambda _: ask(f"{server}/full", "abba")[0], range(60)))
    assert set(answers) == {200, 503}
    assert ask(f"{server}/full", "abba")[0] == 200


REFUSED = (
    ("model=nowhere source=en target=de", "nowhere: is not the folder of a trained model"),
    ("model={folder} source=en=xx target=de", "the model has no language codes"),
    ("model={folder} source=en", "name model=, source= and target="),
)


@pytest.mark.parametrize(
    ("arguments", "message"), tiered_rows(REFUSED, lambda *_: False, lambda *row: row == REFUSED[0])
)
def test_what_cannot_be_served_is_one_line(folder, arguments, message):
    command = [Path(sys.executable).with_name("serve"), "run", "ray_serve:app"]
    command += arguments.format(folder=folder).split()
    done = finished(command, cwd=EXAMPLES)
    assert done.returncode == 1
    *_, said = done.stderr.splitlines()
    assert said.startswith("Error: ")
    assert message in said


def test_the_settings_of_a_cluster_fit_the_program():
    import yaml
    from ray.serve.schema import ServeDeploySchema

    settings = ServeDeploySchema.model_validate(
        yaml.safe_load((EXAMPLES / "ray_serve.yaml").read_text())
    )
    (application,) = settings.applications
    assert application.import_path == "ray_serve:app"
    assert application.args.keys() == {"model", "source", "target"}
    (deployment,) = application.deployments
    assert deployment.name == ray_serve.LibreTranslate.name
