"""The site in Chromium, at the widths of a telephone and of a desk: nothing is cut off."""

import os
import shutil

import pytest

playwright = pytest.importorskip("playwright.sync_api")

WIDTHS = (390, 1440)
# Elements that reach beyond the window, unless they lie in a box that scrolls or is hidden.
BEYOND = """width => [...document.querySelectorAll("main *, header *")].filter(element => {
  const {left, right, width: own} = element.getBoundingClientRect();
  if (!own || (right <= width + 1 && left >= -1)) return false;
  for (let box = element.parentElement; box; box = box.parentElement)
    if (getComputedStyle(box).overflowX !== "visible") return false;
  return true;
}).map(element => element.outerHTML.slice(0, 100))"""
MISSING = """() => [...document.images].filter(image => !image.complete || !image.naturalWidth)
  .map(image => image.src)"""
# What lies over a cell of a table, at points 10 pixels apart.
COVERING = """() => {
  const found = new Set();
  for (let x = 5; x < innerWidth; x += 10) for (let y = 5; y < innerHeight; y += 10) {
    const pile = document.elementsFromPoint(x, y);
    if (pile.some(element => element.closest("header"))) continue;
    if (pile.some(element => element.matches("main td")) && !pile[0].closest("table"))
      found.add(pile[0].className);
  }
  return [...found];
}"""
# Every text that is shown, against the first ground below it that is opaque.
FAINT = """() => {
  const paint = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const known = new Map(), grounds = new Map();
  const channels = colour => {
    if (!known.has(colour)) {
      paint.clearRect(0, 0, 1, 1); paint.fillStyle = colour; paint.fillRect(0, 0, 1, 1);
      known.set(colour, [...paint.getImageData(0, 0, 1, 1).data]);
    }
    return known.get(colour);
  };
  const over = (front, back) => {
    const alpha = front[3] / 255;
    return [0, 1, 2].map(i => front[i] * alpha + back[i] * (1 - alpha)).concat(255);
  };
  const luminance = colour => {
    const [r, g, b] = colour.slice(0, 3).map(c => c / 255)
      .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = element => {
    if (!element) return [255, 255, 255, 255];
    if (!grounds.has(element)) {
      const own = channels(getComputedStyle(element).backgroundColor);
      grounds.set(element, own[3] === 255 ? own : over(own, ground(element.parentElement)));
    }
    return grounds.get(element);
  };
  const faint = new Map();
  for (const element of document.querySelectorAll("main *, header *, footer *")) {
    const own = [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim());
    if (!own) continue;
    if (!element.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
    const style = getComputedStyle(element), back = ground(element);
    const a = luminance(over(channels(style.color), back)), b = luminance(back);
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const large = parseFloat(style.fontSize) >= 24;
    if (contrast < (large ? 3 : 4.5))
      faint.set(element.tagName + "." + element.className + " " + style.color,
                contrast.toFixed(2) + " " + element.textContent.trim().slice(0, 30));
  }
  return [...faint].map(entry => entry.join(": "));
}"""


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--no-sandbox"] if os.geteuid() == 0 else [],
        )
        yield chromium
        chromium.close()


def open_site(browser, site):
    """Return a tab with the start page, and what its pages will print and ask for."""
    tab = browser.new_context(viewport={"width": WIDTHS[0], "height": 900}).new_page()
    messages, asked = [], []
    tab.on("console", lambda message: messages.append(f"{tab.url}: {message.text}"))
    tab.on("pageerror", lambda error: messages.append(f"{tab.url}: {error}"))
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto((site / "index.html").as_uri())
    return tab, messages, asked


def faults_of(tab):
    """Yield what is cut off, missing or faint on a page, at both widths and in both colours."""
    for width in WIDTHS:
        tab.set_viewport_size({"width": width, "height": 900})
        if tab.evaluate("document.documentElement.scrollWidth") > width:
            yield f"scrolls sideways at {width} pixels"
        yield from tab.evaluate(BEYOND, width)
    yield from tab.evaluate(MISSING)
    tab.add_style_tag(content="* { transition: none !important; }")  # a colour at once
    for scheme in ("slate", "default"):
        tab.evaluate("scheme => { document.body.dataset.mdColorScheme = scheme; }", scheme)
        yield from tab.evaluate(FAINT)


def test_every_page_is_whole_at_both_widths_and_in_both_colours(browser, built):
    site, executed = built
    tab, messages, asked = open_site(browser, site)
    pages = [path for path in sorted(site.rglob("*.html")) if path.name != "404.html"]
    assert len(pages) > 30
    if len(executed) == 1:  # CI looks at a third of the pages, and at this tutorial
        pages = [
            path for number, path in enumerate(pages) if not number % 3 or path.stem in executed
        ]
    faults = {}
    for path in pages:
        tab.goto(path.as_uri())
        faults[str(path.relative_to(site))] = list(faults_of(tab))
    assert {page: found for page, found in faults.items() if found} == {}
    assert messages == []
    assert {address.partition(":")[0] for address in asked} <= {"file", "data", "blob"}


def test_nothing_covers_a_table_on_a_telephone_when_a_reader_scrolls_back(browser, site):
    tab, _, _ = open_site(browser, site)
    tab.mouse.wheel(0, 3000)
    tab.wait_for_timeout(300)
    top = tab.evaluate("document.querySelector('main table').getBoundingClientRect().top + scrollY")
    tab.evaluate("y => scrollTo(0, y)", top + 200)
    tab.wait_for_timeout(300)
    tab.mouse.wheel(0, -250)
    tab.wait_for_timeout(900)
    assert tab.evaluate(COVERING) == []


def test_the_search_finds_a_function_without_a_network(browser, site):
    tab, _, _ = open_site(browser, site)
    tab.set_viewport_size({"width": WIDTHS[1], "height": 900})
    tab.keyboard.press("Control+k")
    tab.keyboard.type("label smoothing")
    tab.wait_for_selector("text=/cross_entropy/", timeout=60_000)
