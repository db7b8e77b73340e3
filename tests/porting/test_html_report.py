"""The porting report as text: what it says, what it escapes, and how large it may become."""

import dataclasses
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

from jax_transformer import TransformerConfig, convert
from jax_transformer.convert import Layout, Operation, Row, transpose
from jax_transformer.convert.table import BoundRow, expand
from jax_transformer.errors import InputError
from jax_transformer.porting.compare import BlockError, Comparison, compare_record
from jax_transformer.porting.html_report import (
    MOST_BARS,
    attention_of_both,
    chosen_row,
    errors_section,
    grouped,
    number,
    operation,
    weights_section,
    write_report,
)
from jax_transformer.porting.record import Batch, Record, record_module
from jax_transformer.porting.suggest import suggest
from tests.models import random_params, random_tokens, small_config
from tests.porting.foreign_models import MODELS, random_ids

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


def case(**wrong):
    """Return the arguments of a report on a foreign model, with fields of its config replaced."""
    model = MODELS["fused_heads"]
    module, config = model.module(), dataclasses.replace(model.config(), **wrong)
    likely = suggest(module.state_dict()).layout
    norms = {"norm2": "feed_forward", "norm3": "cross_attention"}  # the likely ones are exchanged
    rows = []
    for row in likely.rows:
        if len(row.paths) > 1:
            row = dataclasses.replace(row, stack="heads")
        name = row.foreign.split(".")[-2]
        if row.foreign.startswith("model.net.decoder") and name in norms:
            leaf = row.paths[0].rpartition("/")[2]
            path = f"decoder/layers_{{i}}/{norms[name]}_residual/norm/{leaf}"
            row = dataclasses.replace(row, paths=path)
        rows.append(row)
    layout = dataclasses.replace(likely, rows=tuple(rows))
    params = convert.from_torch(module.state_dict(), config, layout)
    batches = []
    for source, target in ((1, 1), (7, 5)):
        src, tgt = random_ids(model, source=source, target=target)
        batches += record_module(module, src, tgt, pad_id=model.pad_id).batches
    record = Record(tuple(batches), model.pad_id)
    return compare_record(params, config, layout, record), params, config, layout, record


@pytest.fixture(scope="module")
def agreeing():
    return case()


@pytest.fixture(scope="module")
def differing():
    return case(activation="gelu")


def page_of(path, arguments):
    write_report(path, *arguments)
    text = path.read_text("utf-8")
    return text, Page(text)


def test_a_report_is_one_file_that_loads_nothing(agreeing, tmp_path):
    text, page = page_of(tmp_path / "report.html", agreeing)
    assert not re.search(r"https?:|//\w|url\(|@import", text)
    assert {"script", "link", "img", "iframe", "object", "a"}.isdisjoint(page.tags)
    assert {"src", "href", "data"}.isdisjoint(name for name, _ in page.attributes)
    assert "default-src 'none'" in text
    assert len(text) < 300_000


def test_an_agreeing_model_is_told_as_such(agreeing, tmp_path):
    comparison = agreeing[0]
    _, page = page_of(tmp_path / "report.html", agreeing)
    assert "The converted model agrees with yours" in page.text
    assert f"{len(comparison.blocks)} of {len(comparison.blocks)}" in page.text
    assert "first to differ" not in page.text
    for block in comparison.blocks:
        assert block.name in page.text
        assert number(block.error) in page.text
    assert "model.net.decoder.1.cross_attn" in page.text


@pytest.mark.exhaustive
def test_the_first_block_that_differs_is_named_once(differing, tmp_path):
    comparison, *others = differing
    explained = dataclasses.replace(comparison, explanations=("activation='gelu_tanh'",))
    _, page = page_of(tmp_path / "report.html", (explained, *others))
    first = comparison.first_differing
    assert first.name.startswith("encoder.layers.0.feed_forward")
    assert f"The models differ, first in {first.name}" in page.text
    assert f"your module {first.foreign}, is off by {number(first.error)}" in page.text
    assert page.text.count("first to differ") == 1
    assert "What would explain it" in page.text
    assert "activation='gelu_tanh'" in page.text
    unexplained = dataclasses.replace(comparison, explanations=())
    _, page = page_of(tmp_path / "other.html", (unexplained, *others))
    assert "What would explain it" not in page.text


