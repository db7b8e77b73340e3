"""Estimates memory, FLOPs and time of training, the time from the data sheets of devices.

Nothing is computed on a device: shapes are counted, or a step is compiled and not run. By such a
count `check_training` refuses a run that this machine cannot hold.
"""

import dataclasses
import math
import re
from typing import NamedTuple

import jax
from jax.sharding import AbstractMesh

from jax_transformer.config import Stack, TransformerConfig
from jax_transformer.config.lengths import axis_length
from jax_transformer.errors import InputError
from jax_transformer.kernels.execution import Execution
from jax_transformer.model.checks import check_whole_number
from jax_transformer.model.transformer import Params
from jax_transformer.model.tree import STACKS, parameter_shardings
from jax_transformer.runtime import sharding
from jax_transformer.runtime.host_memory import check_memory
from jax_transformer.runtime.topologies import Device, compile_for_topology, topology_devices
from jax_transformer.training.config import TrainingConfig
from jax_transformer.training.freeze import trainable, trained_sizes
from jax_transformer.training.step import batch_shapes, sharded_train_step, state_shapes

BYTES = {"float32": 4, "bfloat16": 2}
ADAM_MOMENTS = 2
WIDEST = 2**17  # d_model; tracing computes a table of positions that is as wide as the model
MASK = 1  # bytes of an element of a dropout mask
OF_A_STATE = 8  # float32 numbers that the scan of a recurrence keeps of each; measured on a CPU

# The models of Vaswani et al. 2017, table 3: where they differ from the preset's fields, which are
# those of the base model, and for how many steps the paper trains them (section 5.2).
SIZES = {"base": ({}, 100_000), "big": ({"d_model": 1024, "num_heads": 16, "d_ff": 4096}, 300_000)}

HALF_PRECISION = TrainingConfig(compute_dtype="bfloat16")


@dataclasses.dataclass(frozen=True)
class Workload:
    """The size of a training step, and how it is computed."""

    rows: int  # of the global batch; padded to a multiple of the mesh's data * fsdp
    length: int  # of a source and of a target, in tokens
    mesh: str = "data=1"  # sizes of the axes, as in "data=8,fsdp=4"
    training: TrainingConfig = HALF_PRECISION

    def __post_init__(self) -> None:
        check_whole_number("rows", self.rows, least=1)
        check_whole_number("length", self.length, least=1)


class Budget(NamedTuple):
    """The cost of a training step; bytes are those of one device."""

    num_parameters: int  # a shared table counts once
    num_devices: int  # of the mesh
    rows: int  # of the global batch, after padding
    parameters: float  # bytes, float32
    gradients: float  # bytes of the trained parameters', in the compute dtype
    adam_moments: float  # bytes of the trained parameters', float32
    loss: float  # bytes beside the activations: 0 unless the loss is computed in parts
    activations: dict[str, float]  # bytes kept for the backward pass, for each value of remat
    flops: float  # of the matrix products on all devices, as if nothing were frozen

    def total(self, remat: str) -> float:
        """Return all bytes on a device."""
        state = self.parameters + self.gradients + self.adam_moments
        return state + self.loss + self.activations[remat]

    def seconds(self, device: Device, utilisation: float) -> float:
        """Return the time of a step at a share of the devices' peak."""
        return self.flops / (self.num_devices * device.flops * utilisation)


