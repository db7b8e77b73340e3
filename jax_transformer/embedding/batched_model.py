"""A model as a function of rows of ids, computed in batches of few shapes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jax_transformer.errors import InputError, shorten
from jax_transformer.kernels.attention_backend import execution_on
from jax_transformer.model.checks import check_whole_number
from jax_transformer.model.transformer import Params
from jax_transformer.model.tree import in_dtype
from jax_transformer.runtime.sharding import make_mesh, row_sharding, row_shards
from jax_transformer.text.batches import pad
from jax_transformer.translation.model_folder import DTYPES, TrainedModel
from jax_transformer.translation.translate import place

SHORTEST = 16  # tokens of the shortest batch; each longer one has twice as many
FEW = 8  # texts of the batch that few texts are
# Of the parameters, the ids and the length of each row.
Function = Callable[[Params, Int[Array, "B S"], Int[Array, " B"]], Float[Array, "B *rest"]]


def check_options(dtype: str | None, max_length: int | None, max_tokens: int) -> None:
    """Refuse options, before a model is read."""
    if dtype not in (None, *DTYPES):
        raise InputError(f"dtype={shorten(dtype)} must be {' or '.join(map(repr, DTYPES))}")
    if max_length is not None:
        check_whole_number("max_length", max_length, least=1)
    check_whole_number("max_tokens", max_tokens, least=1)


class BatchedModel:
    """A model on its devices, and the rows and batches of texts.

    Attributes:
        model: The model, whose parameters lie on the mesh.
        most: Most tokens of a row.
        execution: How it is computed.
    """

    def __init__(
        self,
        read: TrainedModel,
        name: str | Path,
        *,
        limit: int | None,
        dtype: str | None,
        max_tokens: int,
        mesh: Mesh | None,
    ) -> None:
        """Place a model.

        Args:
            read: The model.
            name: What messages call it.
            limit: Most tokens of a text, at which longer texts are cut; None cuts none.
            dtype: Type of the parameters, which `check_options` has checked; None keeps theirs.
            max_tokens: Most tokens of a batch, padding included.
            mesh: The devices; None is all of them.
        """
        read = read.for_text(str(name))
        if limit is not None and read.config.positions != "learned":
            read = read.with_max_length(limit, str(name))
        if dtype is not None:
            read = read._replace(params=in_dtype(read.params, dtype))
        self.limit, self.max_tokens, self.mesh = limit, max_tokens, mesh or make_mesh()
        self.model = place(read, self.mesh)
        dtype = jax.tree.leaves(read.params)[0].dtype.name
        self.execution = execution_on(self.mesh.devices.flat[0], dtype, read.config)
        most = read.config.max_length
        self.most = most if limit is None else min(limit, most)

    def rows(
        self, encode: Callable[..., list[list[int]]], texts: Sequence[Any], done: int
    ) -> list[list[int]]:
        """Return the ids of each text, cut at the limit; without one, refuse what is too long.

        Args:
            encode: Returns the ids of texts, given them and perhaps the most ids of each.
            texts: The texts.
            done: How many there were before, for the message.
        """
        rows = encode(texts)
        for index, ids in enumerate(rows):
            if len(ids) > self.most and self.limit is None:
                raise InputError(
                    f"text {done + index + 1} has {len(ids)} tokens, but the model takes "
                    f"{self.most}; set max_length, at which longer texts are cut"
                )
            if len(ids) > self.most:
                (rows[index],) = encode([texts[index]], self.most)
        return rows

    def compute(
        self, function: Function, rows: Sequence[Sequence[int]]
    ) -> list[Float[np.ndarray, "*rest"]]:
        """Return what a compiled function returns for each row; rows of like length are a batch."""
        by_length: dict[int, list[int]] = {}
        for index, ids in enumerate(rows):
            by_length.setdefault(self._batch_length(len(ids)), []).append(index)
        results: list[Float[np.ndarray, "*rest"]] = [np.empty(0, np.float32)] * len(rows)
        for length, members in by_length.items():
            for batch, found in self._batches(function, rows, members, length):
                for index, result in zip(batch, np.asarray(found), strict=False):
                    results[index] = result
        return results

    def _batches(
        self, function: Function, rows: Sequence[Sequence[int]], members: list[int], length: int
    ) -> list[tuple[list[int], Float[Array, "B *rest"]]]:
        """Return the members of each batch, and their results, which the devices compute.

        A batch has one of two numbers of rows, so that each length is compiled twice at most.
        """
        shards = row_shards(self.mesh)
        full = shards * max(1, self.max_tokens // length)
        few = min(full, shards * FEW)
        results = []
        while members:
            count = full if len(members) >= full else few  # so at most `few` rows are in vain
            batch, members = members[:count], members[count:]
            ids = [rows[index] for index in np.resize(batch, count)]
            lengths = np.array([len(row) for row in ids], np.int32)
            arrays = (pad(ids, self.model.config.pad_id, length), lengths)
            src, lengths = jax.device_put(arrays, row_sharding(self.mesh))
            with jax.set_mesh(self.mesh):
                results.append((batch, function(self.model.params, src, lengths)))
        return results

    def _batch_length(self, tokens: int) -> int:
        """Return the length of the batch of a text: one of few."""
        length = SHORTEST
        while length < tokens:
            length *= 2
        return min(length, self.most)
