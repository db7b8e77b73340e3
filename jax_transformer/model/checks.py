"""Checks of a call's arguments, made on the host before any work reaches a device.

On a device nothing is refused: XLA clamps, wraps or drops an index that is out of range. Under
`jax.jit` an argument has a type (dtype and shape) but no values: the type is refused there as
anywhere, and a value that is wrong gives NaN.
"""

import operator
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jax.errors import InconclusiveDimensionOperation
from jax.export import is_symbolic_dim
from jax.sharding import AxisType
from jaxtyping import Integer, PRNGKeyArray

from jax_transformer.config import LARGEST, TransformerConfig
from jax_transformer.errors import InputError, shorten
from jax_transformer.kernels.execution import Execution
from jax_transformer.kernels.segments import SegmentMask
from jax_transformer.model.tree import (
    BASE,
    LAYER,
    LORA_LEAVES,
    SOURCE_SIDE,
    STACKS,
    TARGET_SIDE,
    Shape,
    find_parameter,
    is_of_adapter,
    parameter_count,
    parameter_shapes,
)
from jax_transformer.runtime import host_memory

FLOAT32 = 4  # bytes


def check_array(name: str, array: Any) -> None:
    """Raise InputError unless `array` is of numpy or jax, in this machine's byte order."""
    if not isinstance(array, np.ndarray | jax.Array):
        kind = f"{type(array).__module__}.{type(array).__qualname__}".removeprefix("builtins.")
        raise InputError(
            f"{name} of type {kind} must be an array of numpy or jax; np.asarray({name}) makes one"
        )
    if isinstance(array, np.ndarray) and not array.dtype.isnative:
        native = array.dtype.newbyteorder("=")
        raise InputError(
            f"{name} of dtype {array.dtype.str} must be in this machine's byte order; "
            f"{name}.astype({native.name!r}) makes it so"
        )


def check_whole(name: str, array: Any, meaning: str = "ids") -> None:
    """Raise InputError unless `array` has an integer dtype; `meaning` is for the message."""
    check_array(name, array)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise InputError(
            f"{name} of dtype {array.dtype} must hold whole numbers: {meaning} of an integer type, "
            "as int32"
        )


def check_floats(name: str, array: Any) -> None:
    """Raise InputError unless `array` has a real floating-point dtype."""
    check_array(name, array)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise InputError(
            f"{name} of dtype {array.dtype} must hold floating-point numbers, as float32"
        )


def check_rows(name: str, array: Any, batch: int, other: str) -> None:
    """Refuse an array whose first axis is not the batch's: one row is not repeated."""
    if array.shape[0] != batch:
        raise InputError(
            f"{name} has {array.shape[0]} rows and {other} {batch}: row n of one belongs to row n "
            "of the other, so their numbers must be equal"
        )


def check_not_empty(name: str, array: Any) -> None:
    """Refuse a batch without rows or without positions, for which there is nothing to search."""
    if 0 in array.shape:
        raise InputError(
            f"{name} of shape {array.shape} is empty: give at least one row and one token"
        )


def check_key(name: str, key: Any, rows: int = 0) -> None:
    """Raise InputError unless `key` is a random key of jax, or one for each row."""
    if isinstance(key, jax.Array | np.ndarray):
        if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape in ((), (rows,)):
            return
        old_style = jax.eval_shape(jax.random.PRNGKey, 0)
        if (key.shape, key.dtype) == (old_style.shape, old_style.dtype):
            return
        kind = f"of dtype {key.dtype} and shape {key.shape}"
    else:
        kind = f"of type {type(key).__qualname__}"
    raise InputError(f"{name} {kind} must be one random key, as jax.random.key(0) makes it")


def check_whole_number(name: str, value: Any, least: int | None = None) -> None:
    """Raise InputError unless `value` is a whole number from `least` that an int32 holds."""
    if isinstance(value, jax.core.Tracer):
        raise InputError(f"{name} is traced by jit; make it static: it decides what is compiled")
    try:
        number = None if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise InputError(f"{name}={shorten(value)} must be a whole number")
    if least is not None and number < least:
        raise InputError(f"{name}={shorten(value)} must be at least {least}")
    if number > LARGEST:
        raise InputError(f"{name}={shorten(value)} must be at most {LARGEST}")