def budget(config: TransformerConfig, workload: Workload) -> Budget:
    """Return the cost of training a model.

    Parameters, gradients and moments are counted as `parameter_shardings` places them: about
    parameters / (fsdp * tensor). Rows are divided by data * fsdp; heads, inner features and the
    vocabulary by tensor. Buffers that XLA needs to exchange or cast arrays do not count.
    """
    if not config.reads_ids or config.output_projection == "none":
        raise InputError("a budget needs a model from token ids to logits; choose another preset")
    mesh = _abstract_mesh(workload.mesh)
    if config.d_model > WIDEST:
        raise InputError(f"d_model={config.d_model} must be at most {WIDEST} for a budget")
    training, params = workload.training, state_shapes(config, workload.training).params
    on_device = _parameters_on_device(params, mesh, config)
    trained = _parameters_on_device(trainable(params, training.freeze), mesh, config)
    rows = workload.rows + -workload.rows % sharding.row_shards(mesh)
    rows_on_device = rows // sharding.row_shards(mesh)
    parts, loss = 1, 0
    if mesh.shape["data"] == mesh.size:  # no parameter is divided
        parts = min(Execution.for_platform("tpu").loss_parts, workload.length)
        logits = rows_on_device * math.ceil(workload.length / parts) * config.tgt_vocab_size
        head = config.d_model * config.tgt_vocab_size
        loss = BYTES[training.compute_dtype] * logits + 4 * head
    per_row = activations_per_row(config, workload, mesh.shape["tensor"], parts)
    return Budget(
        num_parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
        num_devices=mesh.size,
        rows=rows,
        parameters=4 * on_device,
        gradients=BYTES[training.compute_dtype] * trained,
        adam_moments=4 * ADAM_MOMENTS * trained,
        loss=loss,
        activations={remat: rows_on_device * size for remat, size in per_row.items()},
        flops=step_flops(config, rows, workload.length),
    )


def activations_per_row(
    config: TransformerConfig, workload: Workload, tensor: int, loss_parts: int = 1
) -> dict[str, float]:
    """Return the bytes kept for the backward pass for each row of a batch, for each remat mode.

    XLA keeps the results of products and the dropout masks; in a loop over layers, those of cheap
    operations as well. With rematerialisation, what one layer keeps is added; with several
    `loss_parts`, no logits are kept. `tensor` devices divide heads, inner features and vocabulary.
    """
    width, length = config.d_model, workload.length
    size = BYTES[workload.training.compute_dtype]

    def layer(stack: Stack) -> dict[str, float]:
        """Bytes of a token that a layer of a stack keeps."""
        sizes = config.stack(stack)
        width, inner = sizes.d_model, sizes.d_ff / tensor
        queries, scores = (sizes.num_heads * each / tensor for each in (sizes.head_dim, length))
        heads = axis_length(sizes, "heads") / tensor
        keys_and_values = sizes.key_heads * (sizes.head_dim + sizes.value_dim) / tensor
        recurrent = stack == "decoder" and sizes.decoder_attention == "ssru_then_cross"
        attentions = 1 if stack == "encoder" or recurrent else 2
        products = inner * (2 if config.gated_feed_forward else 1)
        sublayers = (attentions + 1) * width
        # The products with kernels.
        dots = sublayers + attentions * (queries + keys_and_values) + products
        dots += 2 * width / tensor * recurrent
        everything = dots + attentions * (scores + heads)
        if workload.training.scan_layers:
            everything += sublayers + attentions * scores + inner
        residual_masks = MASK * (sublayers + width * recurrent) * (config.dropout > 0)
        masks = attentions * scores * (config.attention_dropout_rate > 0)
        masks += inner * (config.activation_dropout_rate > 0)
        states = BYTES["float32"] * OF_A_STATE * width / tensor * recurrent
        return {
            "none": size * everything + residual_masks + MASK * masks + states,
            "layers": size * width,
            "dots": size * dots + residual_masks,
        }

    encoder, decoder = layer("encoder"), layer("decoder")
    logits = config.tgt_vocab_size / tensor if loss_parts == 1 else width
    ends = size * (2 * width + logits) + MASK * 2 * width * (config.dropout > 0)
    kept = {}
    for remat in encoder:
        tokens = config.num_encoder_layers * encoder[remat]
        tokens += config.num_decoder_layers * decoder[remat]
        kept[remat] = length * (ends + tokens + decoder["none"] - decoder[remat])
    return kept


