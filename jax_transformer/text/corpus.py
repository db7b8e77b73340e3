"""Pairs or texts of token ids, read by number: in memory, prepared on disk, or several mixed."""

import functools
import itertools
import os
import weakref
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64, Integer, Shaped

from jax_transformer.errors import BAD_LINES_NAMED, InputError
from jax_transformer.storage.reading import open_regular
from jax_transformer.text.denoising import Objective
from jax_transformer.text.pieces import Piece

INDEX_TYPE = np.dtype(
    [("start", "<u8"), ("source", "<u4"), ("target", "<u4"), ("crc32", "<u4")]
)  # first id, number of source and of target ids, checksum of ids and numbers
Sides = tuple[Integer[np.ndarray, "_"], Integer[np.ndarray, "_"]]  # source and target of a pair
ENDLESS = 2**48  # draws from a part of a mix


class Tokens(NamedTuple):
    """The ids of some pairs, one after the other: a source, then its target."""

    ids: Integer[np.ndarray, "tokens"]  # of each pair source ids and EOS, BOS, target ids and EOS
    source_lengths: Int64[np.ndarray, "pairs"]
    target_lengths: Int64[np.ndarray, "pairs"]  # BOS and EOS included

    def sides(self) -> list[Sides]:
        """Return the source and the target of each pair."""
        lengths = np.stack([self.source_lengths, self.target_lengths], axis=1)
        sides = np.split(self.ids, lengths.ravel().cumsum())
        return list(zip(sides[:-1:2], sides[1::2], strict=True))


class Counts(NamedTuple):
    """What became of the pairs of a text."""

    pairs: int  # that are kept
    tokens: int  # of them in an epoch: sources and shifted targets, EOS included
    unknown: int  # tokens among them
    dropped: Counter[str]  # other pairs by reason
    lengths: Counter[int]  # kept pairs by the columns of their longer side
    bad_lines: tuple[str, ...] = ()  # places of the first ones

    @property
    def read(self) -> int:
        """Pairs of the text."""
        return self.pairs + self.dropped.total()

    def plus(self, counts: "Counts") -> "Counts":
        """Return the sums of two counts."""
        sums = Counts(*(mine + its for mine, its in zip(self, counts, strict=True)))
        return sums._replace(bad_lines=sums.bad_lines[:BAD_LINES_NAMED])

    def report(self, unit: str = "pairs") -> str:
        """Return these counts as one line."""
        dropped = "".join(f", {count:,} {reason}" for reason, count in sorted(self.dropped.items()))
        named = f"; first bad lines: {', '.join(self.bad_lines)}" * bool(self.bad_lines)
        return (
            f"{self.read:,} {unit} read{dropped}; {self.pairs:,} {unit} of {self.tokens:,} tokens "
            f"kept, {self.unknown / self.tokens:.2%} of the tokens unknown{named}"
        )


NOTHING = Counts(0, 0, 0, Counter(), Counter())