def check_ids(
    name: str,
    ids: Integer[np.ndarray, "batch length"],
    count: int,
    of: str = "the vocabulary",
    kind: str = "ids",
) -> None:
    """Refuse token ids, or numbers of another kind, outside of 0 to `count` - 1."""
    if ids.size == 0 or (ids.min() >= 0 and ids.max() < count):
        return
    row, column = np.argwhere((ids < 0) | (ids >= count))[0]
    raise InputError(
        f"{name}[{row}, {column}]={ids[row, column]} is outside {of}; "
        f"{kind} go from 0 to {count - 1}"
    )


def check_positions(
    name: str, positions: Any, shape: tuple[int, int], max_length: int | None
) -> None:
    """Refuse positions that are not one for each token, or outside the position table."""
    check_whole(name, positions, "positions")
    if positions.shape != shape:
        raise InputError(
            f"{name} of shape {positions.shape} must be [batch, length] = {list(shape)}, as the "
            "tokens are"
        )
    if max_length is not None and not isinstance(positions, jax.core.Tracer):
        check_ids(name, np.asarray(positions), max_length, "the position table", "positions")


def check_length(name: str, length: int, max_length: int) -> None:
    """Refuse a sequence longer than the position table.

    A symbolic length (`jax.export.symbolic_shape`) is refused where its constraints say that it is
    longer. Where they leave that open, positions beyond the table give NaN.
    """
    try:
        too_long = length > max_length
    except InconclusiveDimensionOperation:
        return
    if too_long:
        raise InputError(
            f"{name} is {length} tokens long, but the position table ends at max_length="
            f"{max_length}; cut the sequence or raise max_length"
        )


def check_tokens(name: str, tokens: Any, config: TransformerConfig) -> None:
    """Refuse token ids that are not a batch, or vectors that are not a batch of the right width."""
    if name == "src" and (width := config.source_features) is not None:
        check_vectors(name, tokens, f"batch, frames, source_features={width}", "which are sound")
    elif config.token_embeddings == "none":
        axes = f"batch, length, d_model={config.d_model}"
        check_vectors(name, tokens, axes, "because token_embeddings='none'")
    else:
        check_id_batch(name, tokens)


def check_vectors(name: str, vectors: Any, axes: str, reason: str) -> None:
    """Refuse what has not three axes, of which the last has the width that ends `axes`."""
    check_floats(name, vectors)
    if vectors.ndim != 3 or vectors.shape[2] != int(axes.rpartition("=")[2]):
        raise InputError(f"{name} of shape {vectors.shape} must be vectors [{axes}], {reason}")


def check_id_batch(name: str, ids: Any) -> None:
    """Raise InputError unless `ids` is an array of token ids [batch, length]."""
    check_whole(name, ids)
    if ids.ndim != 2:
        remedy = f"; write {name}[None] for one sequence" if ids.ndim == 1 else ""
        raise InputError(f"{name} of shape {ids.shape} must be ids [batch, length]{remedy}")


def check_inputs(
    name: str, tokens: Any, vocab_size: int, positions: Any | None, config: TransformerConfig
) -> None:
    """Refuse tokens or positions that the model cannot read; values where they are concrete."""
    check_tokens(name, tokens, config)
    batch, length = tokens.shape[:2]
    length = config.positions_of(length) if name == "src" else length
    if positions is not None:
        table = config.max_length if config.has_position_table else None
        check_positions(f"{name}_positions", positions, (batch, length), table)
        if table is not None:  # `jit` or not, all of it is computed
            check_position_table(table, config.d_model)
    elif config.has_position_table:
        check_length(name, length, config.max_length)
    if jnp.issubdtype(tokens.dtype, jnp.integer) and not isinstance(tokens, jax.core.Tracer):
        check_ids(name, np.asarray(tokens), vocab_size)


