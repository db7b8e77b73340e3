"""A prepared corpus: the folder that `prepare` has written, as pairs to train on."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64, Integer

from jax_transformer.errors import InputError
from jax_transformer.storage.reading import read_bytes
from jax_transformer.text.encoded import Tokens, shuffled_numbers
from jax_transformer.text.prepared.shards import ShardFacts, Shards, read_facts, unsealed

MANIFEST = "manifest.json"  # written last: a folder with one is whole


class PreparedCorpus:
    """Pairs in shards on disk; what is read of them is checked against their checksums.

    Attributes:
        folder: Where the shards are.
        facts: Their sums: pairs, tokens, dropped pairs by reason.
        src_vocab_size: Number of ids in the vocabulary of the sources.
        tgt_vocab_size: Number of ids in the vocabulary of the targets.
        pad_id: Id of padding.
        length_counts: Number of pairs by the columns of their longer side [longest + 1].
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], shards: list[ShardFacts]) -> None:
        """Open the shards; `open_folder` finds them."""
        self.folder, self.manifest = folder, manifest
        self.facts = merged_facts(shards)
        self.src_vocab_size: int = manifest["src_vocab_size"]
        self.tgt_vocab_size: int = manifest["tgt_vocab_size"]
        self.pad_id: int = manifest["pad_id"]
        self.length_counts = np.trim_zeros(np.array(self.facts.length_counts, np.int64), "b")
        self._shards = Shards(folder, shards)

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self._shards)

    @property
    def tokens(self) -> int:
        """Tokens of one epoch without padding: sources and shifted targets, EOS included."""
        return self.facts.tokens

    @property
    def bytes_read(self) -> int:
        """Bytes that this object has read of index and ids."""
        return self._shards.bytes_read

    def order(self, seed: int, places: range) -> Int64[np.ndarray, "places"]:
        """Return the pairs at some places of all epochs, shuffled by a seed."""
        return shuffled_numbers(len(self), seed, places)

    def side_lengths(self, pairs: Integer[np.ndarray, "pairs"]) -> Int64[np.ndarray, "pairs 2"]:
        """Return the columns that source and target of each pair need, EOS included."""
        return self._shards.side_lengths(pairs)

    def read(self, pairs: Integer[np.ndarray, "pairs"]) -> Tokens:
        """Return the ids of some pairs.

        Raises:
            InputError: A pair differs from its checksum, or a file cannot be read.
        """
        return self._shards.read(pairs)


def open_folder(folder: Path) -> PreparedCorpus:
    """Return the corpus in a folder.

    Raises:
        InputError: The folder is not whole, or a file in it is damaged.
    """
    try:
        manifest = unsealed(read_bytes(folder / MANIFEST, "is no manifest"))
        key, count = manifest["key"], manifest["shards"]
        shards = [read_facts(folder, number, key) for number in range(count)]
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise InputError(
            f"{folder / MANIFEST}: cannot be read ({error}); delete {folder} and start again"
        ) from error
    if None in shards:
        raise InputError(
            f"{folder}: shard {shards.index(None)} is missing, truncated or of another corpus; "
            "delete the folder and start again: the text is encoded once more"
        )
    return PreparedCorpus(folder, manifest, shards)


def merged_facts(shards: Iterable[ShardFacts]) -> ShardFacts:
    """Return the sums of the facts of all shards."""
    total = ShardFacts("", 0, 0, "", 0, 0, {}, [])
    for shard in shards:
        counts = np.zeros(max(len(total.length_counts), len(shard.length_counts)), np.int64)
        for counted in (total.length_counts, shard.length_counts):
            counts[: len(counted)] += np.array(counted, np.int64)
        total = ShardFacts(
            shard.key,
            total.pairs + shard.pairs,
            total.ids + shard.ids,
            shard.dtype,
            total.tokens + shard.tokens,
            total.unknown + shard.unknown,
            dict(Counter(total.dropped) + Counter(shard.dropped)),
            counts.tolist(),
        )
    return total


def kept(facts: ShardFacts) -> str:
    """Return one line: pairs read and left out by reason, pairs kept, unknown tokens."""
    pairs = facts.pairs + sum(facts.dropped.values())
    dropped = "".join(f", {count:,} {reason}" for reason, count in sorted(facts.dropped.items()))
    return (
        f"{pairs:,} pairs read{dropped}; {facts.pairs:,} pairs of {facts.tokens:,} tokens kept, "
        f"{facts.unknown / facts.tokens:.2%} of the tokens unknown"
    )
