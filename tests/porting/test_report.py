"""The report of a ported model: what it says, what it escapes, and how large it may become."""

import dataclasses
import re
from html.parser import HTMLParser

import pytest

from jax_transformer import convert
from jax_transformer.convert import Layout
from jax_transformer.errors import InputError
from jax_transformer.porting.compare import BlockError, Comparison, compare_record
from jax_transformer.porting.record import record_module
from jax_transformer.porting.report import write_report
from tests.porting.wrong_variants import LAYOUT, WRONG, mistaken, program, ragged, right_config

HOSTILE = "</pre><script>alert(1)</script>[red]\x07\N{RIGHT-TO-LEFT OVERRIDE}&"


class Page(HTMLParser):
    """The text and the tags of a page."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.attributes, self.text, self.source = [], [], "", path.read_text("utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def compared():
    """Return a comparison, the config and the layout of the right model or of a wrong variant."""
    module = program()
    record = record_module(module, *ragged(right_config()), pad_id=right_config().pad_id)
    layout = convert.get_layout(LAYOUT)

    def compared(name=None):
        state_dict = module.state_dict()
        tensors, config = mistaken(name, state_dict) if name else (state_dict, right_config())
        params = convert.from_torch(tensors, config, layout)
        return compare_record(params, config, layout, record, explain=False), config, layout

    return compared


def test_a_model_that_agrees(compared, tmp_path):
    comparison, config, layout = compared()
    write_report(tmp_path / "report.html", comparison, config, layout)
    page = Page(tmp_path / "report.html")
    assert "The converted model agrees with yours" in page.text
    assert "first to differ" not in page.text
    for block in comparison.blocks:
        shown = map(re.escape, (block.name, block.foreign, f"{block.error:.1e}"))
        assert re.search(" .*".join(shown), page.text)
    # One row for the two layers, with what was done.
    row = r"encoder\.layers\.0\.self_attention\.W_q\.weight +│ 2 +│ 42 x 42 +│ transposed +│ "
    assert re.search(f"{row}encoder/layers_{{i}}/self_attention/query/kernel", page.text)
    assert re.search(r"norm_placement +│ 'pre' +│ 'post'", page.text)
    assert page.text.index("norm_placement") < page.text.index("attention_scale")


def test_the_first_block_that_differs_is_named(compared, tmp_path):
    comparison, config, layout = compared("activation")
    comparison = dataclasses.replace(comparison, explanations=("because",))
    write_report(tmp_path / "report.html", comparison, config, layout)
    page = Page(tmp_path / "report.html")
    assert f"The models differ, first in {WRONG['activation'].block}" in page.text
    assert "explanation: because" in page.text
    assert page.text.count("<-- first to differ") == 1


def test_the_page_loads_nothing_and_names_are_text(compared, tmp_path):
    comparison, config, layout = compared()
    block = BlockError("encoder", HOSTILE, 0.0)
    comparison = dataclasses.replace(comparison, blocks=(block, *comparison.blocks))
    layout = dataclasses.replace(layout, name=HOSTILE, unused=(HOSTILE,))
    write_report(tmp_path / "report.html", comparison, config, layout)
    page = Page(tmp_path / "report.html")
    assert {*page.tags} <= {"html", "head", "meta", "title", "style", "body", "pre", "span"}
    assert {*page.attributes} <= {"lang", "charset", "http-equiv", "content", "class"}
    assert not re.search(r"https?:|//\w|url\(|@import", page.source)
    assert "default-src 'none'" in page.source
    assert page.text.count("</pre><script>alert(1)</script>[red]") == 2
    assert page.text.replace("\n", "").isprintable()


def test_a_large_model_has_a_bounded_report(compared, tmp_path):
    """The first block that differs is shown, wherever it is."""
    _, config, layout = compared()
    errors = [1.0 if number >= 5000 else 0.0 for number in range(10_000)]
    blocks = [BlockError(f"block.{n}", f"module.{n}", error) for n, error in enumerate(errors)]
    layout = dataclasses.replace(layout, unused=tuple(f"{'x' * 5000}{n}" for n in range(5000)))
    write_report(tmp_path / "report.html", Comparison(tuple(blocks), 0.5), config, layout)
    page = Page(tmp_path / "report.html")
    assert len(page.source) < 400_000
    assert re.search(r"block\.5000 .*<-- first to differ", page.text)
    assert "4,800 more rows are not shown" in page.text  # of 10,000 less 4,800 and 400


def test_a_file_is_not_replaced_unasked_and_a_link_is_not_followed(compared, tmp_path):
    arguments, path = compared(), tmp_path / "report.html"
    path.write_text("kept")
    with pytest.raises(InputError, match="exists already"):
        write_report(path, *arguments)
    assert path.read_text() == "kept"
    link = tmp_path / "link.html"
    link.symlink_to(path)
    write_report(link, *arguments, overwrite=True)
    assert path.read_text() == "kept"
    assert not link.is_symlink()
    with pytest.raises(InputError, match=r"must end in \.html"):
        write_report(tmp_path / "report.txt", *arguments)
    with pytest.raises(InputError, match="is no writable folder"):
        write_report(tmp_path / "no" / "report.html", *arguments)
    comparison, config, _ = arguments
    with pytest.raises(InputError, match="has no row for"):
        write_report(tmp_path / "new.html", comparison, config, Layout("none", ()))
    assert not (tmp_path / "new.html").exists()