def check_source(
    config: TransformerConfig,
    src: Any,
    mask: Any | None,
    positions: Any | None,
    tgt: Any | None = None,
) -> None:
    """Refuse a source batch, its mask or its positions where the model cannot read them."""
    encoder = config.stack("encoder")
    check_inputs("src", src, config.src_vocab_size, positions, encoder)
    batch, length = src.shape[0], config.positions_of(src.shape[1])
    heads, queries = encoder.num_heads, length
    if tgt is not None:
        check_rows("tgt", tgt, batch, "src")
        # One mask serves the queries and the heads of the encoder and of the decoder.
        queries = queries if queries == tgt.shape[1] else 1
        heads = heads if heads == config.num_heads else 1
    check_mask("src_mask", mask, (batch, heads, queries, length))


def check_target(
    config: TransformerConfig, tgt: Any, mask: Any | None, positions: Any | None
) -> None:
    """Refuse a target batch, its mask or its positions where the model cannot read them."""
    check_decoder(config)
    check_inputs("tgt", tgt, config.tgt_vocab_size, positions, config)
    batch, length = tgt.shape[:2]
    heads = 1 if config.decoder_attention == "ssru_then_cross" else config.num_heads
    check_mask("tgt_mask", mask, (batch, heads, length, length))


def check_decoder(config: TransformerConfig) -> None:
    """Refuse an encoder alone."""
    if not config.num_decoder_layers:
        raise InputError("num_decoder_layers=0 is an encoder alone, without targets: call encode")


def check_memory(
    config: TransformerConfig, memory: Any, mask: Any | None, tgt: Any | None = None
) -> None:
    """Refuse a memory that is not [batch, length, d_model], or its mask."""
    check_decoder(config)
    axes = f"batch, length, d_model={config.stack('encoder').d_model}"
    check_vectors("memory", memory, axes, "as encode returns them")
    queries = 1
    if tgt is not None:
        check_rows("memory", memory, tgt.shape[0], "tgt")
        queries = tgt.shape[1]
    batch, length = memory.shape[:2]
    check_mask("src_mask", mask, (batch, config.num_heads, queries, length))


def check_mask(name: str, mask: Any | None, shape: tuple[int, int, int, int]) -> None:
    """Refuse a mask that is not boolean, or that does not broadcast to the attention weights."""
    if mask is None:
        return
    if isinstance(mask, SegmentMask):
        _check_segments(name, mask, shape)
        return
    check_array(name, mask)
    if mask.dtype != bool:
        raise InputError(
            f"{name} of dtype {mask.dtype} must be boolean, True = attend; from an additive mask "
            "of torch (0 and -inf) pass mask == 0, from a boolean one (True = blocked) pass ~mask"
        )
    fits = mask.ndim == 4 and all(
        length in (1, full) for length, full in zip(mask.shape, shape, strict=True)
    )
    if not fits:
        remedy = ""
        if mask.shape == (shape[0], shape[3]):
            remedy = f"; write {name}[:, None, None, :] for a mask of [batch, keys]"
        elif name == "src_mask" and mask.ndim == 4 and mask.shape[2] == mask.shape[3] == shape[3]:
            remedy = (
                "; give a mask with a row for each source position to encode alone, and its result "
                "to decode, or to generate as memory="
            )
        raise InputError(
            f"{name} of shape {mask.shape} must be broadcastable to [batch, heads, queries, keys] "
            f"= {list(shape)}{remedy}"
        )


def _check_segments(name: str, mask: SegmentMask, shape: tuple[int, int, int, int]) -> None:
    batch, _, queries, keys = shape
    for side, length in (("keys", keys), ("queries", queries)):
        segments = getattr(mask, side)
        if segments is None:
            continue
        check_array(f"{name}.{side}", segments)
        if not (segments.dtype == bool or jnp.issubdtype(segments.dtype, jnp.integer)):
            raise InputError(
                f"{name}.{side} of dtype {segments.dtype} must be segments, whole numbers from 1, "
                "or True; 0 or False is hidden"
            )
        if segments.shape not in ((batch, length), (1, length)):
            raise InputError(
                f"{name}.{side} of shape {segments.shape} must be [batch, {side}] = "
                f"{[batch, length]}"
            )
    if mask.queries is not None and mask.keys is None:
        raise InputError(f"{name} has segments of queries, and needs segments of keys too")
    if mask.causal and queries != keys:
        raise InputError(
            f"{name} is causal, which needs as many queries as keys; here are {queries} queries "
            f"and {keys} keys"
        )


