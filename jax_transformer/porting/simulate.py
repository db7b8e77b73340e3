"""A hypothesis beside a record: the first place where their numbers differ.

The blocks are those of `torch_reference`, run on views of the foreign tensors. Where the program's
own output of a layer is recorded, the next layer reads that one: an error stays in its layer, and
what follows the first difference is not computed.
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.table import Row
from jax_transformer.porting.hypothesis import Hypothesis
from jax_transformer.porting.record import output_kind
from jax_transformer.storage.weights.arrays import as_torch
from torch_reference import functional
from torch_reference.layers import EncoderLayer, Norm, RelativeAttentionBias
from torch_reference.self_over_memory import decoder_layer

if TYPE_CHECKING:
    from jax_transformer.porting.record import Batch, Record

BOUND = 1e-5  # the largest error that rounding causes
MOST_TOKENS = 500  # whose logits are compared


class Point(NamedTuple):
    """A place of a batch, as "encoder.layers.0 of batch 1", where a hypothesis and a record meet.

    Attributes:
        error: max|ours - theirs| / max(1, max|theirs|).
        distance: |ours - theirs| / |theirs|, of the Euclidean norms: how far off it is.
    """

    name: str
    error: float
    distance: float


class Fit(NamedTuple):
    """The places compared, in order; none differs in a complete fit, else the last."""

    points: tuple[Point, ...]
    complete: bool

    @property
    def error(self) -> float:
        """The largest error."""
        return max(point.error for point in self.points)

    @property
    def score(self) -> tuple[int, float]:
        """Larger is better: the places that agree, then the distance at the first other one."""
        last = self.points[-1]
        return (len(self.points) - (not self.complete), -last.distance)


class Tensors:
    """Foreign tensors as float64 torch tensors, read through rows without a copy."""

    def __init__(self, tensors: Mapping[str, np.ndarray]) -> None:
        self._tensors = {name: as_torch(array) for name, array in tensors.items()}
        self._wide: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._wide:
            self._wide[name] = self._tensors[name].to(torch.float64)
        return self._wide[name]

    def parameters(self, hypothesis: Hypothesis) -> dict[str, Tensor]:
        """Return the parameters of `torch_reference` that a hypothesis reads, by name."""
        config = hypothesis.config
        counts = {"encoder": config.num_encoder_layers, "decoder": config.num_decoder_layers}
        named: dict[str, Tensor] = {}
        for row in hypothesis.rows:
            repeated = "{i}" in row.foreign
            for index in range(counts[row.paths[0].partition("/")[0]]) if repeated else (0,):
                foreign = self[row.foreign.replace("{i}", str(index))]
                parts = _parts(foreign, row, config)
                for path, part in zip(row.paths, parts, strict=True):
                    name, value = _reference(path.replace("{i}", str(index)), part, row, config)
                    named.setdefault(name, value)
        return named


def _parts(foreign: Tensor, row: Row, config: TransformerConfig) -> tuple[Tensor, ...]:
    """Return the parts of a foreign tensor, one for each parameter."""
    count = len(row.paths)
    if count == 1:
        return (foreign,)
    if row.stack == "heads":
        parts = foreign.unflatten(0, (config.num_heads, count, -1)).unbind(1)
        return tuple(part.flatten(0, 1) for part in parts)
    return foreign.chunk(count, dim=-1 if row.stack == "columns" else 0)


def _reference(path: str, part: Tensor, row: Row, config: TransformerConfig) -> tuple[str, Tensor]:
    """Return the name and the value of a parameter in `torch_reference`."""
    module, _, leaf = path.replace("layers_", "layers.").replace("/", ".").rpartition(".")
    if leaf == "bias":
        return f"{module}.bias", part.reshape(-1)
    if leaf == "scale":
        return f"{module}.weight", part
    if leaf == "embedding":
        return f"{module}.weight", part.reshape(-1, part.shape[-1])
    if part.dim() == 3:  # the heads are one of the axes
        part = part.flatten(1) if part.shape[0] == config.d_model else part.flatten(0, 1)
    return f"{module}.weight", part if row.operation.transposed else part.T


def simulate(
    tensors: Tensors,
    hypothesis: Hypothesis,
    record: Record,
    taps: Mapping[str, str],
    *,
    only: str | None = None,
) -> Fit:
    """Return how far a hypothesis follows a record.

    `taps` are the program's modules by our names of layers. With `only`, the name of a place, this
    place alone is compared, and layers whose recorded output is known are not computed.
    """
    points: list[Point] = []
    parameters = tensors.parameters(hypothesis)
    with torch.inference_mode():
        for number, batch in enumerate(record.batches):
            place = only
            if only is not None:
                place, _, own = only.partition(" of batch ")
                if int(own) != number:
                    continue
            for point in _run(parameters, hypothesis, batch, record.pad_id, taps, place):
                points.append(point._replace(name=f"{point.name} of batch {number}"))
                if not point.error <= BOUND:
                    return Fit(tuple(points), complete=False)
    return Fit(tuple(points), complete=True)


def _run(
    parameters: Mapping[str, Tensor],
    hypothesis: Hypothesis,
    batch: Batch,
    pad_id: int | None,
    taps: Mapping[str, str],
    only: str | None,
) -> Iterator[Point]:
    """Yield the places of one batch in the order of execution, or only one."""
    config, masks = hypothesis.config, hypothesis.masks
    src, tgt = _tokens(batch.src), _tokens(batch.tgt)
    src_kept, tgt_kept = _kept(batch.src, pad_id), _kept(batch.tgt, pad_id)
    if batch.tgt.ndim == 2 and config.bos_id == config.pad_id:
        tgt_kept[:, 0] = True  # BOS is no padding
    seen = src_kept[:, None, None, :]
    everywhere = torch.ones_like(seen)
    encoder_mask = seen if masks.source in ("encoder and decoder", "encoder") else everywhere
    memory_mask = seen if masks.source in ("encoder and decoder", "decoder") else everywhere
    length = tgt.shape[1]
    tgt_mask = torch.ones(1, 1, length, length, dtype=torch.bool)
    tgt_mask = tgt_mask.tril() if masks.causal else tgt_mask
    if masks.target:
        tgt_mask = tgt_mask & tgt_kept[:, None, None, :]

    def stack(
        side: str, kind: type[nn.Module], x: Tensor, kept: Tensor, *others: Tensor
    ) -> Generator[Point, None, Tensor]:
        """Yield the places of a stack's layers, and return its output."""
        bias = None
        if config.has_shared_relative_bias:
            table = RelativeAttentionBias(config, bidirectional=side == "encoder")
            own = _under(parameters, f"{side}.relative_attention_bias")
            bias = functional_call(table, own, (x.shape[1], x.shape[1]))
        for index in range(getattr(config, f"num_{side}_layers")):
            name = f"{side}.layers.{index}"
            theirs = _tap(batch, taps.get(name), x)
            if theirs is None or only in (None, name):
                layer = _module(kind, config), _under(parameters, name)
                x = functional_call(*layer, (x, *others, bias))
            if theirs is not None:
                if only in (None, name):
                    yield _compare(name, x, theirs, kept)
                x = theirs
        return _norm(parameters, config, f"{side}.norm", x)

    memory = _embed(parameters, config, src, "source")
    memory = yield from stack("encoder", EncoderLayer, memory, src_kept, encoder_mask)
    tgt_kept = tgt_kept & src_kept.any(1, keepdim=True)  # without a source, programs differ
    x = _embed(parameters, config, tgt, "target")
    x = yield from stack(
        "decoder", decoder_layer(config), x, tgt_kept, memory, tgt_mask, memory_mask
    )
    if only in (None, "logits"):
        yield _compare_output(parameters, config, x, batch.output, tgt_kept)