def compile_step(
    config: TransformerConfig, workload: Workload, topology: str, target_length: int | None = None
) -> jax.stages.Compiled:
    """Compile `sharded_train_step` for a slice of TPUs or GPUs, with the rows of padding.

    A target of None has the length of the source.
    """
    training, length = workload.training, workload.length
    mesh = sharding.make_mesh(workload.mesh, topology_devices(topology))
    config = dataclasses.replace(config, max_length=max(length, config.max_length))
    rows = workload.rows
    rows += -rows % (sharding.row_shards(mesh) * training.num_microbatches)
    batch = batch_shapes(config, training, rows, length, target_length or length)
    step = sharded_train_step(mesh, config, training)
    return compile_for_topology(step.lower(state_shapes(config, training), batch), topology)


def _parameters_on_device(params: Params, mesh: AbstractMesh, config: TransformerConfig) -> float:
    laid = jax.tree.leaves(parameter_shardings(mesh, params, config))
    leaves = zip(laid, jax.tree.leaves(params), strict=True)
    return float(sum(math.prod(one.shard_shape(leaf.shape)) for one, leaf in leaves))


def step_flops(
    config: TransformerConfig, rows: int, length: int, target_length: int | None = None
) -> float:
    """Return the FLOPs of a training step's matrix products; a multiply-add counts as 2.

    The backward pass costs twice the forward pass: each of the two factors of a product has a
    gradient. Padding and scores that a causal mask hides count; recomputation does not. A target
    of None has the length of the source.
    """
    target_length = target_length or length
    products = target_length * config.d_model * config.tgt_vocab_size
    for stack in STACKS:
        sizes = config.stack(stack)
        queries, heads = sizes.num_heads * sizes.head_dim, axis_length(sizes, "heads")
        keys_and_values = sizes.key_heads * (sizes.head_dim + sizes.value_dim)
        recurrent = stack == "decoder" and sizes.decoder_attention == "ssru_then_cross"
        own = length if stack == "encoder" else target_length
        projected = axis_length(sizes, "projected")
        inputs = [] if recurrent else [(projected, own)]  # width, tokens of each attention's keys
        if stack == "decoder":
            inputs.append((axis_length(sizes, "projected_memory"), length))
        attentions = 1 if sizes.decoder_attention == "merged" else len(inputs)
        layer = attentions * (projected * queries + sizes.d_model * heads)
        layer += 2 * sizes.d_model**2 * recurrent
        layer += sum(count for _, count in inputs) * (queries + heads)
        layer += (3 if sizes.gated_feed_forward else 2) * sizes.d_model * sizes.d_ff
        layer *= own
        for width, count in inputs:
            layer += width * keys_and_values * count
        products += getattr(config, f"num_{stack}_layers") * layer
    return 3.0 * 2 * products * rows


def _abstract_mesh(sizes: str) -> AbstractMesh:
    if "-" in sizes:
        raise InputError(f"mesh={sizes!r} must name the size of each axis: no devices are asked")
    named = math.prod(int(size) for size in re.findall(r"=\s*([0-9]+)", sizes, re.ASCII))
    check_whole_number("the number of devices of mesh", named)
    shape = sharding.parse_sizes(sizes, named)
    return AbstractMesh(shape, sharding.AXES, axis_types=sharding.AXIS_TYPES)


def check_training(config: TransformerConfig, training_config: TrainingConfig) -> None:
    """Refuse a training whose state and activations the memory of this machine cannot hold."""
    # An accelerator refuses by itself, and each of several processes may hold a part.
    if jax.default_backend() != "cpu" or jax.process_count() > 1:
        return
    trained, whole = trained_sizes(config, training_config)
    check_memory(
        BYTES["float32"] * (whole + (1 + ADAM_MOMENTS) * trained),
        f"training a model of d_model={config.d_model} with {whole:,} parameters",
        "choose smaller sizes",
    )
    if training_config.batching == "packed":  # its rows are there whatever the text is
        tokens = training_config.max_tokens // training_config.num_microbatches
        layers = config.num_encoder_layers + config.num_decoder_layers
        check_memory(
            BYTES["float32"] * layers * tokens * config.d_model,
            f"a batch of {tokens:,} tokens a side",
            "lower max_tokens or raise num_microbatches",
        )
