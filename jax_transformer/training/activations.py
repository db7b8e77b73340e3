"""What the backward pass of a training step keeps of the forward pass, from shapes alone.

XLA keeps the results of products and of loops. It computes cheap operations again where the
backward pass needs their results, and so it keeps the smallest set of arrays from which that is
possible: a minimum cut between them and the residuals of `jax.vjp`.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

from jax_transformer.config import TransformerConfig
from jax_transformer.kernels.attention_backend import choose
from jax_transformer.kernels.execution import Execution, Remat
from jax_transformer.model.transformer import Params, init_params
from jax_transformer.text.batches import Batch
from jax_transformer.training.objective import batch_loss

# A prime number of rows: an array of a traced step has rows if its size is a multiple of it.
ROWS = 10_007
PLATFORM = "tpu"  # whose choices are traced; a GPU's differ by the masks of dropout and the norms
# Operations whose results XLA does not compute again; every other one is cheap.
KEPT = {
    *("checkpoint", "remat", "remat2", "scan", "while", "cond"),
    *("dot_general", "conv_general_dilated", "pallas_call", "custom_call", "ffi_call"),
    *("gather", "scatter", "scatter-add", "sort", "top_k", "cumsum", "cummax"),
    *("random_bits", "rng_bit_generator", "threefry2x32"),
}
UNLIMITED = 2**31 - 1


def activations_per_row(
    config: TransformerConfig,
    length: int,
    compute_dtype: str,
    tensor: int,
    scan_layers: bool = False,
    loss_parts: int = 1,
) -> dict[str, float]:
    """Return the bytes kept for the backward pass for each row of a batch, for each remat mode.

    With rematerialisation, the residuals of the one layer that the backward pass recomputes at a
    time are added. A loop over layers keeps all residuals of its body.

    Args:
        config: The shape of the model.
        length: Length of a source and of a target.
        compute_dtype: What the model computes in.
        tensor: Devices among which heads, inner features and vocabulary are divided.
        scan_layers: As `Execution.scan_layers`.
        loss_parts: As `Execution.loss_parts`; with several, no logits are kept.
    """
    # Without the numbers of layers, so that models that differ in nothing else share the traces.
    shallow = dataclasses.replace(config, num_encoder_layers=1, num_decoder_layers=1)
    forms = {"scan_layers": scan_layers, "loss_parts": loss_parts}
    traced = partial(bytes_kept, shallow, length, compute_dtype, tensor, **forms)
    kept, layers = {}, {}
    fewest = 2 if scan_layers else 1  # one layer is no loop
    for remat in get_args(Remat):
        least = traced(fewest, fewest, remat)
        encoder = traced(fewest + 1, fewest, remat) - least
        decoder = traced(fewest, fewest + 1, remat) - least
        kept[remat] = least + (config.num_encoder_layers - fewest) * encoder
        kept[remat] += (config.num_decoder_layers - fewest) * decoder
        layers[remat] = max(encoder, decoder)
    return {remat: size + layers["none"] - layers[remat] for remat, size in kept.items()}


@cache
def bytes_kept(
    config: TransformerConfig,
    length: int,
    compute_dtype: str,
    tensor: int,
    num_encoder_layers: int,
    num_decoder_layers: int,
    remat: Remat,
    scan_layers: bool = False,
    loss_parts: int = 1,
) -> float:
    """Return the bytes that a model with these numbers of layers keeps for a row of a batch.

    Arguments as `activations_per_row`.
    """
    fields = {"num_encoder_layers": num_encoder_layers, "num_decoder_layers": num_decoder_layers}
    config = dataclasses.replace(config, max_length=max(length, config.max_length), **fields)
    dropped = config.attention_dropout_rate > 0
    attention = choose(PLATFORM, "", compute_dtype, config.head_dim, dropped).implementation
    forms = {"remat": remat, "scan_layers": scan_layers, "loss_parts": loss_parts}
    execution = Execution.for_platform(PLATFORM, attention=attention, **forms)

    def residuals(key: jax.Array, ids: jax.Array) -> list[Any]:
        def loss(params: Params) -> jax.Array:
            params = jax.tree.map(lambda leaf: leaf.astype(compute_dtype), params)
            batch = Batch(ids, ids, ids)
            return batch_loss(params, batch, config, 0.1, key, execution)[0]

        return jax.tree.leaves(jax.vjp(loss, init_params(key, config))[1])

    ids = jax.ShapeDtypeStruct((ROWS, length), jnp.int32)
    traced = jax.make_jaxpr(residuals)(jax.eval_shape(jax.random.key, 0), ids)
    cost = partial(_bytes_of_a_token, config=config, tensor=tensor, length=length)
    return float(length * least_kept(traced.jaxpr, cost))


def least_kept(jaxpr: core.Jaxpr, cost: Callable[[Any], int]) -> int:
    """Return what the smallest set of arrays costs that gives all results by cheap operations.

    The largest array that is written only to be read by indices is added: it is in memory at the
    same time.

    Args:
        jaxpr: A function; its arguments are in memory anyway and cost nothing.
        cost: What an array costs to keep, as a function of its abstract value; 0 for small ones.
    """
    graph = _Graph(cost)
    graph.need(graph.add(jaxpr, [None] * len(jaxpr.invars)))
    return graph.least_kept() + graph.written


class _Graph:
    """Which array is computed from which, with what an array costs to keep.

    An array is two nodes; the edge between them is what it costs. Arrays without rows are
    parameters or small, and cost nothing: they have no nodes.
    """

    def __init__(self, cost: Callable[[Any], int]) -> None:
        self.cost = cost  # bytes of a token, of an abstract value
        self.count = 2  # nodes: the source, the sink and those of the arrays
        self.edges: dict[tuple[int, int], int] = {}
        self.written = 0  # the largest array that is written to be read by indices, not kept

    def add(self, jaxpr: core.Jaxpr, inputs: list[int | None]) -> list[int | None]:
        """Add the operations of a function and of what it calls; return the nodes of its results.

        Args:
            jaxpr: The function. One function may be added several times.
            inputs: The nodes of its arguments; None for one without rows.
        """
        nodes = dict(zip(jaxpr.invars, inputs, strict=True))

        def node_of(var: Any) -> int | None:
            return None if isinstance(var, core.Literal) else nodes.get(var)

        for equation in jaxpr.eqns:
            read = [node_of(var) for var in equation.invars]
            inside = _called(equation)
            if inside is not None:
                nodes.update(zip(equation.outvars, self.add(inside, read), strict=True))
                continue
            name = equation.primitive.name
            for var in equation.outvars:
                cost = self.cost(var.aval)
                if not cost:
                    continue
                nodes[var] = self._array(cost)
                for source in [0] if name in KEPT else [node + 1 for node in read if node]:
                    self.edges[source, nodes[var]] = UNLIMITED
            if name == "gather" and read[0] is not None:
                self.written = max(self.written, self.cost(equation.invars[0].aval))
        return [node_of(var) for var in jaxpr.outvars]

    def need(self, nodes: list[int | None]) -> None:
        """Mark the arrays that the backward pass needs."""
        for node in nodes:
            if node is not None:
                self.edges[node + 1, 1] = UNLIMITED

    def least_kept(self) -> int:
        """Return the bytes of a token of the smallest set of arrays that gives all needed ones."""
        rows, columns = np.array(list(self.edges)).T
        capacities = np.array(list(self.edges.values()), np.int32)
        network = csr_array((capacities, (rows, columns)), shape=(self.count, self.count))
        return int(maximum_flow(network, 0, 1).flow_value)

    def _array(self, cost: int) -> int:
        node, self.count = self.count, self.count + 2
        self.edges[node, node + 1] = cost
        return node


def _called(equation: Any) -> core.Jaxpr | None:
    """Return the function that an operation calls as it is, if it is such a call."""
    if equation.primitive.name in KEPT:
        return None
    for value in equation.params.values():
        inside = getattr(value, "jaxpr", value)
        if isinstance(inside, core.Jaxpr) and len(inside.invars) == len(equation.invars):
            return inside
    return None


def _bytes_of_a_token(aval: Any, config: TransformerConfig, tensor: int, length: int) -> int:
    """Return the bytes of an array on a device for each token; 0 for one without rows."""
    shape = getattr(aval, "shape", ())
    size = math.prod(shape)
    if not size or size % ROWS:
        return 0
    has_heads = len(shape) >= 4 and shape[-3] == config.num_heads
    wide = shape[-1] in {config.d_ff, config.tgt_vocab_size} - {config.d_model}
    divided = tensor if has_heads or wide else 1
    return math.ceil(size * aval.dtype.itemsize / (ROWS * length * divided))
