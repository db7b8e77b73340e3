"""Long text: the sentences of a text, which are translated apart, and what stands between them.

The library sentencex (the extra [sentences]) finds their ends by rules, without a network.
"""

import re
from itertools import accumulate, pairwise

from jax_transformer.errors import InputError, check_installed, naming_the_extra, shorten
from jax_transformer.tokenizers.segmenters import library_faults

LANGUAGE = re.compile("[a-z]{2,3}(-[a-z]+)*")
NOT_PLAIN = re.compile(r"[\s\ud800-\udfff]")  # sentencex 1.0.32 fails at some of them


def check_split(language: str | None, num_hypotheses: int = 1, alignments: bool = False) -> None:
    """Refuse a language that is not a code, and what cannot be joined from sentences."""
    if language is None:
        return
    named = f"split_sentences={shorten(language)}"
    if not LANGUAGE.fullmatch(language):
        raise InputError(f"{named} must be the code of the text's language, for example 'en'")
    if num_hypotheses > 1:
        raise InputError(f"{named} joins the best translations: set num_hypotheses=1")
    if alignments:
        raise InputError(f"{named}: alignments are of whole lines; leave one of the two out")
    with naming_the_extra("split_sentences"):
        check_installed("sentencex")


def split_sentences(text: str, language: str) -> list[str]:
    """Return the parts of a text: what stands before, between and behind its sentences, and them.

    The sentences are the parts 1, 3, 5 and so on; white space alone is around them. All parts
    together are the text. A line break always ends a sentence.

    Args:
        language: Code of the language of the text, of two letters where ISO 639 has such a code.
            Without rules for it, sentencex uses those of a related language or of English.
    """
    import sentencex

    parts = [""]
    for line in text.splitlines(keepends=True):
        with library_faults("the text cannot be split into sentences"):
            found = sentencex.segment(language, NOT_PLAIN.sub(" ", line))
        ends = [0, *accumulate(map(len, found)), len(line)]
        for start, end in pairwise(ends):
            if sentence := line[start:end].strip():
                before, _, after = line[start:end].partition(sentence)
                parts[-1] += before
                parts += [sentence, after]
            else:
                parts[-1] += line[start:end]
    return parts
