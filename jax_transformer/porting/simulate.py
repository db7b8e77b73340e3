"""A hypothesis beside a record: the first place where their numbers differ.

The blocks are those of `torch_reference`, run on views of the foreign tensors. Where the program's
own output of a layer is recorded, the next layer reads that one: an error stays in its layer, and
what follows the first difference is not computed.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.table import Masks, Row
from jax_transformer.porting.hypothesis import Hypothesis
from jax_transformer.porting.names import without_window
from jax_transformer.porting.outside import Outside, embed, install, score
from jax_transformer.porting.record import EXACT, ROUGH, ROUNDED, output_kind
from jax_transformer.storage.weights.arrays import as_torch
from torch_reference import Transformer, functional
from torch_reference.model import of_layers

if TYPE_CHECKING:
    from jax_transformer.porting.record import Batch, Record

MOST_TOKENS = 500  # whose logits are compared
LAYER = re.compile(r"(\w+\.layers\.\d+)\.(.+)")
LAST = re.compile(r"(.+)\.(output|outer)\.(weight|bias)")  # of the last product of a sublayer


class Point(NamedTuple):
    """A place of a batch, as "encoder.layers.0 of batch 1", where a hypothesis and a record meet.

    Attributes:
        error: max|ours - theirs| / max(1, max|theirs|).
        distance: |ours - theirs| / |theirs|, of the Euclidean norms: how far off it is.
        bound: The largest error of a right answer there.
    """

    name: str
    error: float
    distance: float
    bound: float = ROUGH

    @property
    def agrees(self) -> bool:
        """Whether the hypothesis is right up to this place."""
        return self.error <= self.bound


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
        self._tensors = {
            name: as_torch(array.reshape(without_window(array.shape))).to(torch.float64)
            for name, array in tensors.items()
        }
        self._read: dict[tuple[Row, int], dict[str, Tensor]] = {}  # by row and number of heads

    def parameters(self, hypothesis: Hypothesis) -> dict[str, Tensor]:
        """Return the parameters of `torch_reference` that a hypothesis reads, by name."""
        named: dict[str, Tensor] = {}
        for row in hypothesis.rows:
            key = (row, hypothesis.config.num_heads)
            if key not in self._read:
                self._read[key] = dict(self._parameters(row, hypothesis.config))
            named |= self._read[key]
        return named

    def number(self, name: str) -> float:
        """Return the number that a tensor holds."""
        return self._tensors[name].item()

    def _parameters(self, row: Row, config: TransformerConfig) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the value of each parameter in `torch_reference` that a row holds."""
        counts = {"encoder": config.num_encoder_layers, "decoder": config.num_decoder_layers}
        repeated = "{i}" in row.foreign
        for index in range(counts[row.paths[0].partition("/")[0]]) if repeated else (0,):
            foreign = self._tensors[row.foreign.replace("{i}", str(index))]
            parts = _parts(foreign, row, config.num_heads)
            for path, part in zip(row.paths, parts, strict=True):
                yield _reference(path.replace("{i}", str(index)), part, row, config.d_model)


def _parts(foreign: Tensor, row: Row, num_heads: int) -> tuple[Tensor, ...]:
    """Return the parts of a foreign tensor, one for each parameter."""
    count = len(row.paths)
    if count == 1:
        return (foreign,)
    if row.stack == "copies":
        return (foreign,) * count
    if row.stack == "heads":
        parts = foreign.unflatten(0, (num_heads, count, -1)).unbind(1)
        return tuple(part.flatten(0, 1) for part in parts)
    return foreign.chunk(count, dim=-1 if row.stack == "columns" else 0)


