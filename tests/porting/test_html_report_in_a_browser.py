"""The porting report in a real browser: nothing is loaded, hidden, cut off or drawn over."""

import dataclasses
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jax_transformer import TransformerConfig, convert
from jax_transformer.porting.compare import BlockError, Comparison
from jax_transformer.porting.html_report import write_report
from jax_transformer.porting.record import Batch, Record
from tests.models import random_params

playwright = pytest.importorskip("playwright.sync_api")
from benchmarks import porting_report  # noqa: E402 - it imports playwright

ROOT = Path(__file__).parents[2]

WIDTHS = (1280, 390)
LONG = "model.net.encoder_of_the_whole_network.list_of_layers.0.first_attention_of_the_layer"
HOSTILE = "<script>document.title = 'run'</script><img src='http://example.org/x.png'>"

# Boxes of the elements that no other element of the page may touch: rows, cells, labels.
BOXES = """() => [
  "main > *", "section > *, header > *", ".chart li > *", ".chart li", ".own > *", "dl > div",
  ".bound-label > span, .ticks > span", "tbody tr", ".weights td", ".maps > *", "details > *",
].flatMap(selector => {
  const groups = new Map();
  for (const element of document.querySelectorAll(selector)) {
    const {x, y, width, height} = element.getBoundingClientRect();
    if (!width || !height) continue;
    const of = selector.includes("ticks") ? element.closest(".axis") : element.parentElement;
    if (!groups.has(of)) groups.set(of, []);
    groups.get(of).push({selector, text: element.textContent.slice(0, 40), x, y, width, height});
  }
  return [...groups.values()];
})"""
TEXTS = """() => [...document.querySelectorAll("svg")].map(
  svg => [...svg.querySelectorAll("text, rect")].map(element => {
    const {x, y, width, height} = element.getBoundingClientRect();
    return {selector: element.tagName, text: element.textContent, x, y, width, height};
  })
)"""


