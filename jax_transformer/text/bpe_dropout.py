"""BPE-dropout: other subwords for the same words at every epoch.

Provilkov et al. 2020, "BPE-Dropout: Simple and Effective Subword Regularization", algorithm 1.
"""

import functools
import hashlib
import itertools
import json
import math
import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64, Integer, UInt16

from jax_transformer.errors import InputError
from jax_transformer.text.corpus import Corpus, Sides, Tokens
from jax_transformer.text.plan import WINDOW_PAIRS
from jax_transformer.tokenizers.tokenizer import Tokenizer
from jax_transformer.tokenizers.trained import BYTE_PAIR, BYTES, words

NO_MERGE = math.inf  # the rank of a pair that no merge joins
EVERY_MERGE = 2**16 - 1  # the number that stands for "every possible merge is dropped"
MOST_CACHED = 2**16  # words whose subwords are kept: some 20 MB of words of European languages
MOST_PAIRS = 4 * WINDOW_PAIRS  # that are in memory between their plan and their batch


class BPEDropout:
    """Segments the words of an encoded line again, and drops merges at random.

    At each step each possible merge of a word is dropped with probability `rate`; of the others
    the one with the lowest rank is made, the leftmost of equals. A word is finished when every
    possible merge was dropped or none is left; a rate of 1 leaves characters. A dropped merge is
    possible again at the next step. This is algorithm 1. subword-nmt makes all merges of a pair
    that occurs twice in one step; the queue of the `tokenizers` library also contains merges whose
    symbols are gone, which changes the probabilities of some words.

    The subwords are a function of the line, the rate and the entropy alone: not of the process,
    the platform or the lines before.
    """

    def __init__(self, tokenizer: Tokenizer, rate: float) -> None:
        if tokenizer.kind != BYTE_PAIR:
            raise InputError(
                f"BPE-dropout works on a {BYTE_PAIR} tokenizer, not on {tokenizer.kind}; set its "
                "rate to 0 or train a tokenizer of this library"
            )
        file = json.loads(tokenizer.contents["tokenizer.json"])
        vocab, merges = file["model"]["vocab"], file["model"]["merges"]
        characters = {character for token in vocab for character in token} - {" "}
        # Symbols are words by themselves.
        symbols = {c for c in characters if len(words(tokenizer, 2 * c)) == 2}
        # No merge joins the bytes of a character that the vocabulary lacks.
        specials = {token["id"] for token in file["added_tokens"]}
        specials |= {vocab[token] for token in BYTES if token in vocab}
        texts = {token_id: token for token, token_id in vocab.items() if token_id not in specials}
        ids = range(tokenizer.src_vocab_size)
        self._characters = [
            tuple(vocab.get(character, tokenizer.unk_id) for character in texts[token_id])
            if token_id in texts
            else (token_id,)
            for token_id in ids
        ]
        self._lengths = np.array([len(characters) for characters in self._characters])
        # A space or a symbol begins a word, and a symbol ends one; a special token is a symbol. A
        # space by itself before a symbol belongs to its word, but no merge joins the two then.
        self._begins_word = np.array(
            [token_id not in texts or texts[token_id][0] in {" ", *symbols} for token_id in ids]
        )
        self._ends_word = np.array(
            [token_id not in texts or texts[token_id][-1] in symbols for token_id in ids]
        )
        self._ranks = {
            (vocab[left], vocab[right]): rank for rank, (left, right) in enumerate(merges)
        }
        self._merged = [vocab[left + right] for left, right in merges]
        thresholds = _thresholds(rate)
        self._lowest, self._ascending = thresholds[0], -thresholds
        self._segment = functools.lru_cache(MOST_CACHED)(self._segmented)

    def encode(
        self, ids: Integer[np.ndarray, "length"], entropy: Sequence[int]
    ) -> Integer[np.ndarray, "new_length"]:
        """Return the ids of the same text with merges dropped.

        Args:
            ids: Of a line, whole or cut [length]. Special ids stay where they are.
            entropy: What the random numbers depend on: seed, epoch, number of the pair, side.
        """
        if not len(ids) or not self._lowest:
            return ids.copy()
        lengths = self._lengths[ids]
        begins = self._begins_word[ids]
        begins[1:] |= self._ends_word[ids[:-1]]
        begins[0] = True
        # A word of n characters takes at most n - 1 steps. Each has a number of its own: of all
        # possible merges in the order of their ranks, how many are dropped before one is not.
        dropped = self._draw(int(lengths.sum()), entropy)
        steps = np.flatnonzero(dropped)
        starts = np.flatnonzero(begins)
        characters = np.add.reduceat(lengths, starts)
        character_starts = np.cumsum(characters) - characters
        words = np.searchsorted(character_starts, steps, "right") - 1
        ends = np.append(starts[1:], len(ids))
        # Without dropout a word of m tokens took n - m steps: drops after these change nothing.
        changes = steps - character_starts[words] < (characters - (ends - starts))[words]
        is_changed = np.zeros(len(starts), bool)
        is_changed[words[changes]] = True
        words = np.flatnonzero(is_changed)
        whole, numbers = ids.tobytes(), dropped.tobytes()
        dtype, size = ids.dtype.str, ids.itemsize
        pieces, done = [], 0
        for start, end, step, count in zip(
            (starts[words] * size).tolist(),
            (ends[words] * size).tolist(),
            (character_starts[words] * 2).tolist(),
            (characters[words] * 2).tolist(),
            strict=True,
        ):
            new = self._segment(whole[start:end], numbers[step : step + count - 2], dtype)
            pieces += (whole[done:start], new)
            done = end
        pieces.append(whole[done:])
        return np.frombuffer(bytearray().join(pieces), ids.dtype)

    def _draw(self, count: int, entropy: Sequence[int]) -> UInt16[np.ndarray, " count"]:
        """Return numbers of the geometric distribution: k with probability (1 - rate) rate^k."""
        # An extendable hash takes a fifth of the time that NumPy's generators take to be seeded.
        seed = ",".join(map(str, map(int, entropy))).encode()
        uniform = np.frombuffer(hashlib.shake_128(seed).digest(4 * count), "<u4")
        dropped = np.zeros(count, np.uint16)
        (low,) = np.nonzero(uniform < self._lowest)
        dropped[low] = np.searchsorted(self._ascending, -uniform[low].astype(np.int64), "left")
        return dropped

    def _segmented(self, word: bytes, numbers: bytes, dtype: str) -> bytes:
        """Merge the characters of a word; `numbers` says how many merges are dropped at a step."""
        merges = self._ranks.get
        symbols = [c for i in np.frombuffer(word, dtype).tolist() for c in self._characters[i]]
        ranks = [merges(pair, NO_MERGE) for pair in itertools.pairwise(symbols)]
        for number in np.frombuffer(numbers, np.uint16).tolist():
            if number == 0 and (rank := min(ranks, default=NO_MERGE)) < NO_MERGE:
                place = ranks.index(rank)  # the usual case, which sorts nothing
            else:
                possible = [(rank, i) for i, rank in enumerate(ranks) if rank < NO_MERGE]
                if number >= min(len(possible), EVERY_MERGE):
                    break
                rank, place = sorted(possible)[number]
            symbols[place : place + 2] = [self._merged[rank]]
            del ranks[place]
            if place > 0:
                ranks[place - 1] = merges((symbols[place - 1], symbols[place]), NO_MERGE)
            if place < len(ranks):
                ranks[place] = merges((symbols[place], symbols[place + 1]), NO_MERGE)
        return np.array(symbols, dtype).tobytes()