def _compare(name: str, ours: Tensor, theirs: Tensor, kept: Tensor) -> Point:
    """Return the point of two streams [B, L, D], at the positions that hold tokens."""
    if ours.shape != theirs.shape:
        return Point(name, np.inf, np.inf)
    ours, theirs = ours[kept], theirs[kept]
    difference = (ours - theirs).abs()
    error = float(difference.max() / theirs.abs().max().clamp(min=1))
    distance = float(difference.norm() / theirs.norm().clamp(min=1e-30))
    return Point(name, error, distance) if np.isfinite(error) else Point(name, np.inf, np.inf)


def _compare_output(
    parameters: Mapping[str, Tensor],
    config: TransformerConfig,
    x: Tensor,
    output: np.ndarray,
    kept: Tensor,
) -> Point:
    """Return the point of the logits of hidden states [B, T, D], for some tokens of many."""
    vocabulary = output.shape[-1]
    columns = torch.arange(0, vocabulary, max(1, vocabulary // MOST_TOKENS))
    theirs = torch.from_numpy(np.asarray(output, np.float64)[..., columns])
    ours = _project(parameters, config, x, columns)
    kind = output_kind(output[kept.numpy()])
    if ours.shape == theirs.shape and kind != "logits":
        # A softmax is known up to a constant of each position.
        theirs = theirs.log() if kind == "softmax" else theirs
        ours, theirs = (y - y.mean(-1, keepdim=True) for y in (ours, theirs))
    return _compare("logits", ours, theirs, kept)


def _tap(batch: Batch, name: str | None, ours: Tensor) -> Tensor | None:
    """Return the program's output of a layer as [B, L, D], or None where it has none."""
    block = batch.blocks.get(name) if name is not None else None
    if block is None or block.shape != tuple(ours.shape) or not np.isfinite(block).all():
        return None
    return torch.from_numpy(np.asarray(block, np.float64))


def _tokens(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(array, np.int64 if array.ndim == 2 else np.float64))


def _kept(tokens: np.ndarray, pad_id: int | None) -> Tensor:
    """Return which positions [B, L] hold a token."""
    if tokens.ndim != 2 or pad_id is None:
        return torch.ones(tokens.shape[:2], dtype=torch.bool)
    return torch.from_numpy(np.array(tokens != pad_id))


def _embed(
    parameters: Mapping[str, Tensor], config: TransformerConfig, tokens: Tensor, side: str
) -> Tensor:
    """Return what enters a stack [B, L, D]."""
    x = tokens
    if config.token_embeddings != "none":
        name = "token" if config.token_embeddings == "shared" else side
        x = nn.functional.embedding(tokens, parameters[f"{name}_embedding.weight"])
        if config.embedding_scale == "sqrt_d_model":
            x = x * config.d_model**0.5
    length, offset = x.shape[1], config.position_offset
    if config.positions == "learned":
        x = x + parameters[f"{side}_positions.weight"][offset : offset + length]
    elif config.has_position_table:
        x = x + functional.sinusoidal_positions(length, config.d_model, config.positions, offset)
    return _norm(parameters, config, f"{side}_embedding_norm", x)


def _norm(
    parameters: Mapping[str, Tensor], config: TransformerConfig, name: str, x: Tensor
) -> Tensor:
    if f"{name}.weight" not in parameters:
        return x
    return functional_call(_module(Norm, config), _under(parameters, name), (x,))


def _project(
    parameters: Mapping[str, Tensor], config: TransformerConfig, x: Tensor, columns: Tensor
) -> Tensor:
    """Return the logits of some tokens."""
    if config.output_projection == "none":
        return x[..., columns]
    if config.output_scale == "inverse_sqrt_d_model":
        x = x * config.d_model**-0.5
    table = "token" if config.token_embeddings == "shared" else "target"
    tied = config.output_projection == "tied"
    weight = parameters[f"{table}_embedding.weight" if tied else "output_projection.weight"]
    bias = parameters.get("output_projection.bias")
    return nn.functional.linear(x, weight[columns], None if bias is None else bias[columns])


def _under(parameters: Mapping[str, Tensor], module: str) -> dict[str, Tensor]:
    inside = f"{module}."
    return {
        name.removeprefix(inside): value
        for name, value in parameters.items()
        if name.startswith(inside)
    }


@functools.lru_cache(maxsize=256)
def _module(kind: type[nn.Module], config: TransformerConfig) -> nn.Module:
    """Return a block without memory for its parameters, which a call hands in."""
    with torch.device("meta"):
        return kind(config).eval()
