"""The pages of the site as files: every link leads somewhere, and nothing comes from elsewhere."""

import re
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import jupytext
import pytest

import jax_transformer
from docs.build import PAGES, ROOT
from jax_transformer import convert, porting

LOADED = {"img": "src", "script": "src", "link": "href", "iframe": "src", "source": "src"}


class Page(HTMLParser):
    """What a page links to, what it loads, and the names of its places."""

    def __init__(self, path):
        super().__init__()
        self.path, self.links, self.loads, self.places = path, [], [], set()
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.places |= {values.get("id"), values.get("name")}
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        if tag in LOADED and values.get(LOADED[tag]):
            self.loads.append(values[LOADED[tag]])


@pytest.fixture(scope="module")
def pages(built):
    site, _ = built
    paths = [path for path in sorted(site.rglob("*.html")) if path.name != "404.html"]
    return {path: Page(path) for path in paths if path.parent.name != "examples"}  # of programs


def test_every_link_leads_to_a_page_and_a_place_of_it(pages):
    count = 0
    for page in pages.values():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme:
                assert parts.scheme == "https", link
                continue
            target = (page.path.parent / unquote(parts.path)).resolve() if parts.path else page.path
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), (page.path, link)
            if parts.fragment and target in pages:
                assert unquote(parts.fragment) in pages[target].places, (page.path, link)
            count += 1
    assert count > 1000


def test_no_page_loads_anything_from_elsewhere(pages, site):
    for page in pages.values():
        assert page.loads
        for address in page.loads:
            parts = urlsplit(address)
            assert not parts.scheme, (page.path, address)
            assert not parts.netloc, (page.path, address)
            assert (page.path.parent / parts.path).resolve().exists(), (page.path, address)
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(\W*(https?:)?//|@import", sheet.read_text("utf-8")), sheet


def test_every_page_of_the_folder_is_on_the_site(pages, site):
    for page in PAGES.rglob("*.md"):
        assert (site / page.relative_to(PAGES)).with_suffix(".html") in pages, page
    named = set(re.findall(r'= "([\w/]+\.md)"', (ROOT / "zensical.toml").read_text("utf-8")))
    assert {site / page for page in named} == {page.with_suffix(".md") for page in pages}


def test_every_public_name_has_its_shapes_and_its_source_on_the_site(pages, site):
    text = "".join(page.read_text("utf-8") for page in (site / "reference").glob("*.html"))
    entries = re.split(r'(?=<h\d id="[\w.]+" class="doc doc-heading")', text)
    by_name = {entry.partition('"')[2].partition('"')[0].split(".")[-1]: entry for entry in entries}
    for module in (jax_transformer, convert, porting):
        for name in set(module.__all__) - {"weight_files", "TRAINERS"}:
            assert name in by_name, f"{module.__name__}.{name}"
            if not isinstance(getattr(module, name), convert.Operation):  # a value has no source
                assert "Source code in" in by_name[name], f"{module.__name__}.{name}"


def test_every_tutorial_is_offered_as_a_notebook_with_its_results(built):
    (site, executed), scripts = built, list((PAGES / "tutorials").glob("*.py"))
    assert len(scripts) >= 5
    for script in scripts:
        shown = (site / "tutorials" / f"{script.stem}.html").read_text("utf-8")
        assert f'href="{script.stem}.ipynb"' in shown
        assert f'href="{script.name}"' in shown
        assert ('class="printed"' in shown) == (script.stem in executed)
        assert "\x1b" not in shown  # of colours and live lines
        notebook = jupytext.read(site / "tutorials" / f"{script.stem}.ipynb")
        assert any(cell.get("outputs") for cell in notebook.cells) == (script.stem in executed)