def _reference(path: str, part: Tensor, row: Row, d_model: int) -> tuple[str, Tensor]:
    """Return the name and the value of a parameter in `torch_reference`."""
    module, _, leaf = path.replace("layers_", "layers.").replace("/", ".").rpartition(".")
    if leaf == "bias":
        return f"{module}.bias", part.reshape(-1)
    if leaf == "scale":
        return f"{module}.weight", part
    if leaf == "embedding":
        return f"{module}.weight", part.reshape(-1, part.shape[-1])
    if part.dim() == 3:  # the heads are one of the axes
        part = part.flatten(1) if part.shape[0] == d_model else part.flatten(0, 1)
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
    outside = hypothesis.outside or Outside("")
    run = _run_of(hypothesis.config, outside)
    others: dict[str, Tensor] = {}
    layers: dict[str, dict[str, Tensor]] = {}  # the parameters of each layer
    learned = {block: tensors.number(name) for block, name in outside.learned}
    for name, value in tensors.parameters(hypothesis).items():
        if outside.word == "scaled sublayers" and (match := LAST.fullmatch(name)):
            value = value * learned.get(match[1], outside.number)
        if match := LAYER.match(name):
            layers.setdefault(match[1], {})[match[2]] = value
        else:
            others[f"model.{name}"] = value
    place, _, chosen = (only or "").partition(" of batch ")
    with torch.inference_mode():
        for number, batch in enumerate(record.batches):
            if chosen and int(chosen) != number:
                continue
            arguments = (layers, batch, hypothesis.masks, record.pad_id, taps, place)
            points += [
                point._replace(name=f"{point.name} of batch {number}")
                for point in functional_call(run, others, arguments)
            ]
            if not points[-1].agrees:
                return Fit(tuple(points), complete=False)
    return Fit(tuple(points), complete=True)


@functools.lru_cache(maxsize=256)
def _run_of(config: TransformerConfig, outside: Outside) -> _Run:
    """Return the model without memory for its parameters, which a call hands in."""
    with torch.device("meta"):
        return _Run(config, outside).eval()