def bars(html):
    """Return the width of each bar and the place of the bound, both in percent."""
    bound = float(re.search(r"--bound:([\d.]+)%", html)[1])
    return [
        float(width) for width in re.findall(r'class="bar" style="width:([\d.]+)%', html)
    ], bound


def test_a_bar_passes_the_bound_exactly_where_its_error_does():
    errors = [3e-16, 9.9e-12, 1e-11, 1.1e-11, 4e-3, 7.0, np.inf, np.nan]
    blocks = tuple(BlockError(f"block{i}", "", error) for i, error in enumerate(errors))
    comparison = Comparison(blocks, 1e-11)
    widths, bound = bars(errors_section(comparison))
    assert len(widths) == len(errors)
    assert widths == sorted(widths)
    assert all(0 < width <= 100 for width in widths)
    assert [width > bound for width in widths] == [not error <= 1e-11 for error in errors]
    assert widths[-1] == widths[-2] == 100


def test_the_bound_lies_between_the_labels_of_the_axis_where_it_belongs():
    comparison = Comparison((BlockError("one", "", 3e-16), BlockError("logits", "", 7.0)), 2e-11)
    html = errors_section(comparison)
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
    comparison, params, config, named, record = agreeing
    blocks = tuple(block._replace(foreign=HOSTILE) for block in comparison.blocks)
    blocks = (*blocks[:-1], BlockError("logits", HOSTILE, 1.0))
    hostile = Comparison(blocks, 1e-5, HOSTILE, explanations=(HOSTILE * 9,))
    rows = list(named.rows)
    rows[0] = dataclasses.replace(rows[0], foreign=HOSTILE)
    others = dataclasses.replace(named, name=HOSTILE, rows=tuple(rows), unused=(HOSTILE,))
    plain, ours = (
        page_of(tmp_path / f"{name}.html", arguments)
        for name, arguments in (
            ("plain", agreeing),
            ("hostile", (hostile, params, config, others, record)),
        )
    )
    assert set(ours[1].tags) <= {*plain[1].tags, "ul", "li", "br"}
    names, known = ({name for name, _ in page.attributes} for _, page in (ours, plain))
    assert names <= {*known, "title"}
    assert "<script" not in ours[0]
    assert "\x07" not in ours[0]
    assert "\N{RIGHT-TO-LEFT OVERRIDE}" not in ours[0]
    assert ours[1].text.count("<script>alert(1)</script>") >= len(blocks) + 4


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


def test_weights_of_all_layers_stand_in_one_row(agreeing):
    config, named = agreeing[2:4]
    text = weights_section(dataclasses.replace(config, num_encoder_layers=12), named)
    row = (
        "<tr><td><code>model.net.encoder.0.self_attn.qkv_proj.weight</code></td><td>12</td>.*"
        "split in 3 by rows of each head, each transposed</td>"
        "<td><code>encoder/layers_{i}/self_attention/{query,key,value}/kernel</code>"
    )
    assert re.search(row, text)
    assert text.count("qkv_proj.weight") == 2


def test_every_tensor_is_in_one_group_of_the_weights(agreeing):
    pairs = expand(agreeing[3], agreeing[2])
    groups = grouped(pairs)
    assert sorted(p.foreign for _, group in groups for p in group) == sorted(
        p.foreign for p in pairs
    )
    assert len(groups) < len(pairs)


def test_operations_are_told_in_words():
    def words(operation_, paths=("a",), stack="rows"):
        parts = ((4, 4),) * len(paths)
        return operation(
            BoundRow("x", tuple(paths), operation_, parts, parts, stack=stack, num_heads=2)
        )

    assert words(Operation()) == "as it is"
    assert words(transpose) == "transposed"
    assert words(Operation(shape=(1, "d_model"))) == "reshaped"
    assert words(Operation(True, (1, -1))) == "transposed and reshaped"
    assert words(transpose, "ab") == "split in 2 by rows, each transposed"
    assert words(Operation(), "abc", "columns") == "split in 3 by columns"


@pytest.mark.exhaustive
def test_attention_of_both_models_is_compared(agreeing):
    comparison, params, config, _, record = agreeing
    batch, row = chosen_row(record, 1)
    assert batch is record.batches[1]
    assert row == 0
    cross, own = attention_of_both(comparison, params, config, record.pad_id, batch, row)
    assert cross.module == "model.net.decoder.1.cross_attn.softmax"
    assert own.module == "model.net.encoder.0.self_attn.softmax"
    assert cross.ours.shape == (7, 5, 7)
    for attention in (cross, own):
        recorded = batch.blocks[attention.module][row]
        assert np.array_equal(attention.theirs, recorded)
        assert np.abs(attention.ours - recorded).max() < 1e-5