def arguments(errors, foreign, explanations=(), attention=True):
    """Return the arguments of a report on a model of random numbers, with these errors."""
    config = TransformerConfig(
        src_vocab_size=23,
        tgt_vocab_size=29,
        d_model=12,
        num_heads=3,
        d_ff=20,
        num_encoder_layers=2,
        num_decoder_layers=2,
        max_length=19,
    )
    random = np.random.default_rng(0)
    src, tgt = (random.integers(3, 23, (2, length)).astype(np.int32) for length in (7, 5))
    weights = {}
    if attention:
        scores = random.random((2, 3, 5, 7))
        weights = {f"{foreign}.softmax": scores / scores.sum(-1, keepdims=True)}
    record = Record((Batch(src, tgt, np.zeros((2, 5, 29)), weights),), 0)
    names = [f"encoder.layers.{i}.self_attention_residual.norm" for i in range(len(errors) - 1)]
    pairs = zip([*names, "logits"], errors, strict=True)
    blocks = [BlockError(name, foreign, float(error)) for name, error in pairs]
    comparison = Comparison(tuple(blocks), 1e-5, explanations=explanations)
    layout = dataclasses.replace(convert.get_layout("reference"), name=foreign)
    return comparison, random_params(config), config, layout, record


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Write a report of each kind; return their paths."""
    folder = tmp_path_factory.mktemp("reports")
    cases = {
        "agrees": arguments((0.0, 1e-9, 3e-7, 2e-6, 9e-6), LONG),
        "differs": arguments(
            (0.0, 1e-9, 2e-5, 3e-2, np.inf), HOSTILE, (HOSTILE, "norm_epsilon=1e-06"), False
        ),
        "exact": arguments((0.0, 0.0), "m"),
        "far": arguments((1e-17, 1e9, 3.0), LONG),
        "layers": arguments((*np.geomspace(1e-9, 1e-2, 90), 1e-2), LONG),
    }
    for name, case in cases.items():
        write_report(folder / f"{name}.html", *case)
    return {name: folder / f"{name}.html" for name in cases}


@pytest.fixture(scope="module")
def browser():
    """Return the system's Chromium, or the one that playwright has installed."""
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--no-sandbox"] if os.geteuid() == 0 else [],
        )
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser, reports):
    """Return a function that opens a report and asserts that it was loaded in peace."""
    contexts = []

    def open_page(name, width, scheme="light"):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.messages, page.asked = [], []
        page.on("console", lambda message: page.messages.append(message.text))
        page.on("pageerror", lambda error: page.messages.append(str(error)))
        page.on("request", lambda request: page.asked.append(request.url))
        page.goto(reports[name].as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()


CASES = ("agrees", "differs", "exact", "far", "layers")


@pytest.mark.parametrize("name", CASES)
def test_a_report_loads_nothing_and_runs_nothing(open_page, reports, name):
    page = open_page(name, 1280)
    assert page.messages == []
    assert page.asked == [reports[name].as_uri()]
    assert page.title().startswith("Porting report: ")
    assert page.locator("script, img").count() == 0


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_cut_off_or_drawn_over(open_page, name, width):
    """Neither does the page scroll sideways, nor do elements lie on each other."""
    page = open_page(name, width)
    page.evaluate("document.querySelectorAll('details').forEach(e => e.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    beyond = page.evaluate(
        "width => [...document.querySelectorAll('main *')].filter("
        "e => e.getBoundingClientRect().right > width).map(e => e.outerHTML.slice(0, 80))",
        width,
    )
    assert beyond == []
    groups = page.evaluate(BOXES) + page.evaluate(TEXTS)
    assert sum(map(len, groups)) > 100
    for boxes in groups:
        for index, one in enumerate(boxes):
            for other in boxes[index + 1 :]:
                assert not overlap(one, other), (one, other)


def overlap(one, other, tolerance=1.0):
    """Whether two boxes share more than `tolerance` pixels in both directions."""
    shared = [
        min(one[start] + one[size], other[start] + other[size]) - max(one[start], other[start])
        for start, size in (("x", "width"), ("y", "height"))
    ]
    return min(shared) > tolerance


@pytest.mark.parametrize("width", WIDTHS)
def test_every_bar_is_visible_inside_its_track(open_page, width):
    bars = open_page("far", width).locator(".chart .bar").all()
    lengths = []
    for bar in bars:
        box, track = bar.bounding_box(), bar.locator("..").bounding_box()
        assert track["x"] <= box["x"]
        assert box["x"] + box["width"] <= track["x"] + track["width"] + 0.5
        assert box["height"] >= 8
        lengths.append(box["width"])
    assert len(set(lengths)) == 3
    assert min(lengths) >= 2


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_the_picture_of_the_documents_can_be_taken(tmp_path, x64):
    """In a process of its own: one process has one playwright."""
    porting_report.report(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text("utf-8")
    assert "activation=&#x27;gelu_tanh&#x27;, not &#x27;gelu&#x27;" in text
    command = (
        "import sys; from pathlib import Path; from benchmarks.porting_report import photograph;"
        "photograph(Path('report.html').absolute(), Path('report.png'))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", command], cwd=tmp_path, env=environment, check=True)
    taken, shown = tmp_path / "report.png", ROOT / porting_report.PICTURE
    sizes = [struct.unpack(">II", path.read_bytes()[16:24]) for path in (taken, shown)]
    assert sizes == [(porting_report.WIDTH, porting_report.HEIGHT)] * 2
    assert 50_000 < shown.stat().st_size < 200_000
    assert 50_000 < taken.stat().st_size < 200_000


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_in_both_modes(open_page, scheme):
    """Against the card that it lies on, as the guidelines for accessible text ask: 4.5."""
    page = open_page("differs", 1280, scheme)
    colours = page.evaluate(
        "['h1', '.lead', '.foreign', '.value', 'section > p', 'th', '.beyond .value', 'dt', "
        "'figcaption', '.kicker', 'svg text'].map(selector => {"
        "const element = document.querySelector(selector), style = getComputedStyle(element);"
        "const card = getComputedStyle(element.closest('section, header')).backgroundColor;"
        "return [selector, selector.startsWith('svg') ? style.fill : style.color, card] })"
    )
    for selector, ink, card in colours:
        assert contrast(luminance(ink), luminance(card)) >= 4.5, selector
    cards = {luminance(card) > 0.5 for _, _, card in colours}
    assert cards == {scheme == "light"}


def luminance(colour):
    """Return the relative luminance of "rgb(r, g, b)", from 0 to 1."""
    channels = np.array([float(part) for part in colour[4:-1].split(",")]) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def contrast(one, other):
    return (max(one, other) + 0.05) / (min(one, other) + 0.05)
