"""Marian's own folders, read and written: against Marian's results and a rebuild in numpy."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import jax_transformer
from jax_transformer.convert import from_huggingface, to_huggingface
from jax_transformer.convert.huggingface import load_folder
from tests.convert.marian.published import PUBLISHED
from tests.convert.marian.rebuild import Marian
from tests.tiers import tiered_rows

HERE = Path(__file__).parent
TRAINED = ["self_attention", "ssru"]
QUICK = ("opus_mt", "separate", "student_top", "rms", "no_projection")
SOURCE, TARGET = [4, 5, 1, 8, 0], [5, 2, 2, 0]


@pytest.mark.parametrize("name", TRAINED)
def test_translations_and_scores_are_those_of_marian(name):
    expected = json.loads((HERE / name / "marian.json").read_text())
    translator = jax_transformer.Translator(HERE / name)
    results = translator(expected["sources"], num_hypotheses=4)
    for result, hypotheses in zip(results, expected["translations"], strict=True):
        assert [each.text for each in result.hypotheses] == [text for text, *_ in hypotheses]
        scores = [each.score for each in result.hypotheses]
        np.testing.assert_allclose(scores, [score for *_, score in hypotheses], rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    tiered_rows(PUBLISHED.items(), lambda name, _: name in QUICK),
    ids=PUBLISHED,
)
def test_logits_are_those_of_a_rebuild(name, options, tmp_path):
    marian = Marian(options)
    config, params = from_huggingface(marian.save(tmp_path / "model"))
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
        src, tgt = np.array([SOURCE]), np.array([[config.bos_id, *TARGET[:-1]]])
        logits = jax_transformer.apply(wide, config, src, tgt)[0]
    expected = marian.logits(SOURCE, TARGET)
    np.testing.assert_allclose(logits[:, :-1], expected, rtol=0, atol=1e-12 * abs(expected).max())
    assert np.exp(logits[:, -1] - logits.max()).max() == 0  # padding takes no probability


@pytest.mark.parametrize(
    ("name", "options"),
    tiered_rows(PUBLISHED.items(), lambda name, _: name in QUICK),
    ids=PUBLISHED,
)
def test_a_folder_that_is_written_is_read_equal(name, options, tmp_path):
    marian = Marian(options, seed=3)
    folder, back = marian.save(tmp_path / "model"), tmp_path / "back"
    config, params, tokenizer, _ = load_folder(folder)
    to_huggingface(params, config, back, family="marian_npz", tokenizer=tokenizer)
    with np.load(back / "model.npz") as written:
        for name, array in marian.params.items():
            np.testing.assert_array_equal(written[name], array)
    again = load_folder(back)
    assert again[0] == config
    jax.tree.map(np.testing.assert_array_equal, again[1], params)
    lines = ["a man on null", ' "  #', "5:30 ü </s> unknown"]
    assert again[2].encode_source(lines) == tokenizer.encode_source(lines)
