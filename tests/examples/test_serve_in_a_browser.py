"""The page of docs/examples/serve.py in Chromium, by its keyboard alone."""

import threading

import pytest

from jax_transformer import Translator
from tests.examples.test_serve import serve
from tests.site.test_in_a_browser import BEYOND, FAINT, WIDTHS, browser
from tests.translation.streams import varied_model

__all__ = ["browser"]  # a fixture
pytestmark = pytest.mark.exhaustive
MOST = 60  # tokens of a side that the page shows
STRONGEST = "rgb(70, 140, 255)"  # opaque
HOSTILE = "<img src=x onerror='document.title = 1'><script>document.title = 2</script>"


@pytest.fixture(scope="module")
def translator():
    return Translator(varied_model(max_length=80))


@pytest.fixture
def tab(browser, translator):
    """A tab with the page of a server."""
    server = serve.make_server(translator, 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    tab = browser.new_page()
    tab.goto(f"http://localhost:{server.server_port}")
    yield tab
    tab.close()
    server.shutdown()
    server.server_close()


def translate(tab, text, beams=""):
    """Type a text and the number of beams, and press the button."""
    tab.keyboard.press("Control+a")
    tab.keyboard.type(text)
    tab.keyboard.press("Tab")
    tab.keyboard.type(beams)
    tab.keyboard.press("Tab")
    tab.keyboard.press("Enter")
    tab.wait_for_selector("#fault:not(:empty), #score:not(:empty)", timeout=60_000)


def cells(tab, selector):
    """Return the texts of elements."""
    return tab.locator(selector).all_text_contents()


def shades(tab):
    """Return the colours of the cells of the alignment."""
    colours = "cells => cells.map(cell => getComputedStyle(cell).backgroundColor)"
    return tab.locator("tbody td").evaluate_all(colours)


def test_a_text_becomes_its_translation_its_score_and_its_alignment(tab, translator):
    text = "cab fed dab bead abba " * 2
    expected = translator(text, beam_size=3, alignments=True)
    assert expected.text != translator(text).text
    assert max(map(len, expected.text.split())) > 60  # wider than a telephone
    translate(tab, text, "3")
    assert cells(tab, "output, #score") == [expected.text, f"Score: {expected.score:.4f}"]
    assert cells(tab, "thead th") == ["", *expected.alignment.source]
    assert len(expected.alignment.target) > MOST
    assert cells(tab, "tbody th") == expected.alignment.target[:MOST]
    weights = expected.alignment.weights[:MOST]
    assert len(shades(tab)) == weights.size
    assert shades(tab)[weights.argmax()] == STRONGEST
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement === document.querySelector('#alignment div')")
    for width in WIDTHS:
        tab.set_viewport_size({"width": width, "height": 900})
        for scheme in ("dark", "light"):
            tab.emulate_media(color_scheme=scheme)
            assert tab.evaluate("document.documentElement.scrollWidth") == width
            assert tab.evaluate(BEYOND, width) == tab.evaluate(FAINT) == []


def test_what_the_server_refuses_is_shown_in_place_of_a_translation(tab):
    translate(tab, "cab")
    assert cells(tab, "table") != []
    tab.keyboard.press("Shift+Tab")
    tab.keyboard.press("Shift+Tab")
    translate(tab, "cab", "99")
    assert cells(tab, "#fault") == ['"beams" must be a whole number from 1 to 8']
    assert cells(tab, "output, #score, #alignment") == ["", "", ""]


@pytest.mark.parametrize("is_refused", [False, True])
def test_text_that_looks_like_a_program_is_shown_as_text(tab, monkeypatch, is_refused):
    def echo(_, q, **options):
        if is_refused:
            raise ValueError(q)
        return {"translatedText": q, "score": 0, "source": [q], "target": [q], "weights": [[0.4]]}

    monkeypatch.setattr(serve.Handler, "reply", echo)
    translate(tab, HOSTILE)
    shown = "#fault" if is_refused else "output, thead th:nth-child(2), tbody th"
    assert cells(tab, shown) == [HOSTILE] * (1 if is_refused else 3)
    assert shades(tab) == ([] if is_refused else [STRONGEST])
    tab.wait_for_timeout(300)
    assert tab.title() == "Translation"
    assert cells(tab, "main img, main script") == []
