"""`Translator`: the results of `translate` for one text and for a stream, and what it refuses."""

import dataclasses
from itertools import count, islice

import jax
import numpy as np
import pytest

from jax_transformer import InputError, Translator
from jax_transformer.decoding import cross_attention_weights, score
from jax_transformer.kernels.execution import SearchExecution
from jax_transformer.translation.model_folder import save
from jax_transformer.translation.translate import translate
from tests.models import tiny_model, unchecked

TEXTS = ["abba", "", "a", "cab cab cab cab", " \t ", "b", "bacab"]


def test_a_folder_a_model_and_the_command_agree(model, translator, tmp_path):
    save(tmp_path / "model", model)
    expected = [best for (best,) in translate(model, TEXTS)]
    for source in (tmp_path / "model", str(tmp_path / "model")):
        results = list(Translator(source)(TEXTS))
        assert [result.text for result in results] == [best.text for best in expected]
    assert [result.score for result in translator(TEXTS)] == [best.score for best in expected]
    for text, best in zip(TEXTS, expected, strict=True):
        result = translator(text)
        assert (result.text, result.tokens.tolist()) == (best.text, best.tokens.tolist())
        assert result.alignment is None
    assert repr(translator).count("\n") == 0


def test_options_are_those_of_generate(model, translator):
    options = {"beam_size": 3, "num_hypotheses": 2, "length_penalty": 0.8, "max_new_tokens": 7}
    both = zip(translator(TEXTS, **options), translate(model, TEXTS, **options), strict=True)
    for result, best in both:
        assert [other.text for other in result.hypotheses] == [other.text for other in best]
        assert result.score == result.hypotheses[0].score >= result.hypotheses[1].score


def test_a_stream_has_no_end_and_is_in_order(model, translator):
    read = []

    def endless():
        for number in count():
            read.append(number)
            yield TEXTS[number % len(TEXTS)]

    results = translator(endless(), window=160)
    assert not read
    texts = [result.text for result in islice(results, 150)]
    assert len(read) == 128 + 160
    cycle = [best.text for (best,) in translate(model, TEXTS)]
    assert texts == [cycle[number % len(TEXTS)] for number in range(150)]


def test_a_prefix_stands_before_every_text_but_blank_ones(translator):
    texts = ["a", " ", "\u200b\ufeff", "cab"]
    results = [result.text for result in translator(texts, prefix="bead ")]
    assert results == [translator("bead a").text, "", "", translator("bead cab").text]


@pytest.mark.exhaustive
def test_alignments_are_the_models_attention(model, translator):
    texts = [*TEXTS, *["fed dab"] * 9]
    results = translator(texts, alignments=True, window=9)
    for number, (text, result) in enumerate(zip(texts, results, strict=True), start=1):
        if not text.strip():
            assert result.alignment is None
            continue
        src = np.array(model.tokenizer.encode_source([text]))
        weights = cross_attention_weights(model.params, model.config, src, result.tokens[None])
        assert np.allclose(result.alignment.weights, weights[0].mean(axis=(0, 1)), atol=1e-6)
        assert len(result.alignment.source) == src.shape[1]
        assert result.alignment.line == number


def test_dtype_and_execution(model):
    half = Translator(model, dtype="bfloat16")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(half.model.params)} == {"bfloat16"}
    assert half("abba").hypotheses
    joined = Translator(model, execution=SearchExecution(cache="joined_heads"))
    assert joined("abba").text == Translator(model)("abba").text


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (7, {}, "text=7 must be a string or an iterable of strings"),
        ("a", {"beam": 4}, "beam"),
        (["a"], {"beam_size": 0}, "beam_size=0"),
        (["a"], {"window": 0}, "window=0 must be a whole number, at least 1"),
        (
            "a",
            {"target_lang": "de"},
            "a loaded model: target_lang='de': the model has no language codes",
        ),
    ],
)
def test_what_no_call_takes_is_refused_at_once(translator, text, options, message):
    with unchecked(), pytest.raises((InputError, TypeError), match=message):
        translator(text, **options)


def test_what_a_stream_brings_is_refused_where_it_comes(translator):
    def broken():
        yield from ["a"] * 128
        yield "b"
        raise OSError("the disk is gone")

    results = translator(broken())
    assert len(list(islice(results, 128))) == 128
    with pytest.raises(OSError, match="the disk is gone"):
        next(results)
    with unchecked(), pytest.raises(InputError, match="text 2 is None, and must be a string"):
        list(translator(["a", None]))
    with pytest.raises(InputError, match=r"line 1 is .* tokens long"):
        translator("cab " * 50)
    assert translator("cab " * 50, overlong="cut").text
    with pytest.raises(InputError, match="cannot split the line"):
        translator("\ud800")


@pytest.mark.exhaustive
def test_an_ensemble_chooses_by_the_mean_of_log_probabilities(model, translator):
    other = model._replace(params=jax.tree.map(lambda leaf: -0.7 * leaf[::-1], model.params))
    both = Translator([model, other])
    assert len({translator("abba").text, Translator(other)("abba").text, both("abba").text}) == 3
    options = {"beam_size": 3, "num_hypotheses": 3, "max_new_tokens": 9}
    same = Translator([model, model, model])
    for three, one in zip(same(TEXTS, **options), translator(TEXTS, **options), strict=True):
        assert [best.text for best in three.hypotheses] == [best.text for best in one.hypotheses]
        assert three.score == pytest.approx(one.score, abs=1e-5)
    src = np.array(model.tokenizer.encode_source(["abba"]))
    result = both("abba", length_penalty=0.0, max_new_tokens=5)
    scores = [
        score(each.params, each.config, src, result.tokens[None])[0] for each in (model, other)
    ]
    # A sum of some -47 in float32: a step at a time, or in one pass that adds in another order.
    assert result.score == pytest.approx(float(sum(scores)) / 2, rel=1e-6)


def test_models_that_make_no_translator_are_refused_in_one_line(model, tmp_path):
    save(tmp_path / "model", model)
    another = tiny_model(["xyz"], vocab_size=16, seed=1, max_length=40)
    shorter = model._replace(config=dataclasses.replace(model.config, max_length=30))
    no_codes = "target_lang='de': the model has no language codes"
    for source, options, message in (
        (tmp_path / "nothing", {}, "is not the folder of a trained model"),
        (model, {"target_lang": "de"}, no_codes),
        (tmp_path / "model", {"target_lang": "de"}, no_codes),
        (model, {"dtype": "int8"}, "dtype='int8' must be 'float32' or"),
        ([model, another], {}, "an ensemble needs one tokenizer"),
        ([model, shorter], {}, r"an ensemble needs one max_length, but .* \[40, 30\]"),
        ([], {}, "model is an empty list"),
    ):
        with unchecked(), pytest.raises(InputError, match=message) as refusal:
            Translator(source, **options)
        assert "\n" not in str(refusal.value)
