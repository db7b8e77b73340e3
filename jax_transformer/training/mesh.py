"""Training on a mesh: the state made where it lies, batches spread out, the steps compiled for it.

One device is a mesh of one.
"""

from collections.abc import Callable
from functools import partial

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, use_abstract_mesh
from jaxtyping import Array, Float, Int

from jax_transformer.config import TransformerConfig
from jax_transformer.data.batches import Batch, PlannedBatch
from jax_transformer.model import Params
from jax_transformer.sharding import replicated, row_sharding, row_shards, shardings
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
    """Return the state's shapes and types, and no array."""
    return jax.eval_shape(partial(init_state, config, training_config))


def state_shardings(
    mesh: Mesh, config: TransformerConfig, training_config: TrainingConfig
) -> TrainState:
    """Return where each array of the state lies."""
    return shardings(state_shapes(config, training_config), mesh, config)


def init_state_on(
    mesh: Mesh, config: TransformerConfig, training_config: TrainingConfig
) -> TrainState:
    """Return `init_state`, each part of it made on the device that holds it."""
    make = partial(init_state, config, training_config)
    return jax.jit(make, out_shardings=state_shardings(mesh, config, training_config))()


def train_step_on(
    mesh: Mesh, config: TransformerConfig, training_config: TrainingConfig
) -> TrainStep:
    """Return `train_step` for a mesh, jitted; the state handed in is donated."""
    state = state_shardings(mesh, config, training_config)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        with use_abstract_mesh(mesh.abstract_mesh):
            return train_step(state, batch, config, training_config)

    return jax.jit(
        step,
        in_shardings=(state, row_sharding(mesh)),
        out_shardings=(state, replicated(mesh)),
        donate_argnums=0,
    )


def evaluation_step_on(
    mesh: Mesh, config: TransformerConfig, training_config: TrainingConfig
) -> EvaluationStep:
    """Return `evaluation_step` for a mesh, jitted."""

    def step(params: Params, batch: Batch) -> tuple[Float[Array, ""], Int[Array, ""]]:
        with use_abstract_mesh(mesh.abstract_mesh):
            return evaluation_step(params, batch, config, training_config)

    params = state_shardings(mesh, config, training_config).params
    return jax.jit(step, in_shardings=(params, row_sharding(mesh)), out_shardings=replicated(mesh))


def fill_rows(
    plan: list[PlannedBatch], mesh: Mesh | AbstractMesh, num_microbatches: int
) -> list[PlannedBatch]:
    """Return a plan whose batches have rows that the mesh and the microbatches divide.

    Rows of padding are added at the end, where they change nothing: they do not count in the loss,
    and an element's dropout depends on its own index and not on how many there are.
    """
    multiple = row_shards(mesh) * num_microbatches
    return [planned._replace(rows=planned.rows + -planned.rows % multiple) for planned in plan]


def place_batch(batch: Batch, mesh: Mesh) -> Batch:
    """Return a batch spread over the mesh; of its rows a process copies those of its devices."""

    def place(rows: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(rows.shape, row_sharding(mesh), rows.__getitem__)

    return jax.tree.map(place, batch)
