"""Where the model looked: the weights that are drawn, their labels, and the picture's file."""

import importlib.util

import numpy as np
import pytest

from jax_transformer import InputError, Translator
from jax_transformer.decoding import cross_attention_weights
from jax_transformer.translation.alignment_plot import (
    MAX_TOKENS,
    Alignment,
    alignments,
    check_picture,
    draw,
    figure_of,
)
from jax_transformer.translation.translate import Translation, translate
from tests.models import tiny_model

LINES = ["", "cab", "üß $ abc", " ", "b Ж"]


@pytest.fixture(scope="module")
def model():
    """A model of two decoder layers, which differ."""
    fields = {"vocab_size": 13, "seed": 3, "max_length": 12, "num_decoder_layers": 2}
    model = tiny_model(["abc cab üß $"], **fields)
    return model._replace(generation={"forced_last_token": model.config.eos_id})


@pytest.fixture(scope="module")
def drawn(model):
    """The alignments of the lines, the longest of them cut."""
    lines = [*LINES, "abc " * 9, *["b"] * 9]
    translations = list(translate(model, lines, overlong="cut", max_new_tokens=5))
    aligned = alignments(model, lines, translations)
    assert [index for index, one in enumerate(aligned) if one is None] == [0, 3]
    shown = alignments(model, lines, translations, 6)
    assert sum(one is not None for one in shown) == 6
    return [one for one in aligned if one is not None][:6], translations


def make_alignment(source_length, target_length):
    random = np.random.default_rng(0)
    weights = random.dirichlet(np.ones(source_length), target_length).astype(np.float32)
    source = [f"s{index}" for index in range(source_length)]
    return Alignment(7, source, [f"t{index}" for index in range(target_length)], weights)


@pytest.mark.exhaustive
def test_a_notebook_draws_an_alignment_and_shows_a_result_as_a_table(model):
    result = Translator(model)("c<ab", alignments=True, beam_size=2, num_hypotheses=2)
    assert repr(result).startswith(f"TranslationResult({result.text!r}, score=")
    assert repr(result).endswith(", 2 hypotheses)")
    lengths = (
        f"{len(result.alignment.target)} target tokens x {len(result.alignment.source)} source"
    )
    assert repr(result.alignment) == f"Alignment(line=1, {lengths} tokens)"
    assert "<svg" in (shown := result._repr_html_())
    assert shown.count("<tr>") == 3
    escaped = result._replace(hypotheses=[Translation("<b>", 0.0, np.zeros(1, np.int32))] * 2)
    assert "&lt;b&gt;" in escaped._replace(alignment=None)._repr_html_()


@pytest.mark.exhaustive
def test_the_first_lines_with_text_are_shown_by_their_numbers_and_tokens(drawn):
    shown, _ = drawn
    assert [one.line for one in shown] == [2, 3, 5, 6, 7, 8]
    assert shown[0].source == ["▁", "c", "ab", "</s>"]
    assert "".join(shown[1].source) == "▁üß▁$▁abc</s>"
    assert shown[2].source == ["▁", "b", "▁", "<unk>", "</s>"]
    assert len(shown[3].source) == 12
    assert shown[3].source[-1] == "</s>"
    assert all(one.target[-1] == "</s>" for one in shown)


def test_weights_are_the_models_over_its_layers_and_heads(model, drawn):
    config, params, tokenizer, _ = model
    shown, translations = drawn
    tokens = translations[1][0].tokens
    src = np.array([[*tokenizer.encode_source(["cab"])[0][:-1], config.eos_id]], np.int32)
    weights = np.asarray(cross_attention_weights(params, config, src, tokens[None]))[0]
    assert len({round(float(weight[0, 0]), 6) for weight in weights.reshape(4, -1, 4)}) == 4
    assert np.allclose(shown[0].weights, sum(weights.reshape(4, -1, 4)) / 4, atol=1e-6)
    for one in shown:
        assert one.weights.shape == (len(one.target), len(one.source))
        assert np.allclose(one.weights.sum(axis=1), 1, atol=1e-5)


