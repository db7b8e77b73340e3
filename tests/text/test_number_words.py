import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_transformer.errors import InputError
from jax_transformer.text import number_words
from jax_transformer.text.number_words import english, german

WRITTEN_BY_HAND = {
    0: ("zero", "null"),
    1: ("one", "eins"),
    2: ("two", "zwei"),
    3: ("three", "drei"),
    6: ("six", "sechs"),
    7: ("seven", "sieben"),
    10: ("ten", "zehn"),
    11: ("eleven", "elf"),
    12: ("twelve", "zwölf"),
    13: ("thirteen", "dreizehn"),
    16: ("sixteen", "sechzehn"),
    17: ("seventeen", "siebzehn"),
    18: ("eighteen", "achtzehn"),
    20: ("twenty", "zwanzig"),
    21: ("twenty-one", "einundzwanzig"),
    26: ("twenty-six", "sechsundzwanzig"),
    30: ("thirty", "dreißig"),
    33: ("thirty-three", "dreiunddreißig"),
    40: ("forty", "vierzig"),
    56: ("fifty-six", "sechsundfünfzig"),
    60: ("sixty", "sechzig"),
    67: ("sixty-seven", "siebenundsechzig"),
    70: ("seventy", "siebzig"),
    77: ("seventy-seven", "siebenundsiebzig"),
    81: ("eighty-one", "einundachtzig"),
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


@given(number=st.integers(0, 999_999))
def test_words_are_read_back_by_parsers(number):
    assert read_english(english(number)) == number
    assert read_german(german(number)) == number


@pytest.mark.parametrize("number", [-1, 1_000_000])
@pytest.mark.parametrize("words", [english, german])
def test_a_number_out_of_range_is_refused(words, number):
    with pytest.raises(InputError, match=rf"number={number} "):
        words(number)


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


def read_english(words):
    values = {
        **{word: value for value, word in enumerate(["zero", "one", "two", "three", "four"])},
        **{word: 5 + value for value, word in enumerate(["five", "six", "seven", "eight"])},
        "nine": 9,
        "ten": 10,
        "eleven": 11,
        "twelve": 12,
        "thirteen": 13,
        "fifteen": 15,
        "eighteen": 18,
        "twenty": 20,
        "thirty": 30,
        "forty": 40,
        "fifty": 50,
        "eighty": 80,
    }
    total = below_1000 = 0
    for word in re.split("[ -]", words):
        if word == "thousand":
            total, below_1000 = 1000 * below_1000, 0
        elif word == "hundred":
            below_1000 *= 100
        elif word in values:
            below_1000 += values[word]
        elif word.endswith("teen"):
            below_1000 += 10 + values[word.removesuffix("teen")]
        else:
            below_1000 += 10 * values[word.removesuffix("ty")]
    return total + below_1000


def read_german(word):
    units = {"null": 0, "ein": 1, "eins": 1, "zwei": 2, "drei": 3, "vier": 4, "fünf": 5}
    units |= {"sechs": 6, "sieben": 7, "acht": 8, "neun": 9, "zehn": 10, "elf": 11, "zwölf": 12}
    units |= {"sechzehn": 16, "siebzehn": 17}
    units |= {f"{unit}zehn": 10 + units[unit] for unit in ("drei", "vier", "fünf", "acht", "neun")}
    tens = {"zwanzig": 20, "dreißig": 30, "sechzig": 60, "siebzig": 70}
    tens |= {f"{unit}zig": 10 * units[unit] for unit in ("vier", "fünf", "acht", "neun")}

    def choice(words):
        return "|".join(sorted(words, key=len, reverse=True))

    below_100 = rf"(?:({choice(units)})(?!zig|ßig)(und)?)?({choice(tens)})?"
    below_1000 = rf"(?:({choice(units)})hundert)?{below_100}"
    parts = re.fullmatch(rf"(?:{below_1000}(tausend))?{below_1000}", word)
    assert parts, word
    assert not re.search("eins(?!$)|ein$", word), word

    def value(hundreds, unit, joined, ten):
        assert bool(joined) == bool(unit and ten), word
        return 100 * units.get(hundreds, 0) + units.get(unit, 0) + tens.get(ten, 0)

    groups = parts.groups()
    return 1000 * value(*groups[:4]) + value(*groups[5:])