class _Run(nn.Module):
    """The model layer by layer, each beside the record; all layers of a stack share a module."""

    def __init__(self, config: TransformerConfig, outside: Outside) -> None:
        super().__init__()
        self.config, self.outside = config, outside
        single = dataclasses.replace(config, num_encoder_layers=1, num_decoder_layers=1)
        self.model = Transformer(single)
        install(self.model, outside)

    def forward(self, *arguments: object) -> list[Point]:
        """Return the places of one batch up to the first that differs; arguments as `_places`."""
        points = []
        for point in self._places(*arguments):
            points.append(point)
            if not point.agrees:
                break
        return points

    def _places(
        self,
        layers: Mapping[str, Mapping[str, Tensor]],
        batch: Batch,
        masks: Masks,
        pad_id: int | None,
        taps: Mapping[str, str],
        only: str,
    ) -> Iterator[Point]:
        """Yield the places of one batch in the order of execution, or `only` one."""
        config, word = self.model.config, self.outside.word
        if word == "shifted targets" and batch.tgt.ndim == 2:
            first = int(self.outside.number) % config.tgt_vocab_size
            shifted = np.pad(batch.tgt[:, :-1], ((0, 0), (1, 0)), constant_values=first)
            config, batch = dataclasses.replace(config, bos_id=first), batch._replace(tgt=shifted)
        source, target = batch.compared(pad_id, config)
        encoder_mask, memory_mask, target_mask = map(
            torch.from_numpy, batch.masks(masks, pad_id, config.bos_id)
        )

        x, stack = self._embed(batch.src, "source"), (layers, batch, taps, only)
        bounds = _bound(config, batch, True), _bound(config, batch, False)
        encoder = ("encoder", x, source, [(encoder_mask,)], bounds)
        outputs, bound = yield from self._stack(*encoder, *stack)
        memories = outputs if word == "memory by layers" else outputs[-1:]
        others = [(target_mask, memory, memory_mask) for memory in memories]
        x = self._embed(batch.tgt, "target")
        decoder = ("decoder", x, target, others, (bounds[0], bound))
        (*_, x), bound = yield from self._stack(*decoder, *stack)
        if only in ("", "logits"):
            point = self._compare_output(x, batch.output, target)
            yield point._replace(bound=bound)

    def _stack(
        self,
        side: str,
        x: Tensor,
        visible: np.ndarray,
        others: Sequence[tuple[Tensor, ...]],
        bounds: tuple[float, float],
        layers: Mapping[str, Mapping[str, Tensor]],
        batch: Batch,
        taps: Mapping[str, str],
        only: str,
    ) -> Generator[Point, None, tuple[list[Tensor], float]]:
        """Yield the places of a stack's layers; return their outputs, and the stack's last.

        Also returned is the bound of what reads the last one. `bounds` are those of what reads the
        embeddings and of what reads the program's own outputs. `others` is what each layer reads
        beside `x`, the mask of its self-attention first; the last serves the layers behind it too.
        """
        part, bias, outputs = getattr(self.model, side), None, []
        if self.model.config.has_shared_relative_bias:
            bias = part.relative_attention_bias(x.shape[1], x.shape[1])
        all_own = of_layers(self.config, side, others[0][0], x.shape[1])
        for index, (own, angles) in enumerate(all_own):
            name = f"{side}.layers.{index}"
            theirs = _tap(batch, taps.get(name), x)
            if theirs is None or only in ("", name):
                _, *other = others[min(index, len(others) - 1)]
                given = (x, *other[:1], own, *other[1:], bias, angles)
                x = functional_call(part.layers[0], layers[name], given)
            if theirs is not None:
                if only in ("", name):
                    yield _compare(name, x, theirs, visible)._replace(bound=bounds[0])
                x, bounds = theirs, (bounds[1], bounds[1])
            outputs.append(x)
        return [*outputs, part.norm(x)], bounds[0]

    def _embed(self, tokens: np.ndarray, side: str) -> Tensor:
        """Return what enters a stack [B, L, D]."""
        wide = torch.from_numpy(tokens.astype(np.int64 if tokens.ndim == 2 else np.float64))
        x = embed(self.model, wide, side, self.outside)
        norm = getattr(self.model, f"{side}_embedding_norm", None)
        return x if norm is None else norm(x)

    def _compare_output(self, x: Tensor, output: np.ndarray, visible: np.ndarray) -> Point:
        """Return the point of the logits of hidden states [B, T, D], for some tokens of many."""
        config, vocabulary = self.model.config, output.shape[-1]
        columns = torch.arange(0, vocabulary, max(1, vocabulary // MOST_TOKENS))
        theirs = torch.from_numpy(np.asarray(output, np.float64)[..., columns])
        if config.output_scale == "inverse_sqrt_d_model":
            x = x * config.d_model**-0.5
        if config.output_projection == "none":
            ours = x[..., columns]
        else:
            project = self.model.output_projection
            table = "token" if config.token_embeddings == "shared" else "target"
            weight = project.weight
            if weight is None:
                weight = getattr(self.model, f"{table}_embedding").weight
            bias = None if project.bias is None else project.bias[columns]
            ours = score(nn.functional.linear(x, weight[columns], bias), self.outside)
            ours = functional.soft_cap(ours, config.logit_softcap)
        kind = output_kind(output[visible])
        if ours.shape == theirs.shape and kind != "logits":
            # A softmax is known up to a constant of each position.
            theirs = theirs.log() if kind == "softmax" else theirs
            ours, theirs = (y - y.mean(-1, keepdim=True) for y in (ours, theirs))
        return _compare("logits", ours, theirs, visible)


def _bound(config: TransformerConfig, batch: Batch, embeds: bool) -> float:
    """Return the largest error of a right answer; `embeds`: of what reads the embeddings."""
    if batch.output.dtype != np.float64:
        return ROUGH
    # A program of float64 may hold a table of positions or the scale of the embeddings in float32:
    # what reads the embeddings shows it. The scale of attention shows where several tokens meet;
    # RMS norms often compute in float32. Another norm or activation shows everywhere.
    several = max(batch.src.shape[1], batch.tgt.shape[1]) > 1
    return ROUNDED if embeds or several or config.norm.endswith("rms_norm") else EXACT


def _compare(name: str, ours: Tensor, theirs: Tensor, visible: np.ndarray) -> Point:
    """Return the point of two streams [B, L, D], at the positions that hold tokens."""
    if ours.shape != theirs.shape:
        return Point(name, np.inf, np.inf)
    ours, theirs = ours[visible], theirs[visible]
    difference = (ours - theirs).abs()
    error = float(difference.max() / theirs.abs().max().clamp(min=1))
    distance = float(difference.norm() / theirs.norm().clamp(min=1e-30))
    return Point(name, error, distance) if np.isfinite(error) else Point(name, np.inf, np.inf)


def _tap(batch: Batch, name: str | None, ours: Tensor) -> Tensor | None:
    """Return the program's output of a layer as [B, L, D], or None where it has none."""
    block = batch.blocks.get(name) if name is not None else None
    if block is None or block.shape != tuple(ours.shape) or not np.isfinite(block).all():
        return None
    return torch.from_numpy(np.asarray(block, np.float64))
