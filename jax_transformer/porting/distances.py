"""Which keys an attention hides, and what it adds to scores by the distance of query and key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from jax_transformer.model.functional import relative_position_buckets
from jax_transformer.porting.findings import Findings
from jax_transformer.porting.graph import Unread
from jax_transformer.porting.probe import CLOSE, Elements, Probe
from jax_transformer.porting.recording import Run
from jax_transformer.porting.sublayers import Attention, Core, added_to_scores, visible

FARTHEST = 4096  # distances with a bucket of their own that are tried


class Site(NamedTuple):
    """An attention of a run, and the same one in the longest run."""

    stack: str  # "encoder" or "decoder"
    layer: str  # its path
    kind: str  # "self_attention" or "cross_attention"
    attention: Attention
    far: Attention | None  # in the longest run; None where this executes other operations


def twin(run: Run, other: Run, attention: Attention) -> Attention | None:
    """Return an attention in another run that executed the same operations; None if it did not."""
    if [call.operation for call in run.calls] != [call.operation for call in other.calls]:
        return None
    keys: dict[int, int] = {}
    for one, two in zip(run.calls, other.calls, strict=True):
        keys |= dict(zip(one.outputs, two.outputs, strict=True))
    cores = [
        Core._make([*(keys[key] for key in core[:-1]), core.calls]) for core in attention.cores
    ]
    return attention._replace(cores=tuple(cores))


def read_mask(
    found: Findings, probe: Probe, longest: Probe, site: Site, tokens: Mapping[str, np.ndarray]
) -> None:
    """Read which keys an attention hides: those of padding, later ones, far ones.

    Args:
        probe: Of the run that is read; `longest` of the longest one.
        tokens: Which positions hold a token [B, L], by stack.
    """
    seen, stack = visible(probe, site.attention), site.stack
    core = site.attention.cores[0]
    calls = probe.graph.changing([core.product], [core.logits])[-1:] or core.calls[:1]
    unread = Unread("keys are hidden in a way that no config has", calls)
    queries = tokens[stack]
    keys = (tokens["encoder"] if site.kind == "cross_attention" else queries)[:, : seen.shape[-1]]
    if (seen != seen[:, :1]).any():
        raise Unread("heads hide different keys", calls)
    pattern = seen[0, 0][np.ix_(queries[0], keys[0])]  # no padding but that of the program
    place = np.arange(seen.shape[-1])
    allowed, shown = np.ones(seen.shape[-2:], bool), None
    if site.kind == "self_attention":
        shown = _distances(pattern)
        if shown is None:
            raise unread
        allowed = np.isin(place - place[:, None], shown)
    elif not pattern.all():
        raise unread
    padded = allowed & keys[:, None]
    rows = queries & padded.any(-1)
    hides_padding = bool((seen[:, 0] == padded)[rows].all())
    if not hides_padding and not (seen[:, 0] == allowed)[rows].all():
        raise unread
    name = "memory" if site.kind == "cross_attention" else stack.replace("decoder", "target")
    found.say(f"mask {name}", hides_padding, stack)
    if shown is None:
        return
    length = len(pattern)
    if site.far is not None:
        length = (longest.run.src if stack == "encoder" else longest.run.tgt).shape[1]
        shown = _distances(visible(longest, site.far)[0, 0, :length, :length])
    if not shown or shown != [*range(min(shown), max(shown) + 1)] or 0 not in shown:
        raise unread
    earlier, later = (None if reach == length - 1 else reach for reach in (-min(shown), max(shown)))
    if stack == "decoder":
        found.say("mask causal", later == 0, stack)
    elif later == 0:
        raise Unread("the encoder hides later positions", calls)
    found.windows[stack].append((earlier, later))
    found.window_calls += calls if earlier is not None else ()


def _distances(pattern: np.ndarray) -> list[int] | None:
    """Return the distances of key and query at which a key is seen; None if it takes more."""
    place = np.arange(len(pattern))
    away = place - place[:, None]
    by_distance = {int(d): pattern[away == d] for d in np.unique(away)}
    if any(row.any() != row.all() for row in by_distance.values()):
        return None
    return [d for d, row in by_distance.items() if row.all()]


def read_bias(found: Findings, probe: Probe, longest: Probe, site: Site) -> None:
    """Read what is added to the scores: nothing, or a table of weights by distance."""
    core = site.attention.cores[0]
    calls = probe.graph.changing([core.product], [core.logits])
    elements, numbers = added_to_scores(probe, site.attention)
    if np.abs(numbers - numbers.flat[0]).max() > CLOSE:
        raise Unread("numbers that no weight has are added to the scores", calls)
    found.say(f"{site.kind} bias", elements is not None, site.stack)
    if elements is None:
        return
    if site.kind == "cross_attention":
        raise Unread("a table of weights is added to the scores of a cross-attention", calls)
    leaf = probe.leaf_of(elements.max(keepdims=True))
    heads, size = len(elements), math.prod(leaf.shape)
    count = size // heads
    table = probe.first[leaf.key] + np.arange(size)
    by_heads = heads > 1 and elements[1].max() - elements[0].max() == count
    table = table.reshape(heads, count).T if by_heads else table.reshape(count, heads)
    seen, rows = elements[0] >= 0, _rows(table, elements[0])
    if not np.array_equal(np.where(seen, table[rows].transpose(2, 0, 1), -1), elements):
        raise Unread(f"{leaf.names[0]} is no table by distance", calls)
    if site.far is not None:
        far, _ = added_to_scores(longest, site.far)
        moved = next(key for key, other in longest.leaves.items() if other.names == leaf.names)
        seen = far[0] >= 0
        rows = _rows(table, far[0] - longest.first[moved] + probe.first[leaf.key])
    away = np.arange(seen.shape[1]) - np.arange(seen.shape[0])[:, None]
    distances, first = np.unique(away[seen], return_index=True)
    buckets = rows[seen][first]
    fits = [
        far
        for far in range(count // 2 + 1, FARTHEST)
        if np.array_equal(
            relative_position_buckets(distances, count, far, site.stack == "encoder"), buckets
        )
    ]
    if not fits or (buckets[np.searchsorted(distances, away[seen])] != rows[seen]).any():
        raise Unread(f"distances are put into other buckets of {leaf.names[0]}", calls)
    found.say("relative_attention_num_buckets", count, site.stack)
    found.farthest = max(found.farthest[0], fits[0]), min(found.farthest[1], fits[-1])
    found.relative[site.stack].append((site.layer, table))


def _rows(table: Elements, elements: Elements) -> np.ndarray:
    """Return the row of a table [buckets, H] in which each element of the first head is."""
    return np.minimum(np.searchsorted(table[:, 0], elements), len(table) - 1)