def check_generates(config: TransformerConfig) -> None:
    """Refuse an encoder alone, and a model without token embeddings or output projection."""
    check_decoder(config)
    if not config.generates:
        raise InputError(f"head={config.head!r} scores labels, not tokens: use Classifier")
    for name in ("token_embeddings", "output_projection"):
        if getattr(config, name) == "none":
            raise InputError(f"{name}='none': a model needs them to turn text into text")


def check_text(config: TransformerConfig) -> None:
    """Refuse a model that does not turn text into text."""
    check_generates(config)
    if (width := config.source_features) is not None:
        raise InputError(f"source_features={width}: the model reads sound, not text")


def check_config(config: Any) -> None:
    """Refuse what is not a `TransformerConfig`, whose fields are checked where it is made."""
    if not isinstance(config, TransformerConfig):
        raise InputError(
            f"config of type {type(config).__qualname__} must be a TransformerConfig, for example "
            'TransformerConfig.preset("vaswani2017")'
        )


def check_params(
    params: Any, config: TransformerConfig, method: Literal["encode", "decode"] | None = None
) -> None:
    """Refuse parameters that are not the config's nested dict of arrays.

    Args:
        method: The parts that only the other side reads may be missing; None reads all.
    """
    if isinstance(params, TransformerConfig):
        raise InputError("params is a TransformerConfig: the order is (params, config, ...)")
    check_config(config)
    if isinstance(params, Mapping) and set(params) == {"params"}:
        raise InputError("params has one key, 'params', as flax returns it: give params['params']")
    if not isinstance(params, Mapping):
        raise InputError(
            f"params of type {type(params).__qualname__} must be the nested dict of arrays that "
            "init_params returns"
        )
    by_names = flatten_dict(dict(params))
    if not all(isinstance(name, str) for names in by_names for name in names):
        raise InputError("params must be a nested dict whose keys are all names")
    leaves = {"/".join(names): leaf for names, leaf in by_names.items()}
    for path, leaf in leaves.items():
        check_floats(f"params: {path}", leaf)
    if jax.device_count() > 1 and any(map(_is_on_explicit_axes, leaves.values())):
        raise InputError(
            "params lie on Explicit mesh axes, as jax.make_mesh makes them; use "
            "jax_transformer.make_mesh and parameter_shardings, whose axes are Auto"
        )
    unread = {"encode": TARGET_SIDE, "decode": SOURCE_SIDE}.get(method, ())
    given = {path: leaf.shape for path, leaf in leaves.items() if not path.startswith(unread)}
    expected = parameter_shapes(config)
    added = {path: shape for path, shape in given.items() if is_of_adapter(path)}
    check_adapter({path.replace(BASE, "/"): shape for path, shape in added.items()}, expected)
    given = {path: shape for path, shape in given.items() if path not in added}
    expected = {path: shape for path, shape in expected.items() if not path.startswith(unread)}
    if given != expected:
        raise InputError(_difference(params, given, expected, config))


def check_adapter(adapter: Mapping[str, Shape], base: Mapping[str, Shape]) -> None:
    """Refuse an adapter that does not fit its base model; of each, the shapes of the leaves."""
    for path, found in adapter.items():
        module, _, name = path.rpartition("/")
        changed = f"{module}/kernel" if name in LORA_LEAVES else path
        if (wanted := base.get(changed)) is None:
            raise InputError(f"the adapter has {path}, and the model no {changed}")
        if name in LORA_LEAVES:
            found = [adapter.get(f"{module}/{leaf}") for leaf in LORA_LEAVES]
            rank = (found[0] or (0,))[-1]
            wanted = [(wanted[0], rank), (rank, wanted[1]), ()]
        if found != wanted:
            raise InputError(f"the adapter has {path} in the shapes {found}, not {wanted}")