def _thresholds(rate: float) -> Integer[np.ndarray, "numbers"]:
    """Return 2^32 rate^k for k = 1, 2, ...: below it a 32-bit number stands for k or more."""
    # Products and no power function: they are the same on every platform.
    thresholds = (np.cumprod(np.full(EVERY_MERGE, rate)) * 2**32).astype(np.int64)
    return thresholds[: 1 + np.count_nonzero(thresholds)]


class ResampledCorpus(Corpus):
    """The pairs of a corpus in one epoch, with merges dropped at random.

    The ids of a pair are a pure function of the seed, the epoch and the number of the pair. A pair
    that would become longer than the longest one of the corpus keeps its ids. All processes encode
    all pairs: a plan needs their lengths. Counts are those without dropout.
    """

    def __init__(self, corpus: Corpus, merges: BPEDropout, seed: int, epoch: int) -> None:
        super().__init__(
            corpus.parts,
            corpus.src_vocab_size,
            corpus.tgt_vocab_size,
            corpus.pad_id,
            corpus.weights,
        )
        self._merges, self._entropy = merges, (seed, epoch)
        self._longest = len(corpus.length_counts) - 1
        self._cache: OrderedDict[int, Sides] = OrderedDict()
        self._lock = threading.Lock()

    def side_lengths(self, pairs: Integer[np.ndarray, "pairs"]) -> Int64[np.ndarray, "pairs 2"]:
        """See `Corpus`."""
        sides = self._encoded(pairs)
        return np.array([(len(source), len(target) - 1) for source, target in sides], np.int64)

    def read(self, pairs: Integer[np.ndarray, "pairs"]) -> Tokens:
        """See `Corpus`."""
        sides = self._encoded(pairs)
        lengths = np.array([list(map(len, both)) for both in sides], np.int64).reshape(-1, 2)
        ids = np.concatenate([side for both in sides for side in both] or [np.zeros(0, np.int64)])
        return Tokens(ids, *lengths.T)

    def _encoded(self, pairs: Integer[np.ndarray, "pairs"]) -> list[Sides]:
        """Return the sides of pairs; they are cached until their batch is made."""
        with self._lock:
            missing = [pair for pair in pairs.tolist() if pair not in self._cache]
            tokens = super().read(np.array(missing, np.int64))
            for pair, sides in zip(missing, tokens.sides(), strict=True):
                entropy = (*self._entropy, pair)
                new = tuple(self._merges.encode(ids, (*entropy, i)) for i, ids in enumerate(sides))
                fits = max(len(new[0]), len(new[1]) - 1) <= self._longest
                self._cache[pair] = new if fits else sides
            encoded = [self._cache[pair] for pair in pairs.tolist()]
            while len(self._cache) > MOST_PAIRS:
                self._cache.popitem(last=False)
            return encoded
