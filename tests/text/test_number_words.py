import pytest

from jax_transformer.text import number_words
from jax_transformer.text.number_words import english, german

WRITTEN_BY_HAND = {
    0: ("zero", "null"),
    1: ("one", "eins"),
    2: ("two", "zwei"),
    3: ("three", "drei"),
    4: ("four", "vier"),
    5: ("five", "fünf"),
    6: ("six", "sechs"),
    7: ("seven", "sieben"),
    8: ("eight", "acht"),
    9: ("nine", "neun"),
    10: ("ten", "zehn"),
    11: ("eleven", "elf"),
    12: ("twelve", "zwölf"),
    13: ("thirteen", "dreizehn"),
    14: ("fourteen", "vierzehn"),
    15: ("fifteen", "fünfzehn"),
    16: ("sixteen", "sechzehn"),
    17: ("seventeen", "siebzehn"),
    18: ("eighteen", "achtzehn"),
    19: ("nineteen", "neunzehn"),
    20: ("twenty", "zwanzig"),
    21: ("twenty-one", "einundzwanzig"),
    26: ("twenty-six", "sechsundzwanzig"),
    30: ("thirty", "dreißig"),
    33: ("thirty-three", "dreiunddreißig"),
    40: ("forty", "vierzig"),
    50: ("fifty", "fünfzig"),
    56: ("fifty-six", "sechsundfünfzig"),
    60: ("sixty", "sechzig"),
    67: ("sixty-seven", "siebenundsechzig"),
    70: ("seventy", "siebzig"),
    77: ("seventy-seven", "siebenundsiebzig"),
    80: ("eighty", "achtzig"),
    81: ("eighty-one", "einundachtzig"),
    90: ("ninety", "neunzig"),
    99: ("ninety-nine", "neunundneunzig"),
    100: ("one hundred", "einhundert"),
    101: ("one hundred one", "einhunderteins"),
    111: ("one hundred eleven", "einhundertelf"),
    121: ("one hundred twenty-one", "einhunderteinundzwanzig"),
    200: ("two hundred", "zweihundert"),
    616: ("six hundred sixteen", "sechshundertsechzehn"),
    777: ("seven hundred seventy-seven", "siebenhundertsiebenundsiebzig"),
    1000: ("one thousand", "eintausend"),
    1001: ("one thousand one", "eintausendeins"),
    1012: ("one thousand twelve", "eintausendzwölf"),
    1100: ("one thousand one hundred", "eintausendeinhundert"),
    1101: ("one thousand one hundred one", "eintausendeinhunderteins"),
    2345: (
        "two thousand three hundred forty-five",
        "zweitausenddreihundertfünfundvierzig",
    ),
    7016: ("seven thousand sixteen", "siebentausendsechzehn"),
    9999: (
        "nine thousand nine hundred ninety-nine",
        "neuntausendneunhundertneunundneunzig",
    ),
    10000: ("ten thousand", "zehntausend"),
    17000: ("seventeen thousand", "siebzehntausend"),
    21000: ("twenty-one thousand", "einundzwanzigtausend"),
    30030: ("thirty thousand thirty", "dreißigtausenddreißig"),
    100000: ("one hundred thousand", "einhunderttausend"),
    101001: ("one hundred one thousand one", "einhunderteintausendeins"),
    200100: ("two hundred thousand one hundred", "zweihunderttausendeinhundert"),
    999999: (
        "nine hundred ninety-nine thousand nine hundred ninety-nine",
        "neunhundertneunundneunzigtausendneunhundertneunundneunzig",
    ),
}


@pytest.mark.parametrize("number", WRITTEN_BY_HAND)
def test_words_equal_those_written_by_hand(number):
    assert (english(number), german(number)) == WRITTEN_BY_HAND[number]


@pytest.mark.parametrize("words", [english, german])
def test_no_two_numbers_share_their_words(words):
    assert len(set(map(words, range(20_000)))) == 20_000


def test_the_parts_share_no_number_and_hold_all():
    training, held_out = number_words.corpus(seed=0)
    everything = {english(n): german(n) for n in range(number_words.NUMBERS)}
    assert len(held_out.sources) == number_words.HELD_OUT
    assert len(training.sources) == number_words.NUMBERS - number_words.HELD_OUT
    assert set(training.sources).isdisjoint(held_out.sources)
    assert set(training.targets).isdisjoint(held_out.targets)
    for part in (training, held_out):
        assert part.targets == tuple(everything[source] for source in part.sources)


@pytest.mark.exhaustive
def test_the_parts_are_a_function_of_the_seed():
    assert number_words.corpus(seed=3) == number_words.corpus(seed=3)
    assert number_words.corpus(seed=3) != number_words.corpus(seed=4)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_word_is_trained_on(seed):
    training, held_out = number_words.corpus(seed)
    trained = set(" ".join(training.sources).replace("-", " ").split())
    assert set(" ".join(held_out.sources).replace("-", " ").split()) <= trained
    assert "zero" in training.sources
