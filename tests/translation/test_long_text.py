"""Long text: no character is lost between its sentences, and its paragraphs stay."""

import sys

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jax_transformer import InputError
from jax_transformer.translation.sources import split_sentences
from tests.tiers import tiered
from tests.translation.streams import translate_stream

LANGUAGES = ("en", "de", "ja", "hi", "ru", "xx")
# Text of sentences, and any other text.
MARKS = [*" .!?\n\r\t\u2028\u3000\xa0\\\"'()。", "Dr. ", "A. ", "U.S. ", "1) ", "ab"]
TEXTS = st.one_of(st.lists(st.sampled_from(MARKS)).map("".join), st.text())
PARAGRAPHS = (
    '  Cab fed, e.g. Dr. Abc. Dab bead?  "Fab!"\n\n\n\tBead cab. Dab!\r\nFed 3.5 bad. \n'
    "- cab\n\u2028 \n"
)


@given(TEXTS, st.sampled_from(LANGUAGES))
@example("A\u2028.\u2028", "en")  # sentencex 1.0.32 alone ends in a panic
@example("A\ud800. B", "en")
@example("", "de")
def test_the_parts_of_any_text_are_the_text(text, language):
    parts = split_sentences(text, language)
    assert "".join(parts) == text
    assert len(parts) % 2 == 1
    assert not "".join(parts[0::2]).strip()
    for sentence in parts[1::2]:
        assert sentence
        assert sentence == sentence.strip()
        assert len(sentence.splitlines()) == 1


def test_sentences_end_where_a_reader_sees_it():
    parts = split_sentences(PARAGRAPHS, "en")
    assert parts == [
        *("  ", "Cab fed, e.g. Dr. Abc.", " ", "Dab bead?", "  ", '"Fab!"', "\n\n\n\t"),
        *("Bead cab.", " ", "Dab!", "\r\n", "Fed 3.5 bad.", " \n", "- cab", "\n\u2028 \n"),
    ]
    assert split_sentences("これは文です。次の文。", "ja")[1::2] == ["これは文です。", "次の文。"]
    german = "Das ist z.B. Nr. 5. Er kam evtl. Montag."
    assert split_sentences(german, "de")[1::2] == ["Das ist z.B. Nr. 5.", "Er kam evtl. Montag."]


UNITS = ["a", "ab. ", ".", '"', "1. a ", "A. ", "(", "\n"]


@pytest.mark.parametrize("unit", tiered(UNITS, ["1. a "]))
def test_a_line_of_100_000_characters_is_split_and_stays_whole(unit):
    """In a tenth of a second; a splitter whose time grows with the square takes minutes."""
    text = (unit * 100_000)[:100_000]
    assert "".join(split_sentences(text, "en")) == text


def test_sentences_are_translated_apart_and_all_around_them_stays(translator):
    texts = [PARAGRAPHS, "", " \n ", "cab", "Cab bead. " * 30]
    results = list(translator(texts, split_sentences="en", window=3))
    for text, result in zip(texts, results, strict=True):
        parts = split_sentences(text, "en")
        alone = [translator(sentence) for sentence in parts[1::2]]
        parts[1::2] = [one.text for one in alone]
        assert result.text == "".join(parts)
        # In float32, and in batches of other shapes.
        assert result.score == pytest.approx(sum(one.score for one in alone), rel=1e-4)
        tokens = [token for one in alone for token in one.tokens.tolist()]
        assert result.tokens.tolist() == tokens
        assert result.tokens.dtype == np.int32
    assert len({result.text for result in results}) == len(texts)
    assert translator(PARAGRAPHS, split_sentences="en").text == results[0].text
    assert translator(" \n ", split_sentences="en").text == " \n "


def test_a_prefix_stands_before_every_sentence(translator):
    found = translator("Cab. Dab!", split_sentences="en", prefix="fed ").text
    assert found == f"{translator('fed Cab.').text} {translator('fed Dab!').text}"


def test_a_bad_sentence_is_left_out_and_its_line_is_told(model, translator):
    text, bad = ["Cab.", f"Dab. {'cab ' * 70}. Fed!", "\u200b"], []
    found = translate_stream(model, text, split_sentences="en", bad_lines=bad)
    first, second, blank = [best.text for (best,) in found]
    assert bad == [2]
    assert second == f"{translator('Dab.').text}  {translator('Fed!').text}"
    assert (first, blank) == (translator("Cab.").text, "")


@pytest.mark.exhaustive
def test_sampled_sentences_depend_on_their_place_alone(translator):
    options = {"split_sentences": "en", "seed": 3, "temperature": 4.0}
    texts = ["Cab. Cab. Cab. Cab.", "Fed.", "Cab. Cab. Cab. Cab."]
    results = [result.text for result in translator(texts, **options)]
    assert results == [result.text for result in translator(texts, window=1, **options)]
    assert results[0] != results[2]
    assert translator(texts[0], **options).text == results[0]


def test_what_makes_no_sense_with_sentences_is_refused_at_once(translator, monkeypatch):
    with pytest.raises(InputError, match="'en': alignments are of whole lines"):
        translator(["a"], split_sentences="en", alignments=True)
    monkeypatch.setitem(sys.modules, "sentencex", None)
    with pytest.raises(ModuleNotFoundError) as missing:
        translator(["a"], split_sentences="en")
    wanted = 'is not installed: pip install "jax-transformer[sentences]"'
    assert str(missing.value) == f"split_sentences needs sentencex, which {wanted}"
