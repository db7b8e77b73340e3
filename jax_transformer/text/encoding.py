"""From lines to ids: which pairs or documents are kept, and what became of the others."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jax_transformer.errors import BAD_LINES_NAMED, InputError
from jax_transformer.text.corpus import Corpus, Part, packed_part
from jax_transformer.text.denoising import (
    LONGEST_TEXT,
    MASK,
    MOST_SENTINELS,
    SENTINEL,
    Denoiser,
    DenoisingObjective,
    SpecialIds,
    sentinels_of,
)
from jax_transformer.text.parallel_text import Documents, Text
from jax_transformer.text.pieces import FEWEST
from jax_transformer.tokenizers import LineError, Tokenizer, encode_lines
from jax_transformer.tokenizers.readers.library import BYTES

CHUNK = 1024  # lines that a tokenizer encodes at a time, whose results take much memory
SENTENCE_ENDS = (".", "!", "?")


class Filters(NamedTuple):
    """Which pairs of a text are kept."""

    max_length: int  # most tokens of a side that the model takes, EOS (or BOS) included
    longest_side: int | None = None  # most tokens of a side
    max_ratio: float | None = None  # most tokens of the longer side for one of the shorter side

    def reason_to_drop(self, source: int, target: int) -> str | None:
        """Return why a pair of sides with so many tokens, EOS included, is not kept."""
        longer, shorter = max(source, target), min(source, target)
        if longer > self.max_length or longer > (self.longest_side or longer):
            return "dropped as too long"
        if self.max_ratio is not None and longer > self.max_ratio * shorter:
            return "dropped for unequal lengths"
        return None


def encode_pairs(
    lines: Sequence[tuple[str, str, str]],
    tokenizer: Tokenizer,
    filters: Filters,
    dropped: Counter[str],
    bad_lines: list[str] | None,
    seed: int = 0,
) -> Part:
    """Encode pairs, given with their places; `dropped` counts earlier ones by reason.

    The places of pairs that the tokenizer refuses join `bad_lines`; None refuses the first one.
    """
    smallest = np.min_scalar_type(max(tokenizer.src_vocab_size, tokenizer.tgt_vocab_size) - 1)
    dropped, unknown = Counter(dropped), 0
    pairs, source_lengths = [], []
    for start in range(0, len(lines), CHUNK):
        sources, targets, places = zip(*lines[start : start + CHUNK], strict=True)
        sides = [encode_lines(tokenizer.encode_source, sources)]
        sides += [encode_lines(tokenizer.encode_target, targets)]
        for place, source, target in zip(places, *sides, strict=True):
            if errors := [ids for ids in (source, target) if isinstance(ids, LineError)]:
                if bad_lines is None:
                    raise InputError(f"{place}: {errors[0].fault}")
                bad_lines.append(place)
                continue
            if reason := filters.reason_to_drop(len(source), len(target)):
                dropped[reason] += 1
                continue
            unknown += source.count(tokenizer.unk_id) + target.count(tokenizer.unk_id)
            pairs.append(np.array([*source, tokenizer.bos_id, *target], smallest))
            source_lengths.append(len(source))
    part = packed_part(pairs, source_lengths, seed, smallest)
    return counted(part, dropped, unknown, bad_lines)


def counted(part: Part, dropped: Counter[str], unknown: int, bad_lines: list[str] | None) -> Part:
    """Return a part with what became of the other pairs or documents."""
    bad = tuple(bad_lines or ())
    dropped += Counter({"dropped for a bad line": len(bad)})
    counts = part.counts._replace(dropped=dropped, unknown=unknown)
    return part._replace(counts=counts._replace(bad_lines=bad[:BAD_LINES_NAMED]))


def encode_documents(
    lines: Sequence[tuple[str, str]],
    tokenizer: Tokenizer,
    documents: Documents,
    dropped: Counter[str],
    bad_lines: list[str] | None,
    seed: int = 0,
) -> Part:
    """Encode documents, given with their places, as texts of 2 to `LONGEST_TEXT` tokens.

    Documents that are "joined" have EOS between them. A document that spells a sentinel or a mask
    is a bad line. The other arguments are those of `encode_pairs`.
    """
    smallest = np.min_scalar_type(tokenizer.src_vocab_size - 1)
    sentinels, mask = reserved_ids(tokenizer)
    dropped, unknown, reserved = Counter(dropped), 0, {*sentinels, mask}
    whole: list[list[int]] = []
    for start in range(0, len(lines), CHUNK):
        chunk, places = zip(*lines[start : start + CHUNK], strict=True)
        for place, ids in zip(places, tokenizer.encode_text(chunk), strict=True):
            if not reserved.isdisjoint(ids):
                if bad_lines is None:
                    fault = "spells a sentinel or a mask; leave it out, or set bad_lines to 'skip'"
                    raise InputError(f"{place}: {fault}")
                bad_lines.append(place)
            elif len(ids) < 2 and documents != "joined":
                dropped["dropped as too short"] += 1
            else:
                unknown += ids.count(tokenizer.unk_id)
                whole.append(ids)
    if documents == "joined":
        whole = [[i for ids in whole for i in (*ids, tokenizer.eos_id)]] if whole else []
    end = np.array([tokenizer.bos_id, tokenizer.eos_id], smallest)
    texts = [
        np.concatenate([text, end])
        for ids in whole
        for text in np.array_split(np.array(ids, smallest), math.ceil(len(ids) / LONGEST_TEXT))
    ]
    part = packed_part(texts, [len(text) - len(end) for text in texts], seed, smallest)
    return counted(part, dropped, unknown, bad_lines)


def encode_text(
    text: Text, tokenizer: Tokenizer, max_length: int, skips_bad_lines: bool = False
) -> Corpus:
    """Encode a text in memory; drop and count the pairs with a side above `max_length` tokens."""
    unit = "document" if text.sources and not text.targets else "pair"
    sides = (text.sources,) if unit == "document" else (text.sources, text.targets)
    places = (f"{unit} {number}" for number in itertools.count(1))
    lines = list(zip(*sides, places, strict=False))
    dropped = +Counter({"dropped for an empty side": text.dropped_empty})
    bad_lines = list(text.bad_lines) if skips_bad_lines else None
    if unit == "pair":
        part = encode_pairs(lines, tokenizer, Filters(max_length), dropped, bad_lines)
    else:
        part = encode_documents(lines, tokenizer, "lines", dropped, bad_lines)
    if not part.counts.pairs:
        raise InputError(
            f"max_length={max_length} leaves none of {len(lines):,} pairs; "
            "raise it or name a corpus with shorter lines"
        )
    return Corpus([part], tokenizer.src_vocab_size, tokenizer.tgt_vocab_size, tokenizer.pad_id)


def special_ids(
    tokenizer: Tokenizer, objective: DenoisingObjective, denoisers: Sequence[Denoiser]
) -> SpecialIds:
    """Return the ids that an objective of these denoisers needs; refuse a tokenizer without them.

    The ids around a text are those around the sides of a pair.
    """
    sentinels, mask = reserved_ids(tokenizer)
    if tokenizer.kind == BYTES:  # Xue et al. 2022, section 3.1: the last 100 bytes, also in texts
        sentinels = tuple(range(258, 158, -1))
    # A text that is shorter than two pieces cannot be cut.
    needed = max(sentinels_of(2 * FEWEST - 1, denoiser) for denoiser in denoisers)
    needs_mask, ends = objective == "infilling", frozenset()
    lacks = f"sentinels up to {SENTINEL.format(needed - 1)}, and the tokenizer has {len(sentinels)}"
    if needs_mask:
        lacks = f"the token {MASK}, which the tokenizer lacks"
    if (mask is None) if needs_mask else len(sentinels) < needed:
        raise InputError(
            f"objective={objective!r} needs {lacks}; train one with --sentinels 100, or take that "
            "of a model which was trained so"
        )
    if needs_mask:
        texts = map(tokenizer.source.segmenter.token, range(tokenizer.src_vocab_size))
        ends = frozenset(i for i, text in enumerate(texts) if (text or "").endswith(SENTENCE_ENDS))
    source, target = tokenizer.affixes("source"), tokenizer.affixes("target")
    return SpecialIds(tokenizer.bos_id, source, target, sentinels, mask, ends)


def reserved_ids(tokenizer: Tokenizer) -> tuple[tuple[int, ...], int | None]:
    """Return the ids of sentinels, and that of the mask, which no text may contain."""
    named = (tokenizer.token_id(SENTINEL.format(number)) for number in range(MOST_SENTINELS))
    sentinels = tuple(itertools.takewhile(lambda found: found is not None, named))
    return sentinels, tokenizer.token_id(MASK)
