"""What `Embedder` and `Classifier` share: a model of rows of ids, computed in few shapes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jax_transformer.errors import InputError
from jax_transformer.kernels.attention_backend import execution_on
from jax_transformer.model.checks import check_whole_number
from jax_transformer.runtime.sharding import make_mesh, row_sharding, row_shards
from jax_transformer.text.batches import pad
from jax_transformer.translation.model_folder import TrainedModel, check_dtype
from jax_transformer.translation.pools import power_of_two
from jax_transformer.translation.translate import place

SHORTEST = 16  # tokens of the shortest batch; each longer one has twice as many
FEW = 8  # texts of the batch that few texts are


def check_options(dtype: str | None, max_length: int | None, max_tokens: int) -> None:
    """Refuse options, before a model is read."""
    check_dtype(dtype)
    if max_length is not None:
        check_whole_number("max_length", max_length, least=1)
    check_whole_number("max_tokens", max_tokens, least=1)


class BatchedModel:
    """A model on its devices, and the rows and batches of texts.

    Attributes:
        name: What messages call it.
        model: The model, whose parameters lie on the mesh.
    """

    # Compiled; a subclass sets it. It takes the parameters, the ids, the length of each row, and
    # what `_compute` is given beside the rows.
    _function: Callable[..., Float[Array, "B *rest"]]

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
        """Place a model by options that are checked; texts are cut at the limit, None cuts none."""
        self.name = str(name)
        read = read.for_text(self.name).with_dtype(dtype)
        if limit is not None and read.config.positions != "learned":
            read = read.with_max_length(limit, self.name)
        self._limit, self._max_tokens, self._mesh = limit, max_tokens, mesh or make_mesh()
        self.model = place(read, self._mesh)
        dtype = jax.tree.leaves(read.params)[0].dtype.name
        self._execution = execution_on(self._mesh.devices.flat[0], dtype, read.config)
        most = read.config.max_length
        self._most = most if limit is None else min(limit, most)  # tokens of a row

    def __repr__(self) -> str:
        """Return one line with the model's name and sizes."""
        return f"{type(self).__name__}({self.name!r}: {self.model!r})"

    def _rows(
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
            if len(ids) > self._most and self._limit is None:
                raise InputError(
                    f"text {done + index + 1} has {len(ids)} tokens, but the model takes "
                    f"{self._most}; set max_length, at which longer texts are cut"
                )
            if len(ids) > self._most:
                (rows[index],) = encode([texts[index]], self._most)
        return rows

    def _compute(
        self, rows: Sequence[Sequence[int]], *beside: int
    ) -> list[Float[np.ndarray, "*rest"]]:
        """Return what the function returns for each row; rows of like length are a batch.

        A batch has one of two numbers of rows, so that each length is compiled twice at most.
        """
        by_length: dict[int, list[int]] = {}
        for index, ids in enumerate(rows):
            length = min(power_of_two(max(SHORTEST, len(ids))), self._most)  # one of few
            by_length.setdefault(length, []).append(index)
        results: list[Float[np.ndarray, "*rest"]] = [np.empty(0, np.float32)] * len(rows)
        shards = row_shards(self._mesh)
        for length, members in by_length.items():
            full = shards * max(1, self._max_tokens // length)
            few = min(full, shards * FEW)
            computed = []  # by the devices, while the host makes the next batch
            while members:
                count = full if len(members) >= full else few  # so at most `few` rows are in vain
                batch, members = members[:count], members[count:]
                ids = [rows[index] for index in np.resize(batch, count)]
                lengths = np.array([len(row) for row in ids], np.int32)
                arrays = (pad(ids, self.model.config.pad_id, length), lengths)
                src, lengths = jax.device_put(arrays, row_sharding(self._mesh))
                with jax.set_mesh(self._mesh):
                    found = self._function(self.model.params, src, lengths, *beside)
                computed.append((batch, found))
            for batch, found in computed:
                for index, result in zip(batch, np.asarray(found), strict=False):
                    results[index] = result
        return results