def test_recorded_attention_is_that_of_the_block_and_not_the_most_similar(agreeing):
    comparison, params, config, _, record = agreeing
    batch, row = chosen_row(record, 1)
    blocks = dict(batch.blocks)
    right, other = (f"model.net.decoder.{i}.cross_attn.softmax" for i in (1, 0))
    blocks[right], blocks[other] = np.roll(blocks[right], 1, axis=1), blocks[right]
    cross, _ = attention_of_both(
        comparison, params, config, record.pad_id, batch._replace(blocks=blocks), row
    )
    assert cross.module == right
    assert np.abs(cross.theirs - cross.ours).max() > 1e-3


@pytest.mark.exhaustive
def test_without_recorded_attention_the_report_says_why(differing, tmp_path):
    _, page = page_of(tmp_path / "report.html", differing)
    both = page.text.count("Yours is the recorded output of")
    alone = page.text.count("Only this library's weights are shown")
    assert (both, alone) == (2, 0)  # its softmax returns the weights
    comparison, params, config, named, record = differing
    bare = Record(tuple(b._replace(blocks={}) for b in record.batches), record.pad_id)
    _, page = page_of(tmp_path / "bare.html", (comparison, params, config, named, bare))
    assert page.text.count("Only this library's weights are shown") == 2
    assert "[rows, 7, target, source]" in page.text


def test_fields_that_differ_from_the_default_come_first(agreeing, tmp_path):
    config = agreeing[2]
    text, _ = page_of(tmp_path / "report.html", agreeing)
    shown, folded = text.split("<h2>Config</h2>")[1].split("<details>")
    for field in dataclasses.fields(TransformerConfig):
        changed = getattr(config, field.name) != field.default
        assert (f"<code>{field.name}</code>" in shown) == changed
        assert (f"<code>{field.name}</code>" in folded) != changed


def test_a_model_of_vectors_has_a_report(tmp_path):
    sizes = {"d_model": 8, "num_heads": 2, "d_ff": 12, "max_length": 9}
    config = TransformerConfig(
        **sizes,
        num_encoder_layers=1,
        num_decoder_layers=1,
        token_embeddings="none",
        output_projection="none",
        output_bias=False,
        positions="none",
    )
    torch.manual_seed(0)
    module = torch.nn.Transformer(8, 2, 1, 1, 12, 0.0, batch_first=True)
    module.encoder.norm = module.decoder.norm = None
    params = convert.from_torch(module.state_dict(), config, "torch_nn")
    record = record_module(
        module,
        torch.randn(2, 4, 8),
        torch.randn(2, 3, 8),
        call=lambda m, s, t: m(s, t, tgt_mask=m.generate_square_subsequent_mask(3)),
    )
    named = convert.get_layout("torch_nn")
    comparison = compare_record(params, config, named, record)
    _, page = page_of(tmp_path / "report.html", (comparison, params, config, named, record))
    assert "agrees with yours" in page.text
    assert "Source ids" not in page.text


@pytest.mark.parametrize("preset", ["shared_heads", "t5"])
def test_decoders_over_the_memory_and_relative_biases_have_a_report(preset, tmp_path):
    config = small_config(preset, num_encoder_layers=1, num_decoder_layers=1)
    ids = random_tokens(config)[0]
    record = Record((Batch(ids, ids, np.zeros((*ids.shape, config.tgt_vocab_size)), {}),), None)
    comparison = Comparison((BlockError("logits", "", 0.0),), 1e-5)
    others = (random_params(config), config, convert.get_layout("reference"), record)
    text, page = page_of(tmp_path / "report.html", (comparison, *others))
    assert text.count("<svg") == 2 * config.num_heads
    assert "The record holds the logits and no outputs of blocks" in page.text


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
    comparison, params, config, _, record = agreeing
    short = Layout("short", (Row("a", "source_embedding/embedding"),))
    with pytest.raises(InputError, match="has no row for"):
        write_report(tmp_path / "report.html", comparison, params, config, short, record)
    assert not list(tmp_path.iterdir())
