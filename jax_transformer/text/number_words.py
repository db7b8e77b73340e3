"""The built-in task: English number words to German ones: "fifty-six" to "sechsundfünfzig".

A model must learn to reorder and to join words.
"""

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


def english(number: int) -> str:
    """Return a number below a million in English: 21 is "twenty-one"."""
    thousands, below_1000 = divmod(number, 1000)
    hundreds, below_100 = divmod(below_1000, 100)
    words = []
    if thousands:
        words += [english(thousands), "thousand"]
    if hundreds:
        words += [ENGLISH_BELOW_20[hundreds], "hundred"]
    if below_100 >= 20:
        tens, units = divmod(below_100, 10)
        words.append(ENGLISH_TENS[tens - 2] + (f"-{ENGLISH_BELOW_20[units]}" if units else ""))
    elif below_100 or not number:
        words.append(ENGLISH_BELOW_20[below_100])
    return " ".join(words)


def german(number: int) -> str:
    """Return a number below a million in German: 21 is "einundzwanzig"."""
    thousands, below_1000 = divmod(number, 1000)
    hundreds, below_100 = divmod(below_1000, 100)
    word = ""
    if thousands:
        word += _as_prefix(german(thousands)) + "tausend"
    if hundreds:
        word += _as_prefix(GERMAN_BELOW_20[hundreds]) + "hundert"
    if below_100 >= 20:
        tens, units = divmod(below_100, 10)
        word += f"{_as_prefix(GERMAN_BELOW_20[units])}und" if units else ""
        word += GERMAN_TENS[tens - 2]
    elif below_100 or not number:
        word += GERMAN_BELOW_20[below_100]
    return word


def corpus(seed: int) -> tuple[Text, Text]:
    """Return the training pairs and the held-out pairs of all numbers below `NUMBERS`.

    Zero is always a training pair, because its word occurs in no other number.
    """
    order = 1 + np.random.default_rng(seed).permutation(NUMBERS - 1)
    return _pairs([0, *order[HELD_OUT:].tolist()]), _pairs(order[:HELD_OUT].tolist())


def _pairs(numbers: list[int]) -> Text:
    numbers = sorted(numbers)
    return Text(tuple(map(english, numbers)), tuple(map(german, numbers)))


def _as_prefix(word: str) -> str:
    """Return a number word as the first part of a longer one: a final "eins" becomes "ein"."""
    return word.removesuffix("s") if word.endswith("eins") else word