def _difference(
    params: Mapping[str, Any],
    given: Mapping[str, Shape],
    expected: Mapping[str, Shape],
    config: TransformerConfig,
) -> str:
    """Return what differs first, and the remedy."""
    for stack in params.keys() & set(STACKS):
        layers = sum(LAYER.fullmatch(name) is not None for name in params[stack])
        count = getattr(config, f"num_{stack}_layers")
        if layers != count:
            return (
                f"config.num_{stack}_layers={count}, but the parameters hold {layers} layers of "
                f"the {stack}; use the config that they were made with"
            )
    for path, shape in expected.items():
        if given.get(path) != shape:
            found = given.get(path, "missing")
            return f"params do not fit the config: {path} is {found} and must have shape {shape}"
    extra = next(path for path in given if path not in expected)
    row = find_parameter(extra)
    needs = row.missing_fields(config) if row else {}
    remedy = "".join(f"; {name}={value!r} has it" for name, value in [*needs.items()][:1])
    return f"params do not fit the config: it has no parameter {extra}{remedy}"


def _is_on_explicit_axes(leaf: Any) -> bool:
    """Return whether a parameter brings Explicit axes; copies may where the user has set a mesh."""
    sharding = jax.typeof(leaf).sharding
    if any(sharding.spec):
        return True
    return AxisType.Explicit in sharding.mesh.axis_types and jax.sharding.get_abstract_mesh().empty


def check_execution(execution: Any, kind: type[Execution] = Execution) -> None:
    """Refuse what is not an execution of a kind; its fields are checked where it is made."""
    if not isinstance(execution, kind):
        name = kind.__name__
        raise InputError(
            f"execution={shorten(execution)} must be {'an' if name[0] == 'E' else 'a'} {name}, for "
            f'example {name}.for_platform("cpu")'
        )


def check_parameters(config: TransformerConfig, key: PRNGKeyArray) -> None:
    """Refuse a model whose float32 parameters this machine cannot hold, unless `key` is traced."""
    if not isinstance(key, jax.core.Tracer) and jax.default_backend() == "cpu":
        count = parameter_count(config)
        what = f"a model of d_model={config.d_model} with {count:,} parameters"
        host_memory.check_memory(FLOAT32 * count, what, "choose smaller sizes")


def check_position_table(length: int, d_model: int) -> None:
    """Refuse a table of sinusoids that this machine cannot compute."""
    host_memory.check_memory(
        3 * 8 * length * d_model, f"a table of {length} positions", "set a lower length"
    )


def check_attention(config: TransformerConfig, length: int) -> None:
    """Refuse a length if this machine cannot hold the attention scores of one sequence."""
    if jax.default_backend() == "cpu":
        scores, what = config.num_heads * length**2, f"the attention to max_length={length} tokens"
        host_memory.check_memory(FLOAT32 * scores, what, "set a lower length")


def check_cache(
    config: TransformerConfig,
    batch: int,
    source_length: int,
    max_new_tokens: int,
    beam_size: int,
    bytes_of_a_number: int,
) -> None:
    """Refuse a cache whose slots no int32 counts, or that this machine cannot hold."""
    if is_symbolic_dim(batch) or is_symbolic_dim(source_length):
        return  # a program for any size (`jax.export`) allocates nothing here
    named = f"max_new_tokens={max_new_tokens} with beam_size={beam_size}"
    slots = batch * beam_size * max_new_tokens
    if slots > LARGEST:
        raise InputError(f"{named} and {batch} sources makes {slots} slots, but at most {LARGEST}")
    if jax.default_backend() != "cpu":
        return
    kept = slots if config.decoder_attention in ("self_then_cross", "merged") else 0
    width = config.key_heads * (config.head_dim + config.value_dim) * bytes_of_a_number
    cache = config.num_decoder_layers * width * (kept + batch * source_length)
    remedy = "set fewer tokens, hypotheses or sources"
    host_memory.check_memory(
        cache + 4 * slots, f"the cache for {named} and {batch} sources", remedy
    )