class FileArray:
    """An array in a file; slices are read when they are needed, and threads may share it.

    `os.pread` and not a memory map: a file that is truncated while it is open would end the
    process, and mapped pages would count as memory of the process.
    """

    def __init__(self, path: Path, dtype: np.dtype, count: int) -> None:
        self.dtype = dtype
        with open_regular(path, f"cannot be read; {again(path.parent)}") as file:
            self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)
        if os.fstat(self._descriptor).st_size != count * dtype.itemsize:
            raise InputError(
                f"{path}: does not have the size it was written with; {again(path.parent)}"
            )

    def __getitem__(self, span: slice) -> Shaped[np.ndarray, "_"]:
        """Return a part of the array: shorter than the slice where the file was truncated."""
        size = self.dtype.itemsize
        content = os.pread(self._descriptor, (span.stop - span.start) * size, span.start * size)
        return np.frombuffer(content[: len(content) // size * size], self.dtype)


class Part(NamedTuple):
    """The pairs of one text, or texts: a source without EOS, and a target of BOS and EOS alone."""

    index: Shaped[np.ndarray, "pairs"] | FileArray  # of `INDEX_TYPE`
    ids: Integer[np.ndarray, "tokens"] | FileArray  # of all pairs, one after the other
    counts: Counts
    seed: int = 0  # what the checksums begin with: another text has others
    folder: Path = Path()  # where index and ids are files
    objective: Objective | None = None  # what makes examples of texts; None: these are pairs

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of what its examples train."""
        if self.objective is None:
            return ("translation",)
        return tuple(denoiser.name for denoiser in self.objective.denoisers)

    def rows(self, pairs: Integer[np.ndarray, "pairs"]) -> Shaped[np.ndarray, "pairs"]:
        """Return the rows of the index of some pairs."""
        numbers = pairs.tolist()
        begin, end = (min(numbers), max(numbers) + 1) if numbers else (0, 0)
        if 3 * (end - begin) <= 4 * len(numbers):  # one reading, most of which is needed
            near = self.index[begin:end]
            rows = near[[n - begin for n in numbers if n - begin < len(near)]]
        else:
            rows = np.concatenate([self.index[n : n + 1] for n in numbers])
        if len(rows) < len(pairs):
            raise self._damaged("index", next(n for n in numbers if not len(self.index[n : n + 1])))
        source, target = rows["source"].astype(np.int64), rows["target"].astype(np.int64) - 1
        longest, ids = max(self.counts.lengths, default=0), self.counts.tokens + self.counts.pairs
        impossible = (np.maximum(source, target) > longest) | (np.minimum(source, target) < 1)
        impossible |= rows["start"] > ids
        if impossible.any():
            raise self._damaged("index", numbers[int(impossible.argmax())])
        return rows

    def pair_ids(self, pair: int, row: tuple[int, int, int, int]) -> Integer[np.ndarray, "_"]:
        """Return the ids of a pair, source and target, by its number and its row."""
        start, source, target, expected = row
        ids = self.ids[start : start + source + target]
        if len(ids) < source + target or checksum(ids, source, target, self.seed) != expected:
            raise self._damaged("ids", pair)
        return ids

    def _damaged(self, name: str, pair: int) -> InputError:
        return InputError(f"{self.folder / name}: pair {pair} is damaged; {again(self.folder)}")


class Corpus:
    """Pairs of one vocabulary, in memory or on disk; several parts are mixed by their weights.

    An epoch has as many pairs as all parts together. The first n pairs of the order have, of each
    part, n times its share of the weights, rounded. Each part has its own order, in which every
    pair occurs once before one occurs again, whatever the epoch.
    """

    source_length = 0  # columns of every source; 0: those of its ids

    def __init__(
        self,
        parts: Sequence[Part],
        src_vocab_size: int,
        tgt_vocab_size: int,
        pad_id: int = 0,
        weights: Sequence[float] | None = None,
    ) -> None:
        sizes = (float(part.counts.pairs) for part in parts)
        self.parts, self.weights = tuple(parts), tuple(weights or sizes)
        self.src_vocab_size, self.tgt_vocab_size = src_vocab_size, tgt_vocab_size
        self.pad_id = pad_id
        self._sizes = np.array([part.counts.pairs for part in parts])
        self._ends = np.cumsum(self._sizes)
        self._begins = self._ends - self._sizes

    @staticmethod
    def mixed(corpora: Sequence["Corpus"], weights: Sequence[float] | None = None) -> "Corpus":
        """Return corpora of one vocabulary as one, mixed by weight; None: all equally often."""
        return corpora[0]._of([part for corpus in corpora for part in corpus.parts], weights)

    def _of(self, parts: Sequence[Part], weights: Sequence[float] | None = None) -> "Corpus":
        return Corpus(parts, self.src_vocab_size, self.tgt_vocab_size, self.pad_id, weights)

    def __len__(self) -> int:
        return int(self._ends[-1])  # pairs of an epoch

    @property
    def counts(self) -> Counts:
        """What became of the pairs of all texts."""
        return functools.reduce(Counts.plus, (part.counts for part in self.parts))

    @property
    def length_counts(self) -> Int64[np.ndarray, "lengths"]:
        """Pairs of an epoch by the columns of their longer side, as the weights give them."""
        total = np.zeros(1 + max(max(part.counts.lengths, default=0) for part in self.parts))
        # How often a pair of each part occurs in an epoch, on average.
        shares = np.array(self.weights) / sum(self.weights) * len(self) / self._sizes
        for part, share in zip(self.parts, shares, strict=True):
            for length, count in part.counts.lengths.items():
                total[length] += count * share
        return np.rint(total).astype(np.int64)

    def with_objective(self, objective: Objective | None) -> "Corpus":
        """Return the corpus with what makes the examples of its texts; None: they are pairs."""
        return self._of([part._replace(objective=objective) for part in self.parts], self.weights)

    @property
    def unit(self) -> str:
        """What reports call its entries."""
        return "texts" if self.has_texts else "pairs"

    @property
    def has_texts(self) -> bool:
        """Whether some examples are pieces of texts, whose lengths a plan decides."""
        return any(part.objective is not None for part in self.parts)

    @property
    def longest_side(self) -> int:
        """Columns of the longest side of a pair; texts are cut."""
        lengths = (part.counts.lengths for part in self.parts if part.objective is None)
        return max(itertools.chain(*lengths), default=0)

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of what its examples train."""
        return tuple(dict.fromkeys(task for part in self.parts for task in part.tasks))

    def by_task(self) -> "dict[str, Corpus]":
        """Return the corpora of each task alone; texts occur in each of their denoisers."""
        parts: dict[str, list[Part]] = {task: [] for task in self.tasks}
        for part in self.parts:
            for number, task in enumerate(part.tasks):
                alone = part.objective and part.objective.only(number)
                parts[task].append(part._replace(objective=alone))
        return {task: self._of(of_task) for task, of_task in parts.items()}

    def draw(
        self, seed: int, places: range
    ) -> tuple[Int64[np.ndarray, "places"], Int64[np.ndarray, "places"]]:
        """Return the pairs at some places of all epochs, shuffled by a seed.

        Beside each, return how often it was drawn before.
        """
        if len(self.parts) == 1:
            return shuffled_numbers(len(self), seed, places), np.array(places) // len(self)
        import grain  # not at the top: a batch is made without it

        draws_of = [ENDLESS * part for part in range(len(self.parts) + 1)]
        drawn = [grain.MapDataset.range(*ends) for ends in itertools.pairwise(draws_of)]
        mixture = grain.MapDataset.mix(drawn, self.weights)
        owners, draws = np.divmod([mixture[place] for place in places], ENDLESS)
        numbers, epochs = np.zeros((2, len(places)), np.int64)
        for owner, part in enumerate(self.parts):
            draws_of_part = draws[owners == owner].tolist()
            shuffled = shuffled_numbers(part.counts.pairs, seed + owner, draws_of_part)
            numbers[owners == owner] = self._begins[owner] + shuffled
            epochs[owners == owner] = np.array(draws_of_part, np.int64) // part.counts.pairs
        return numbers, epochs

    def side_lengths(self, pairs: Integer[np.ndarray, "pairs"]) -> Int64[np.ndarray, "pairs 2"]:
        """Return the columns that source and target of each pair need, EOS included."""
        *_, rows = self._rows(pairs)
        return np.stack([rows["source"], rows["target"]], axis=1).astype(np.int64) - [0, 1]

    def objectives(self, pairs: Integer[np.ndarray, "pairs"]) -> list[Objective | None]:
        """Return what makes the examples of some texts; None for pairs."""
        owners = np.searchsorted(self._ends, pairs, side="right")
        return [self.parts[owner].objective for owner in owners]

    def task_counts(self, pieces: Sequence[Piece]) -> tuple[int, ...]:
        """Return how many of some examples are of each of the `tasks`."""
        counts = Counter()
        objectives = self.objectives(np.array([piece.number for piece in pieces], np.int64))
        for piece, objective in zip(pieces, objectives, strict=True):
            chosen = 0 if objective is None else objective.draw(piece.key(objective.seed))
            counts["translation" if objective is None else objective.denoisers[chosen].name] += 1
        return tuple(counts[task] for task in self.tasks)

    def read_pieces(self, pieces: Sequence[Piece]) -> Tokens:
        """Return the ids of examples: pairs as they are, and denoised pieces of texts."""
        numbers = np.array([piece.number for piece in pieces], np.int64)
        ids, lengths = [np.zeros(0, np.int64)], []
        read = zip(pieces, self.read(numbers).sides(), self.objectives(numbers), strict=True)
        for piece, sides, objective in read:
            if objective is not None:
                text = sides[0][piece.begin : piece.end]
                sides = objective.example(text, piece.key(objective.seed))
            ids += sides
            lengths.append([len(side) for side in sides])
        sources, targets = np.array(lengths, np.int64).reshape(-1, 2).T
        return Tokens(np.concatenate(ids), sources, targets)

    def read(self, pairs: Integer[np.ndarray, "pairs"]) -> Tokens:
        """Return the ids of some pairs; refuse a pair that differs from its checksum."""
        owners, numbers, rows = self._rows(pairs)
        places = zip(owners.tolist(), numbers.tolist(), rows.tolist(), strict=True)
        ids = [self.parts[owner].pair_ids(number, row) for owner, number, row in places]
        return Tokens(
            np.concatenate(ids or [np.zeros(0, np.uint8)]),
            source_lengths=rows["source"].astype(np.int64),
            target_lengths=rows["target"].astype(np.int64),
        )

    def _rows(
        self, pairs: Integer[np.ndarray, "pairs"]
    ) -> tuple[Int64[np.ndarray, "pairs"], Int64[np.ndarray, "pairs"], Shaped[np.ndarray, "pairs"]]:
        """Return the part of each pair, its number there, and its row of the index."""
        owners = np.searchsorted(self._ends, pairs, side="right")
        numbers = pairs - self._begins[owners]
        rows = np.empty(len(pairs), INDEX_TYPE)
        for owner, part in enumerate(self.parts):
            rows[owners == owner] = part.rows(numbers[owners == owner])
        return owners, numbers, rows


def packed_part(
    pairs: Sequence[Integer[np.ndarray, "_"]],
    sources: Sequence[int],
    seed: int = 0,
    dtype: np.dtype | None = None,
) -> Part:
    """Return pairs of ids in memory, and count them; `sources` are the lengths of the sources."""
    ids = np.concatenate(pairs or [np.zeros(0, dtype)])
    sizes = np.array([len(pair) for pair in pairs], np.int64)
    index = np.zeros(len(pairs), INDEX_TYPE)
    index["start"], index["source"] = sizes.cumsum() - sizes, sources
    index["target"] = sizes - sources
    index["crc32"] = [
        checksum(ids[start : start + source + target], source, target, seed)
        for start, source, target, _ in index.tolist()
    ]
    lengths = Counter(np.maximum(sources, sizes - sources - 1).tolist())
    counts = Counts(len(pairs), len(ids) - len(pairs), 0, Counter(), lengths)
    return Part(index, ids, counts, seed)


def shuffled_numbers(count: int, seed: int, places: Iterable[int]) -> Int64[np.ndarray, "places"]:
    """Return the numbers at some places of 0 to count - 1, shuffled anew in each epoch without end.

    An epoch has at most 2**32 numbers; its order takes no memory.
    """
    from grain.experimental import index_shuffle  # not at the top: a batch is made without it

    # As grain does, the number of the epoch is added to the seed; neighbouring seeds must not share
    # orders.
    spread = int(np.random.SeedSequence(seed).generate_state(1)[0])
    numbers = [
        index_shuffle(place % count, count - 1, (spread + place // count) % 2**32, 4)
        for place in places
    ]
    return np.array(numbers, np.int64)


def checksum(ids: Integer[np.ndarray, "_"], source: int, target: int, seed: int) -> int:
    """Return the checksum of the ids of a pair and of their numbers."""
    return zlib.crc32(ids.data, seed ^ source << 16 ^ target)


def again(folder: Path) -> str:
    """Return what to do about a damaged file of a prepared corpus."""
    return f"delete {folder} and start again: the text is encoded once more"
