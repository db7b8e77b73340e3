import pytest

from jax_transformer.text import number_words
from jax_transformer.text.number_words import english, german

WRITTEN_BY_HAND = {  # every word of both languages, alone or as a part
    0: ("zero", "null"),
    1: ("one", "eins"),
    7: ("seven", "sieben"),
    16: ("sixteen", "sechzehn"),
    17: ("seventeen", "siebzehn"),
    21: ("twenty-one", "einundzwanzig"),
    30: ("thirty", "dreißig"),
    67: ("sixty-seven", "siebenundsechzig"),
    70: ("seventy", "siebzig"),
    100: ("one hundred", "einhundert"),
    101: ("one hundred one", "einhunderteins"),
    111: ("one hundred eleven", "einhundertelf"),
    1000: ("one thousand", "eintausend"),
    1001: ("one thousand one", "eintausendeins"),
    1101: ("one thousand one hundred one", "eintausendeinhunderteins"),
    2345: ("two thousand three hundred forty-five", "zweitausenddreihundertfünfundvierzig"),
    6890: ("six thousand eight hundred ninety", "sechstausendachthundertneunzig"),
    9999: ("nine thousand nine hundred ninety-nine", "neuntausendneunhundertneunundneunzig"),
    10012: ("ten thousand twelve", "zehntausendzwölf"),
    13014: ("thirteen thousand fourteen", "dreizehntausendvierzehn"),
    15018: ("fifteen thousand eighteen", "fünfzehntausendachtzehn"),
    21019: ("twenty-one thousand nineteen", "einundzwanzigtausendneunzehn"),
    50080: ("fifty thousand eighty", "fünfzigtausendachtzig"),
    101001: ("one hundred one thousand one", "einhunderteintausendeins"),
}


def test_words_equal_those_written_by_hand():
    words = zip(english(WRITTEN_BY_HAND), german(WRITTEN_BY_HAND), strict=True)
    assert dict(zip(WRITTEN_BY_HAND, words, strict=True)) == WRITTEN_BY_HAND


def test_the_parts_share_no_number_hold_all_and_are_a_function_of_the_seed(monkeypatch):
    monkeypatch.setattr(number_words, "NUMBERS", 400)
    monkeypatch.setattr(number_words, "HELD_OUT", 50)
    training, held_out = number_words.corpus(seed=0)
    everything = dict(zip(english(range(400)), german(range(400)), strict=True))
    assert (len(training.sources), len(held_out.sources)) == (350, 50)
    assert {*training.sources} | {*held_out.sources} == {*everything}
    for part in (training, held_out):
        assert part.targets == tuple(everything[source] for source in part.sources)
    assert number_words.corpus(seed=0) == (training, held_out)
    assert number_words.corpus(seed=4) != (training, held_out)


@pytest.mark.parametrize("seed", [0, 1])
def test_every_word_is_trained_on(seed):
    training, held_out = number_words.corpus(seed)
    trained = set(" ".join(training.sources).replace("-", " ").split())
    assert set(" ".join(held_out.sources).replace("-", " ").split()) <= trained
    assert "zero" in training.sources
