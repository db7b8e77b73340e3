"""Denoising: plain text becomes sources and targets, by pure functions of ids and a key.

The same ids and key give the same example in every process. A longer text under the same key never
has a shorter source or target: `sizes` tells the lengths without making the example, so
that the plan of an epoch can cut a text where a row ends.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Int64, Integer

from jax_transformer.errors import InputError

Ids = Integer[np.ndarray, "_"]
Affixes = tuple[Sequence[int], Sequence[int]]
Key = tuple[int, ...]
DenoisingObjective = Literal["span_corruption", "ul2", "infilling", "prefix_lm"]

LONGEST_TEXT = 2**12  # ids of a text that is denoised; a longer document is several texts
SENTINEL = "<extra_id_{}>"  # by its number from 0, as in T5; mT5 has "▁" before it
MOST_SENTINELS = 1000
MOST_KEYS = 2**10  # whose random numbers are kept: a text is tried for several rows
MASK = "<mask>"
# Of fewer spans, the rule of T5 hides too often what ends the text: one span is always there.
SPANS_OF_T5 = 10


class SpecialIds(NamedTuple):
    """Ids that an example has besides those of its text."""

    bos: int
    source: Affixes  # before and after the text of a source
    target: Affixes  # the same of a target; BOS comes before them
    sentinels: tuple[int, ...] = ()  # in the order in which they replace spans
    mask: int | None = None
    sentence_ends: frozenset[int] = frozenset()  # tokens that end a sentence


class Denoiser(NamedTuple):
    """One way to make a source and a target of a text.

    Attributes:
        name: Its name in metrics.
        method: "spans": random spans become sentinels, and the target has the spans (Raffel et al.
            2020, section 3.1.4). "suffix": the end of the text is the only span (the S-denoiser of
            Tay et al. 2023). "infilling": random spans become one mask each, sentences are
            permuted, and the target is the text (Lewis et al. 2020, section 2.2). "prefix_lm": the
            source is a beginning of random length, the target the rest.
        density: Share of the tokens that spans have.
        mean_length: Mean tokens of a span.
        prefix: Text before the source.
    """

    name: str
    method: Literal["spans", "suffix", "infilling", "prefix_lm"]
    density: float = 0.0
    mean_length: float = 1.0
    prefix: str = ""


# UL2 (Tay et al. 2023, table 1): all seven equally often, with the mode tokens of its checkpoints.
UL2 = (
    Denoiser("r_0.15_3", "spans", 0.15, 3.0, "[NLU]"),
    Denoiser("r_0.15_8", "spans", 0.15, 8.0, "[NLU]"),
    Denoiser("s_0.25", "suffix", 0.25, 1.0, "[S2S]"),
    Denoiser("x_0.5_3", "spans", 0.5, 3.0, "[NLG]"),
    Denoiser("x_0.5_8", "spans", 0.5, 8.0, "[NLG]"),
    Denoiser("x_0.15_64", "spans", 0.15, 64.0, "[NLG]"),
    Denoiser("x_0.5_64", "spans", 0.5, 64.0, "[NLG]"),
)
OBJECTIVES: Mapping[DenoisingObjective, tuple[Denoiser, ...]] = {
    "span_corruption": (Denoiser("span_corruption", "spans", 0.15, 3.0),),
    "ul2": UL2,
    "infilling": (Denoiser("infilling", "infilling", 0.3, 3.0),),
    "prefix_lm": (Denoiser("prefix_lm", "prefix_lm"),),
}
# Tokens that a tokenizer for denoising has besides the sentinels.
MODE_TOKENS = (MASK, "[NLU]", "[S2S]", "[NLG]")


def denoisers(
    objective: DenoisingObjective, density: float | None, mean_length: float | None
) -> tuple[Denoiser, ...]:
    """Return the denoisers of an objective; None keeps its own density or mean length."""
    if objective in ("ul2", "prefix_lm") and (density, mean_length) != (None, None):
        names = f"noise_density={density} and mean_span_length={mean_length}"
        raise InputError(f"{names} are fixed by objective={objective!r}; leave them out")
    return tuple(
        denoiser._replace(
            density=denoiser.density if density is None else density,
            mean_length=denoiser.mean_length if mean_length is None else mean_length,
        )
        for denoiser in OBJECTIVES[objective]
    )


class Objective(NamedTuple):
    """What makes examples of the texts of a corpus: a denoiser for each, drawn by its key."""

    denoisers: tuple[Denoiser, ...]
    prefixes: tuple[tuple[int, ...], ...]  # ids that begin the text of the source, by denoiser
    special: SpecialIds
    longest: int  # most tokens of a source or a target, with all special ids but BOS
    seed: int

    def only(self, number: int) -> "Objective":
        """Return the objective of one of its denoisers."""
        chosen = slice(number, number + 1)
        return self._replace(denoisers=self.denoisers[chosen], prefixes=self.prefixes[chosen])

    def draw(self, key: Key) -> int:
        """Return the number of the denoiser of an example."""
        return int(_share(key, 0) * len(self.denoisers)) if len(self.denoisers) > 1 else 0

    def fit(self, length: int, free: tuple[int, int], key: Key) -> tuple[int, int, int]:
        """Return the longest beginning of a text of `length` tokens whose example fits into `free`.

        `free`, and the last two of the result, are tokens of source and target with special ids.
        The result is (0, 0, 0) where no two tokens fit.
        """
        chosen, special = self.draw(key), self.special
        most = min(length, 2 * self.longest)
        sources, targets = sizes(self.denoisers[chosen], most, key, len(special.sentinels))
        before = sum(map(len, (self.prefixes[chosen], *special.source)))
        around = sum(map(len, special.target))
        source, target = min(free[0], self.longest) - before, min(free[1], self.longest) - around
        ends = sources.searchsorted(source, "right"), targets.searchsorted(target, "right")
        count = int(min(ends)) - 1
        if count < 2:
            return 0, 0, 0
        return count, int(sources[count]) + before, int(targets[count]) + around

    def example(self, ids: Ids, key: Key) -> tuple[Ids, Ids]:
        """Return the source of a text, and BOS with its target, each with its special ids."""
        chosen, special = self.draw(key), self.special
        source, target = denoised(self.denoisers[chosen], ids, key, special)
        (before, after), (first, last) = special.source, special.target
        return (
            _joined(before, self.prefixes[chosen], source, after),
            _joined([special.bos], first, target, last),
        )


def denoised(denoiser: Denoiser, ids: Ids, key: Key, special: SpecialIds) -> tuple[Ids, Ids]:
    """Return the source and the target of a text of at least two tokens, with nothing around."""
    if denoiser.method == "prefix_lm":
        begin = int(_prefix_lengths(np.array([len(ids)]), key)[0])
        return ids[:begin], ids[begin:]
    if denoiser.method == "infilling":
        return infilled(denoiser, ids, key, special), ids
    count, spans = noise_of(len(ids), denoiser)
    if denoiser.method == "suffix":
        mask = np.arange(len(ids)) >= len(ids) - count
    else:
        mask = span_mask(len(ids), count, spans, key)
    return corrupted(ids, mask, special.sentinels)


@functools.lru_cache(maxsize=MOST_KEYS)
def sizes(
    denoiser: Denoiser, most: int, key: Key, sentinels: int
) -> tuple[Int64[np.ndarray, "lengths"], Int64[np.ndarray, "lengths"]]:
    """Return the sizes of source and target, as of `denoised`, for texts of 0 to `most` tokens.

    They ascend. Those of fewer than two tokens mean nothing; a text with more spans than there are
    sentinels has no size below 2**40.
    """
    lengths = np.arange(most + 1)
    if denoiser.method == "prefix_lm":
        begins = _prefix_lengths(lengths, key)
        return begins, lengths - begins
    counts, spans = (column[: most + 1] for column in noise_counts(denoiser))
    if denoiser.method == "infilling":
        ends = np.cumsum(_span_lengths(denoiser, int(counts[-1]), key))
        spans = np.minimum(np.searchsorted(ends, counts) + 1, lengths - counts + 1)
        return lengths - counts + spans, lengths
    beyond = np.where(spans > sentinels, 2**40, 0)
    return lengths - counts + spans + beyond, counts + spans + beyond


def noise_of(length: int, denoiser: Denoiser) -> tuple[int, int]:
    """Return how many tokens of a text are noise, and in how many spans."""
    counts, spans = noise_counts(denoiser)
    return int(counts[length]), int(spans[length])


def sentinels_of(length: int, denoiser: Denoiser) -> int:
    """Return how many sentinels the example of a text has."""
    return noise_of(length, denoiser)[1] if denoiser.method in ("spans", "suffix") else 0


@functools.lru_cache(maxsize=32)
def noise_counts(denoiser: Denoiser) -> tuple[Int64[np.ndarray, "_"], Int64[np.ndarray, "_"]]:
    """Return `noise_of` texts of 0 to `LONGEST_TEXT` tokens, by the rule of T5."""
    lengths = np.arange(LONGEST_TEXT + 1)
    counts = np.clip(np.round(lengths * denoiser.density), 1, np.maximum(lengths - 1, 1))
    spans = np.maximum(np.round(np.minimum(counts, lengths - counts) / denoiser.mean_length), 1)
    if denoiser.method == "suffix":
        spans = np.ones_like(spans)
    return counts.astype(np.int64), spans.astype(np.int64)


def span_mask(length: int, count: int, spans: int, key: Key) -> Bool[np.ndarray, "length"]:
    """Return which tokens are noise: `count` of them, in so many spans that do not touch.

    All such masks are equally likely. From `SPANS_OF_T5` spans on, it is the rule of T5: the text
    begins with a token that is not noise and ends with noise.
    """
    random = _random(key, 1)
    if spans < SPANS_OF_T5:  # there may be no token before the first span, or after the last
        kept = _random_parts(length - count + 2, spans + 1, random)
        kept[[0, -1]] -= 1
    else:
        kept = np.append(_random_parts(length - count, spans, random), 0)
    noise = np.append(_random_parts(count, spans, random), 0)
    lengths = np.stack([kept, noise], axis=1).ravel()
    return np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)


def corrupted(
    ids: Integer[np.ndarray, "length"], mask: Bool[np.ndarray, "length"], sentinels: tuple[int, ...]
) -> tuple[Ids, Ids]:
    """Return a text whose masked spans are sentinels, and the spans, each after its sentinel."""
    begins = np.flatnonzero(mask & ~np.append(False, mask[:-1]))
    marks = np.array(sentinels[: len(begins)], np.int64)
    source = np.array(ids, np.int64)
    source[begins] = marks
    kept = ~mask
    kept[begins] = True
    spans = np.split(ids[mask], np.cumsum(mask)[begins[1:]] - 1)
    target = [part for mark, span in zip(marks, spans, strict=True) for part in ([mark], span)]
    return source[kept], np.concatenate(target).astype(np.int64)


def infilled(denoiser: Denoiser, ids: Ids, key: Key, special: SpecialIds) -> Ids:
    """Return a text with its sentences permuted and random spans replaced by one mask each.

    The lengths of the spans are Poisson numbers; one of length 0 inserts a mask. The last span is
    cut where `density` is reached. No two spans touch.
    """
    random = _random(key, 1)
    tokens = enumerate(ids[:-1].tolist(), start=1)
    ends = [place for place, token in tokens if token in special.sentence_ends]
    if ends:
        sentences = np.split(ids, ends)
        ids = np.concatenate([sentences[place] for place in random.permutation(len(sentences))])
    count, _ = noise_of(len(ids), denoiser)
    lengths = _span_lengths(denoiser, count, key)[: len(ids) - count + 1].copy()
    lengths[-1] += count - lengths.sum()
    kept = len(ids) - count
    # A span stands before a token that is kept, or at the end.
    before = np.sort(random.choice(kept + 1, len(lengths), replace=False))
    lengths = random.permutation(lengths)
    begins = before + np.cumsum(lengths) - lengths
    parts, end = [], 0
    for begin, length in zip(begins.tolist(), lengths.tolist(), strict=True):
        parts += [ids[end:begin], [special.mask]]
        end = begin + length
    return np.concatenate([*parts, ids[end:]]).astype(np.int64)


def _joined(*parts: Sequence[int] | Ids) -> Ids:
    return np.concatenate([np.asarray(part, np.int64) for part in parts])


def _span_lengths(denoiser: Denoiser, count: int, key: Key) -> Int64[np.ndarray, "spans"]:
    """Return Poisson numbers whose sum first reaches `count`; those of fewer are the first."""
    drawn = _poisson_numbers(denoiser.mean_length, -(-count // 64) * 64, key)
    return drawn[: np.searchsorted(np.cumsum(drawn), count) + 1]


@functools.lru_cache(maxsize=MOST_KEYS)
def _poisson_numbers(mean: float, least_sum: int, key: Key) -> Int64[np.ndarray, "numbers"]:
    drawn, random = np.zeros(0, np.int64), _random(key, 2)
    while drawn.sum() < least_sum:
        drawn = np.append(drawn, random.poisson(mean, 64))
    return drawn


def _prefix_lengths(
    lengths: Int64[np.ndarray, "lengths"], key: Key
) -> Int64[np.ndarray, "lengths"]:
    """Return the tokens of the source, equally likely from 1 to one less than the text has."""
    return 1 + np.floor(_share(key, 1) * (np.maximum(lengths, 2) - 1)).astype(np.int64)


def _random_parts(count: int, parts: int, random: np.random.Generator) -> Int64[np.ndarray, "_"]:
    """Return the sizes of so many parts of `count`, none empty; all sizes are equally likely."""
    cuts = np.sort(random.choice(count - 1, parts - 1, replace=False)) + 1
    return np.diff(cuts, prepend=0, append=count)


@functools.lru_cache(maxsize=MOST_KEYS)
def _share(key: Key, purpose: int) -> float:
    return float(_random(key, purpose).random())


def _random(key: Key, purpose: int) -> np.random.Generator:
    return np.random.default_rng([*key, purpose])
