"""Batches on a mesh: each process reads the rows that its devices hold. One device is a mesh."""

from collections.abc import Iterator
from functools import cache, partial

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Integer, Shaped

from jax_transformer.runtime.sharding import row_sharding, row_shards
from jax_transformer.text.batches import Batch, NumberedBatch, epoch_batches, training_batches
from jax_transformer.text.corpus import Corpus
from jax_transformer.text.plan import EpochLayout, PlannedBatch, take_rows
from jax_transformer.training.config import TrainingConfig


def fill_rows(
    plan: list[PlannedBatch], mesh: Mesh | AbstractMesh, num_microbatches: int
) -> list[PlannedBatch]:
    """Return a plan whose batches have the rows of `filled_rows`."""
    return [
        planned._replace(rows=filled_rows(planned.rows, mesh, num_microbatches)) for planned in plan
    ]


def filled_rows(rows: int, mesh: Mesh | AbstractMesh, num_microbatches: int) -> int:
    """Round the rows of a batch up to a multiple of row shards times microbatches.

    Rows of padding change neither the loss nor the dropout.
    """
    return rows + -rows % (row_shards(mesh) * num_microbatches)


def sharded_epoch(
    mesh: Mesh,
    corpus: Corpus,
    training_config: TrainingConfig,
    layout: EpochLayout,
    epoch: int,
    first: tuple[int, int],
) -> Iterator[NumberedBatch]:
    """Yield the batches of `epoch_batches`, sharded over the mesh."""
    local_rows, parts = cache(partial(_local_rows, mesh=mesh)), training_config.num_microbatches

    def rows_to_read(planned: PlannedBatch) -> PlannedBatch:
        rows = filled_rows(planned.rows, mesh, parts)
        return take_rows(planned._replace(rows=rows), local_rows(rows))

    for numbered in epoch_batches(corpus, training_config, layout, epoch, first, rows_to_read):
        spread = partial(_spread, mesh, filled_rows(numbered.planned.rows, mesh, parts))
        yield numbered._replace(batch=jax.tree.map(spread, numbered.batch))


def sharded_batches(mesh: Mesh, corpus: Corpus, plan: list[PlannedBatch]) -> Iterator[Batch]:
    """Yield the planned batches in order, sharded over the mesh."""
    parts = [take_rows(planned, _local_rows(planned.rows, mesh)) for planned in plan]
    for planned, part in zip(plan, training_batches(corpus, parts), strict=True):
        yield jax.tree.map(partial(_spread, mesh, planned.rows), part)


def _local_rows(row_count: int, mesh: Mesh) -> Integer[np.ndarray, "rows"]:
    """Return the rows of a batch that devices of this process hold, ascending."""
    is_local = np.zeros(row_count, bool)
    for (part,) in row_sharding(mesh).addressable_devices_indices_map((row_count,)).values():
        is_local[part] = True
    return np.flatnonzero(is_local)


def _spread(
    mesh: Mesh, row_count: int, part: Shaped[np.ndarray, "rows *row"]
) -> Shaped[jax.Array, "row_count *row"]:
    """Return the global array; `part` has the rows that devices of this process hold."""
    shape = (row_count, *part.shape[1:])
    return jax.make_array_from_process_local_data(row_sharding(mesh), part, shape)