def test_no_text_has_no_alignments(model, tmp_path):
    lines = ["", " "]
    nothing = alignments(model, lines, list(translate(model, lines)))
    assert nothing == [None, None]
    with pytest.raises(InputError, match=r"plot\.png: not drawn, because no line holds text"):
        draw(tmp_path / "plot.png", nothing)
    assert not any(tmp_path.iterdir())


def test_every_token_is_labelled_on_its_axis(tmp_path, drawn):
    shown, _ = drawn
    draw(tmp_path / "plot.svg", shown)
    *panels, colorbar = figure_of(shown).axes
    assert "mean over layers and heads" in colorbar.get_ylabel()
    for panel, one in zip(panels, shown, strict=True):
        assert panel.get_title(loc="left") == f"line {one.line}"
        assert (panel.get_xlabel(), panel.get_ylabel()) == ("source", "translation")
        assert [label.get_text() for label in panel.get_xticklabels()] == one.source
        assert [label.get_text() for label in panel.get_yticklabels()] == one.target
        assert np.array_equal(panel.images[0].get_array(), one.weights)
    assert "line 3" in (tmp_path / "plot.svg").read_text("utf-8")


@pytest.mark.parametrize("sizes", [[(4, 4)] * 6, [(20, 30)] * 5, [(60, 60), (3, 3)], [(7, 60)]])
def test_several_lines_stand_in_a_grid(sizes):
    figure = figure_of([make_alignment(*size) for size in sizes])
    assert len(figure.axes) == len(sizes) + 1  # and the bar of colours
    width, height = figure.get_size_inches()
    assert len(sizes) == 1 or max(width, height) < 2.5 * min(width, height)


def test_of_long_lines_the_first_tokens_are_drawn():
    sizes = (MAX_TOKENS + 1, MAX_TOKENS - 1), (MAX_TOKENS, MAX_TOKENS)
    cut, whole = (figure_of([make_alignment(*size)]).axes[0] for size in sizes)
    assert cut.get_title(loc="left") == "line 7, its first tokens"
    assert cut.images[0].get_array().shape == (MAX_TOKENS - 1, MAX_TOKENS)
    assert len(cut.get_xticklabels()) == MAX_TOKENS
    assert whole.get_title(loc="left") == "line 7"


def test_dollars_in_a_token_are_no_mathematics(tmp_path):
    tokens = ["$\\no$", "b"]
    draw(tmp_path / "plot.svg", [make_alignment(2, 2)._replace(source=tokens, target=tokens)])
    assert (tmp_path / "plot.svg").read_text("utf-8").count("<!-- $\\no$ -->") == 2


def test_a_picture_is_written_whole_and_replaced_only_when_told(tmp_path):
    path = tmp_path / "plot.svg"
    draw(path, [make_alignment(2, 3)])
    first = path.read_bytes()
    assert first.startswith(b"<?xml")
    with pytest.raises(InputError, match="exists already"):
        draw(path, [make_alignment(4, 3)])
    assert path.read_bytes() == first
    draw(path, [make_alignment(4, 3)], overwrite=True)
    assert path.read_bytes() != first
    assert list(tmp_path.iterdir()) == [path]


def test_a_picture_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    (tmp_path / "folder.png").mkdir()
    for name, message in (
        ("plot.jpg", r"must end in \.png, \.pdf or \.svg"),
        ("plot", r"must end in \.png, \.pdf or \.svg"),
        ("nowhere/plot.png", "nowhere is not a writable folder"),
        ("folder.png", "exists already"),
    ):
        with pytest.raises(InputError, match=message):
            check_picture(tmp_path / name, overwrite=True)
    check_picture(tmp_path / "plot.png", overwrite=False)
    (tmp_path / "link.png").symlink_to("nowhere")
    with pytest.raises(InputError, match="exists already"):
        check_picture(tmp_path / "link.png", overwrite=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"needs matplotlib; install jax-transformer\[train\]"):
        check_picture(tmp_path / "plot.png", overwrite=False)
