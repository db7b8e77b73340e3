"""The porting report as text: what it says, what it escapes, and how large it may become."""

import dataclasses
import re
from html.parser import HTMLParser

import numpy as np
import pytest

import torch_reference
from jax_transformer import TransformerConfig, convert
from jax_transformer.convert import Layout, Row
from jax_transformer.convert.table import expand
from jax_transformer.errors import InputError
from jax_transformer.porting.compare import BlockError, Comparison, compare_record
from jax_transformer.porting.html_report import (
    MOST_BARS,
    errors_section,
    grouped,
    number,
    weights_section,
    write_report,
)
from jax_transformer.porting.record import record_module
from tests.models import random_params, random_tokens, small_config

HOSTILE = "</code><script>alert(1)</script><img src=x onerror=f()>\x07\N{RIGHT-TO-LEFT OVERRIDE}&"
VOID = {"meta", "wbr", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Reads a page, and fails where an element is closed that is not open."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], ""
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def agreeing():
    """The arguments of a report on a model that agrees."""
    return arguments()


def arguments(**wrong):
    right = small_config("vaswani2017", num_encoder_layers=1, num_decoder_layers=1)
    params, layout = random_params(right), convert.get_layout("reference")
    module = torch_reference.Transformer(right)
    module.load_state_dict(convert.to_torch(params, right))
    record = record_module(module, *random_tokens(right), pad_id=right.pad_id)
    config = dataclasses.replace(right, **wrong)
    return compare_record(params, config, layout, record, explain=False), config, layout, record


def page_of(path, arguments):
    write_report(path, *arguments)
    text = path.read_text("utf-8")
    return text, Page(text)


def test_a_report_is_one_file_that_loads_nothing_and_tells_an_agreeing_model(agreeing, tmp_path):
    text, page = page_of(tmp_path / "report.html", agreeing)
    assert not re.search(r"https?:|//\w|url\(|@import", text)
    assert {"script", "link", "img", "iframe", "object", "a"}.isdisjoint(page.tags)
    assert {"src", "href", "data"}.isdisjoint(name for name, _ in page.attributes)
    assert "default-src 'none'" in text
    assert len(text) < 300_000
    blocks = agreeing[0].blocks
    assert "The converted model agrees with yours" in page.text
    assert f"{len(blocks)} of {len(blocks)}" in page.text
    assert "first to differ" not in page.text
    assert all(f"{block.name}{block.foreign}" in page.text for block in blocks)
    assert all(number(block.error) in page.text for block in blocks)
    config, shown = agreeing[1], text.split("<h2>Config</h2>")[1]
    for field in dataclasses.fields(TransformerConfig):
        changed = getattr(config, field.name) != field.default
        assert (f"<code>{field.name}</code>" in shown) == changed


def test_the_first_block_that_differs_is_named_once(tmp_path):
    comparison, *others = arguments(activation="gelu")
    explained = dataclasses.replace(comparison, explanations=("activation='relu'",))
    _, page = page_of(tmp_path / "report.html", (explained, *others))
    first = comparison.first_differing
    assert first.name == "encoder.layers.0.feed_forward"
    assert f"The models differ, first in {first.name}" in page.text
    assert f"your module {first.foreign}, is off by {number(first.error)}" in page.text
    assert page.text.count("first to differ") == 1
    assert "What would explain itactivation='relu'" in page.text
    _, page = page_of(tmp_path / "other.html", (comparison, *others))
    assert "What would explain it" not in page.text


def bars(html):
    """Return the width of each bar and the place of the bound, both in percent."""
    widths = re.findall(r'class="bar" style="width:([\d.]+)%', html)
    return [*map(float, widths)], float(re.search(r"--bound:([\d.]+)%", html)[1])


def test_a_bar_passes_the_bound_exactly_where_its_error_does():
    errors = [3e-16, 9.9e-12, 1e-11, 1.1e-11, 4e-3, 7.0, np.inf, np.nan]
    blocks = tuple(BlockError(f"block{i}", "", error) for i, error in enumerate(errors))
    widths, bound = bars(errors_section(Comparison(blocks, 1e-11)))
    assert len(widths) == len(errors)
    assert widths == sorted(widths)
    assert all(0 < width <= 100 for width in widths)
    assert [width > bound for width in widths] == [not error <= 1e-11 for error in errors]
    assert widths[-1] == widths[-2] == 100


def test_the_bound_lies_between_the_labels_of_the_axis_where_it_belongs():
    html = errors_section(Comparison((BlockError("logits", "", 7.0),), 2e-11))
    assert "The record holds the logits and no outputs of blocks" in html
    ticks = re.findall(r'left:([\d.]+)%">10<sup>(.*?)</sup>', html.replace("&minus;", "-"))
    places, exponents = np.array(ticks, float).T
    assert np.all(np.diff(exponents) > 0)
    assert np.interp(bars(html)[1], places, exponents) == pytest.approx(np.log10(2e-11), abs=0.01)


def test_an_error_of_zero_has_no_bar():
    blocks = (BlockError("one", "", 0.0), BlockError("logits", "", 0.0))
    html = errors_section(Comparison(blocks, 1e-5))
    assert bars(html)[0] == []
    assert html.count('<div class="value">0</div>') == 2


def test_names_of_a_file_are_text_and_nothing_else(agreeing, tmp_path):
    comparison, config, named, record = agreeing
    blocks = tuple(block._replace(foreign=HOSTILE) for block in comparison.blocks)
    blocks = (*blocks[:-1], BlockError("logits", HOSTILE, 1.0))
    hostile = Comparison(blocks, 1e-5, HOSTILE, explanations=(HOSTILE * 9,))
    rows = (*named.rows, Row(HOSTILE, "token_embedding/embedding"))
    others = dataclasses.replace(named, name=HOSTILE, rows=rows, unused=(HOSTILE,))
    _, known = page_of(tmp_path / "plain.html", agreeing)
    text, page = page_of(tmp_path / "hostile.html", (hostile, config, others, record))
    assert set(page.tags) <= {*known.tags, "ul", "li", "br"}
    assert {name for name, _ in page.attributes} <= {"title", *dict(known.attributes)}
    assert not re.search("<script|\x07|\N{RIGHT-TO-LEFT OVERRIDE}", text)
    assert page.text.count("<script>alert(1)</script>") >= len(blocks) + 4


def test_many_blocks_have_a_bounded_picture_around_the_first_that_differs():
    blocks = [BlockError(f"block{i}", "m" * 5000, 1e-7) for i in range(2000)]
    blocks[601] = blocks[601]._replace(error=float("nan"))
    html = errors_section(Comparison(tuple(blocks), 1e-5))
    assert len(html) < 300_000
    assert html.count("<li") == MOST_BARS
    assert "300 of 2,000 blocks are shown" in html
    (first,) = re.findall(r'<li class="beyond">.*?</li>', html)
    assert "block601" in first
    assert "first to differ" in first
    assert "not finite" in first


def test_weights_of_all_layers_stand_in_one_row():
    config = small_config("torch_nn", num_encoder_layers=12)
    layout = convert.get_layout("torch_nn")
    text = weights_section(config, layout)
    row = (
        "<tr><td><code>encoder.layers.0.self_attn.in_proj_weight</code></td><td>12</td>.*"
        "<td>transposed by rows</td>"
        "<td><code>encoder/layers_{i}/self_attention/{query,key,value}/kernel</code>"
    )
    assert re.search(row, text)
    assert text.count("self_attn.in_proj_weight") == 2
    assert re.search(r"norm1\.weight</code></td><td>12</td>.*<td>as it is</td>", text)
    pairs = expand(layout, config)
    groups = grouped(pairs)
    names = sorted(pair.foreign for _, group in groups for pair in group)
    assert names == sorted(pair.foreign for pair in pairs)
    assert len(groups) < len(pairs)


def test_a_model_of_vectors_has_a_report(tmp_path):
    config = small_config("torch_nn", num_encoder_layers=1, num_decoder_layers=1)
    module, layout = convert.torch_nn_module(config), convert.get_layout("torch_nn")
    params = convert.from_torch(module.state_dict(), config, layout)
    record = record_module(module, *random_tokens(config))
    comparison = compare_record(params, config, layout, record, explain=False)
    _, page = page_of(tmp_path / "report.html", (comparison, config, layout, record))
    assert "agrees with yours" in page.text


def test_a_file_is_not_replaced_unasked(agreeing, tmp_path):
    path = tmp_path / "report.html"
    path.write_text("mine")
    with pytest.raises(InputError, match="exists already; name another report or overwrite it"):
        write_report(path, *agreeing)
    assert path.read_text() == "mine"
    write_report(path, *agreeing, overwrite=True)
    assert path.read_text().startswith("<!doctype html>")
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]
    with pytest.raises(InputError, match=r"must end in \.html"):
        write_report(tmp_path / "report.txt", *agreeing)
    with pytest.raises(InputError, match="is no writable folder"):
        write_report(tmp_path / "absent" / "report.html", *agreeing)


def test_a_layout_without_rows_for_the_config_is_refused_before_writing(agreeing, tmp_path):
    comparison, config, _, record = agreeing
    short = Layout("short", (Row("a", "source_embedding/embedding"),))
    with pytest.raises(InputError, match="has no row for"):
        write_report(tmp_path / "report.html", comparison, config, short, record)
    assert not list(tmp_path.iterdir())
