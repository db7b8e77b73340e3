"""Training on a mesh: sharded initial state, sharded batches, and steps compiled for the mesh.

One device is a mesh of one device.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, use_abstract_mesh
from jaxtyping import Array, Float, Int, Int32, Integer

from jax_transformer.config import TransformerConfig
from jax_transformer.kernels.attention_backend import execution_on
from jax_transformer.kernels.compiler_options import compiler_options
from jax_transformer.model.parameters import shardings
from jax_transformer.model.transformer import Params
from jax_transformer.runtime.sharding import replicated, row_sharding, row_shards
from jax_transformer.text.batches import Batch, epoch_batches, training_batches
from jax_transformer.text.corpus import Corpus
from jax_transformer.text.plan import EpochLayout, PlannedBatch, take_rows
from jax_transformer.training.config import TrainingConfig
from jax_transformer.training.step import (
    Metrics,
    TrainState,
    evaluation_step,
    init_state,
    train_step,
)

TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
EvaluationStep = Callable[[Params, Batch], tuple[Float[Array, ""], Int[Array, ""]]]


def state_shapes(config: TransformerConfig, training_config: TrainingConfig) -> TrainState:
    """Return the shapes and dtypes of the state, without any array."""
    return jax.eval_shape(partial(init_state, config, training_config))


def state_shardings(
    mesh: Mesh, config: TransformerConfig, training_config: TrainingConfig
) -> TrainState:
    """Return the sharding of each array of the state."""
    return shardings(state_shapes(config, training_config), mesh, config)


def sharded_init_state(
    mesh: Mesh,
    config: TransformerConfig,
    training_config: TrainingConfig,
    params: Params | None = None,
) -> TrainState:
    """Return `init_state`, with each shard computed on the device that holds it.

    Args:
        mesh: The devices.
        config: The shape of the model.
        training_config: How it is trained.
        params: The parameters to start from, whole and on the host; None draws them.
    """
    make = partial(init_state, config, training_config)
    places = state_shardings(mesh, config, training_config)
    if params is not None:
        params = jax.device_put(params, places.params)
    return jax.jit(make, out_shardings=places)(params)


def sharded_train_step(
    mesh: Mesh, config: TransformerConfig, training_config: TrainingConfig
) -> TrainStep:
    """Return `train_step` for a mesh, jitted; the state handed in is donated."""
    state = state_shardings(mesh, config, training_config)
    execution = execution_on(
        mesh.devices.flat[0],
        training_config.compute_dtype,
        config.head_dim,
        dropped=config.attention_dropout_rate > 0,
    )

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        with use_abstract_mesh(mesh.abstract_mesh):
            return train_step(state, batch, config, training_config, execution)

    return jax.jit(
        step,
        in_shardings=(state, row_sharding(mesh)),
        out_shardings=(state, replicated(mesh)),
        donate_argnums=0,
        compiler_options=compiler_options(mesh),
    )


def sharded_evaluation_step(
    mesh: Mesh, config: TransformerConfig, training_config: TrainingConfig
) -> EvaluationStep:
    """Return `evaluation_step` for a mesh, jitted."""
    execution = execution_on(
        mesh.devices.flat[0], training_config.compute_dtype, config.head_dim, dropped=False
    )

    def step(params: Params, batch: Batch) -> tuple[Float[Array, ""], Int[Array, ""]]:
        with use_abstract_mesh(mesh.abstract_mesh):
            return evaluation_step(params, batch, config, training_config, execution)

    params = state_shardings(mesh, config, training_config).params
    return jax.jit(step, in_shardings=(params, row_sharding(mesh)), out_shardings=replicated(mesh))


def fill_rows(
    plan: list[PlannedBatch], mesh: Mesh | AbstractMesh, num_microbatches: int
) -> list[PlannedBatch]:
    """Return a plan whose numbers of rows are multiples of row shards times microbatches.

    Rows of padding are added at the end and change nothing: they do not count in the loss, and the
    dropout of an element depends on its own index and not on the number of rows.
    """
    return [
        planned._replace(rows=filled_rows(planned.rows, mesh, num_microbatches)) for planned in plan
    ]


def filled_rows(rows: int, mesh: Mesh | AbstractMesh, num_microbatches: int) -> int:
    """Return the rows of a batch after `fill_rows`."""
    return rows + -rows % (row_shards(mesh) * num_microbatches)


def sharded_epoch(
    mesh: Mesh,
    corpus: Corpus,
    training_config: TrainingConfig,
    layout: EpochLayout,
    epoch: int,
    first: tuple[int, int],
) -> Iterator[tuple[int, int, Batch]]:
    """Yield the batches of an epoch, sharded over the mesh, with their windows and numbers.

    Arguments as `epoch_batches`. Each process reads only the rows that its own devices hold.

    Raises:
        InputError: The corpus is damaged, or an id is outside the vocabulary.
    """
    own_rows = cache(partial(_own_rows, mesh=mesh))
    parts = training_config.num_microbatches

    def own(planned: PlannedBatch) -> PlannedBatch:
        (filled,) = fill_rows([planned], mesh, parts)
        return take_rows(filled, own_rows(filled.rows))

    for window, number, planned, part in epoch_batches(
        corpus, training_config, layout, epoch, first, own
    ):
        rows = filled_rows(planned.rows, mesh, parts)
        yield window, number, jax.tree.map(partial(_spread, mesh, rows, own_rows(rows)), part)


def sharded_batches(mesh: Mesh, encoded: Corpus, plan: list[PlannedBatch]) -> Iterator[Batch]:
    """Yield the planned batches in order, sharded over the mesh.

    Each process builds only the rows that its own devices hold.

    Raises:
        InputError: An id is outside the vocabulary.
    """
    own = [_own_rows(planned.rows, mesh) for planned in plan]
    parts = [take_rows(planned, rows) for planned, rows in zip(plan, own, strict=True)]
    for planned, rows, part in zip(plan, own, training_batches(encoded, parts), strict=True):
        yield jax.tree.map(partial(_spread, mesh, planned.rows, rows), part)


def _own_rows(row_count: int, mesh: Mesh) -> Integer[np.ndarray, "rows"]:
    """Return the rows of a batch that devices of this process hold, ascending."""
    held = np.zeros(row_count, bool)
    for (part,) in row_sharding(mesh).addressable_devices_indices_map((row_count,)).values():
        held[part] = True
    return np.flatnonzero(held)


def _spread(
    mesh: Mesh,
    row_count: int,
    own_rows: Integer[np.ndarray, "rows"],
    part: Int32[np.ndarray, "rows length"],
) -> jax.Array:
    """Return the global array, of which this process holds its own rows."""

    def on_device(index: tuple[slice, slice]) -> Int32[np.ndarray, "device_rows length"]:
        return part[np.searchsorted(own_rows, np.arange(row_count)[index[0]])]

    shape = (row_count, part.shape[1])
    return jax.make_array_from_callback(shape, row_sharding(mesh), on_device)
