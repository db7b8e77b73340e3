"""The built-in task: English number words to German ones: "fifty-six" to "sechsundfünfzig".

A model must learn to reorder and to join words.
"""

import re
from collections.abc import Iterable

import numpy as np

from jax_transformer.text.parallel_text import Text

NUMBERS = 10_000  # the corpus contains every number from 0 to NUMBERS - 1
HELD_OUT = 1_000  # numbers that are held out for validation

ENGLISH_BELOW_20 = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
).split()
ENGLISH_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
GERMAN_BELOW_20 = (
    "null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn "
    "fünfzehn sechzehn siebzehn achtzehn neunzehn"
).split()
GERMAN_TENS = "zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig".split()


def english(numbers: Iterable[int]) -> tuple[str, ...]:
    """Return numbers below a million in English: 21 is "twenty-one"."""
    tens = [f"{ten}-{unit}" for ten in ENGLISH_TENS for unit in ENGLISH_BELOW_20[:10]]
    below_100 = ["", *ENGLISH_BELOW_20[1:], *[word.removesuffix("-zero") for word in tens]]
    hundreds = [f"{unit} hundred {rest}" for unit in ENGLISH_BELOW_20[1:10] for rest in below_100]
    below = [*below_100, *hundreds]
    words = [
        (f"{below[n // 1000]} thousand " if n >= 1000 else "") + below[n % 1000] for n in numbers
    ]
    return tuple([" ".join(word.split()) or ENGLISH_BELOW_20[0] for word in words])


def german(numbers: Iterable[int]) -> tuple[str, ...]:
    """Return numbers below a million in German: 21 is "einundzwanzig"."""
    first = ["", "ein", *GERMAN_BELOW_20[2:10]]  # a digit as the first part of a longer word
    tens = [f"{unit}und{ten}" for ten in GERMAN_TENS for unit in first]
    below_100 = ["", *GERMAN_BELOW_20[1:], *[word.removeprefix("und") for word in tens]]
    below = [*below_100, *[f"{unit}hundert{rest}" for unit in first[1:] for rest in below_100]]
    thousands = [re.sub("eins$", "ein", word) + "tausend" for word in below]
    words = [(thousands[n // 1000] if n >= 1000 else "") + below[n % 1000] for n in numbers]
    return tuple([word or GERMAN_BELOW_20[0] for word in words])


def corpus(seed: int) -> tuple[Text, Text]:
    """Return the training pairs and the held-out pairs of all numbers below `NUMBERS`.

    Zero is always a training pair, because its word occurs in no other number.
    """
    order = 1 + np.random.default_rng(seed).permutation(NUMBERS - 1)
    return _pairs([0, *order[HELD_OUT:].tolist()]), _pairs(order[:HELD_OUT].tolist())


def _pairs(numbers: list[int]) -> Text:
    numbers = sorted(numbers)
    return Text(english(numbers), german(numbers))
