"""How a program makes vectors of token ids: its tables, their factor, positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.buffers import PositionTable
from jax_transformer.model.functional import rotary_angles, sinusoidal_positions
from jax_transformer.porting.findings import SIDES, Findings
from jax_transformer.porting.graph import Unread
from jax_transformer.porting.operations import LOOK_UPS
from jax_transformer.porting.probe import CLOSE, Elements, Point, Probe, rows_of
from jax_transformer.porting.recording import Call

TABLE_ROUNDING = 1e-3  # of a table of sinusoids in a narrow type
MOST_OFFSET = 64  # of a table of sinusoids
PAIRED = ("sinusoidal", "sinusoidal_halves", "sinusoidal_per_column")  # of an even width


class LookUp(NamedTuple):
    """Where token ids become vectors."""

    call: Call  # the look-up
    ids: np.ndarray  # those that it reads [B, L]; they may be padded
    first: int | None  # the id that the program puts before those that it was given, if it does

    @property
    def root(self) -> int:
        """The key of the vectors."""
        return self.call.outputs[0]


def find_look_up(probe: Probe, key: int, name: str, pad_id: int) -> LookUp:
    """Return the look-up of the source or the target ids; raise `Unread` if there is none."""
    run = probe.run
    of_ids = probe.graph.after([key])
    for call in run.calls:
        if call.name in LOOK_UPS and len(call.reads) == 2 and call.reads[1] in of_ids:
            found = _look_up(probe, call, run.constants[key], pad_id)
            if found is not None:
                return found
    reads = [call for call in run.calls if key in call.reads]
    if not reads:
        raise Unread(f"an encoder or a decoder alone: nothing reads the {name} ids")
    if run.constants[key].dtype.kind not in "iu":
        raise Unread(f"the {name} is no ids but features, which no table has", reads[:1])
    raise Unread(f"no table has a vector for each {name} id", reads)


def _look_up(probe: Probe, call: Call, ids: np.ndarray, pad_id: int) -> LookUp | None:
    index = probe.replay.value(call.reads[1])
    if not probe.weights([], call.reads[0]) or index.ndim != 2 or index.dtype.kind not in "iu":
        return None
    index = index if len(index) == len(ids) else index.T
    more = index.shape[1] - ids.shape[1]
    if len(index) != len(ids) or more < 0:
        return None
    if np.array_equal(index, np.pad(ids, ((0, 0), (0, more)), constant_values=pad_id)):
        return LookUp(call, index, None)
    first = index[:, 0]
    shifted = not more and (first == first[0]).all() and np.array_equal(index[:, 1:], ids[:, :-1])
    return LookUp(call, index, int(first[0])) if shifted else None


def table_of(probe: Probe, look_up: LookUp) -> Elements:
    """Return the elements of the table [V, D] of a look-up; raise `Unread` if it is computed."""
    table = look_up.call.reads[0]
    keys = probe.weights([], table)
    codes = probe.replay.value(table, probe.codes(keys))
    elements = probe.elements(codes, keys) if codes.ndim == 2 else None
    if elements is None:
        raise Unread("the table of the tokens is computed of weights", [look_up.call])
    return elements


def read_tables(
    found: Findings, probe: Probe, source: LookUp, target: LookUp
) -> tuple[Elements, Elements]:
    """Return the elements of both tables; notes their sizes, and whether they are one."""
    tables = table_of(probe, source), table_of(probe, target)
    shared = np.array_equal(tables[0], tables[1])
    found.say("token_embeddings", "shared" if shared else "separate", target.call)
    for table, (stack, name) in zip(tables, SIDES.items(), strict=True):
        found.say(f"{stack} d_model", table.shape[1], name)
        found.say("src_vocab_size" if name == "source" else "tgt_vocab_size", len(table), name)
        found.place(f"{'token' if shared else name}_embedding/embedding", table)
    if target.first is not None:
        found.first_id = target.first
        found.notes.append(
            f"the program itself puts the id {target.first} before the targets, which the model in "
            f"JAX must be given so: {target.call}"
        )
    return tables


def read_embedding(
    found: Findings,
    probe: Probe,
    side: str,
    look_up: LookUp,
    cuts: Sequence[int],
    tokens: np.ndarray,
) -> int:
    """Read the factor and the positions of a side; return the place of the cut behind them.

    Args:
        cuts: Those of the stream, from the look-up to the first sublayer.
        tokens: Which positions [B, L] hold a token.
    """
    at = probe.first_position(look_up.root)
    last = 0
    for place, cut in enumerate(cuts[1:], 1):
        if probe.run.shapes[cut] == probe.run.shapes[look_up.root]:
            if not probe.is_affine([at], Point(cut, at.places)):
                break
            last = place
    end = Point(cuts[last], at.places)
    calls = probe.graph.changing([look_up.root], [end.key])
    weights = probe.drawn(probe.weights([look_up.root], end.key))
    ones = np.ones(len(at.places))
    factors = probe.output([at], end, weights, ones) - probe.output([at], end, weights, 0 * ones)
    factor = float(factors[0])
    if np.abs(factors - factor).max() > CLOSE * abs(factor):
        found.refuse(Unread(f"the {side} embeddings are multiplied by a vector", calls))
    elif abs(factor / len(ones) ** 0.5 - 1) < 1e-6:
        found.say("embedding_scale", "sqrt_d_model", side)
    elif abs(factor - 1) < CLOSE:
        found.say("embedding_scale", "none", side)
    else:
        text = f"the {side} embeddings are multiplied by {factor:.6g}: multiply the table by it"
        found.refuse(Unread(text, calls))
    added = [call for call in calls if call.name in ("add", "add_")]
    zeros = {look_up.root: np.zeros(probe.run.shapes[look_up.root])}
    if added and any(key not in probe.graph.after(zeros) for c in added for key in c.inputs):
        _positions(found, probe, side, look_up.root, end.key, added, tokens)
    else:
        found.say("positions", "none", side)
    return last


def _positions(
    found: Findings,
    probe: Probe,
    side: str,
    root: int,
    end: int,
    calls: Sequence[Call],
    tokens: np.ndarray,
) -> None:
    """Read what is added to the vectors of tokens: a table that is computed, or a learned one."""
    zeros = {root: np.zeros(probe.run.shapes[root])}
    keys = probe.weights(zeros, end)

    def rows(weights: dict[int, np.ndarray]) -> np.ndarray:
        values = probe.replay.value(end, zeros | weights)
        return rows_of(values, np.ones_like(tokens)).reshape(*tokens.shape, -1)

    added = rows({})
    first = added[0]
    if np.abs(added - first)[tokens].max() > TABLE_ROUNDING:
        text = f"what is added to the {side} embeddings depends on the tokens: a third table"
        found.refuse(Unread(text, calls))
        return
    width = first.shape[1]
    kinds = [(kind, 0) for kind in PAIRED if width % 2 == 0]
    kinds += [("sinusoidal_tensor2tensor", n) for n in range(MOST_OFFSET) if width > 3]
    for kind, offset in kinds:
        table = sinusoidal_positions(len(first), width, kind, offset)
        if np.abs(table - first).max() < TABLE_ROUNDING:
            found.say("positions", kind, side)
            found.say("position_offset", offset, side)
            _note_tables(found, probe, keys)
            return
    elements = probe.elements(rows(probe.codes(keys))[0], keys)
    if elements is None:
        made_of = " and ".join(probe.leaves[key].names[0] for key in keys)
        more = f", or a third table, made of {made_of}" if keys else ""
        text = (
            f"positions that no config computes are added to the {side} embeddings"
            f"{_unusual(first)}{more}; with positions='learned', tables can hold what is added"
        )
        found.refuse(Unread(text, calls))
        return
    leaf = probe.leaf_of(elements)
    begin = probe.first[leaf.key]
    offset = int(elements[0, 0] - begin) // width
    table = begin + np.arange(math.prod(leaf.shape)).reshape(-1, width)
    if not np.array_equal(table[offset : offset + len(elements)], elements):
        found.refuse(Unread(f"positions of {leaf.names[0]} are read in another order", calls))
        return
    found.say("positions", "learned", side)
    found.say("position_offset", offset, side)
    found.say("max_length", len(table) - offset, leaf.names[0])
    found.place(f"{side}_positions/embedding", table)


def _unusual(first: np.ndarray) -> str:
    """Return what sinusoids these positions [L, D] are, in words."""
    length, width = first.shape
    for kind in PAIRED if width % 2 == 0 else ():
        table = sinusoidal_positions(length + 4, width, kind)
        for begin in range(1, 4):
            if np.abs(table[begin : begin + length] - first).max() < TABLE_ROUNDING:
                return f", positions from {begin}"
        factor = (table[:length] * first).sum() / (table[:length] ** 2).sum()
        if np.abs(factor * table[:length] - first).max() < TABLE_ROUNDING:
            return f", sinusoids times {factor:.6g}"
    angle = np.arctan2(first[1, 2], first[1, 3]) if width > 3 else 0
    if angle > 0 and width % 2 == 0:
        base = angle ** (-width / 2)
        angles = np.arange(length)[:, None] / base ** (np.arange(0, width, 2) / width)
        table = np.stack([np.sin(angles), np.cos(angles)], -1).reshape(length, width)
        if np.abs(table - first).max() < TABLE_ROUNDING:
            return f", sinusoids with {base:,.0f} in place of 10,000"
    return ""


def _note_tables(found: Findings, probe: Probe, keys: Sequence[int]) -> None:
    """Note the weights and buffers that hold sinusoids."""
    for leaf in (probe.leaves[key] for key in keys):
        long = [axis for axis, size in enumerate(leaf.shape) if size != 1 or axis > 1]
        if len(long) == 2:
            axes: list[int | str] = [1] * len(leaf.shape)
            axes[long[0]], axes[long[1]] = "length", "d_model"
            length = leaf.shape[long[0]]
            found.say("max_length", length, leaf.names[0])
            found.tables |= dict.fromkeys(leaf.names, PositionTable(tuple(axes), length))


def exact_numbers(probe: Probe, config: TransformerConfig) -> dict[int, np.ndarray]:
    """Return the exact numbers of what a program may hold in a narrow type, by key.

    These are sqrt(d_model), tables of sinusoids, in which the row of padding may be 0, and the
    frequencies of rotary positions.
    """
    width, kind = config.d_model, config.positions
    known = [np.array([size**0.5]) for size in (width, config.stack("encoder").d_model)]
    if kind == "rotary":
        columns = config.rotated_columns
        known.append(rotary_angles(2, columns, config.rotary_theta, config.rotary_scaling)[1])
        if config.sliding_window_theta:
            known.append(rotary_angles(2, columns, config.sliding_window_theta)[1])
    constants = [key for key, array in probe.run.constants.items() if array.dtype.kind not in "iub"]
    found = {}
    for key in (*probe.leaves, *constants):
        tensor = probe.replay.known[key]
        shape, size = tuple(tensor.shape), tensor.numel()
        near = [
            exact
            for exact in known
            if size == exact.size
            and np.abs(tensor.double().numpy().reshape(-1) / exact - 1).max() < TABLE_ROUNDING
        ]
        if near:
            found[key] = near[0].reshape(shape)
        elif kind.startswith("sinusoidal") and size % width == 0 and size > 2 * width:
            rows = tensor.reshape(-1, width)
            some, begin = rows[1:3].double().numpy(), sinusoidal_positions(3, width, kind)[1:]
            if np.abs(begin - some)[some.any(1)].max(initial=0) < TABLE_ROUNDING:
                table = rows.double().numpy()
                exact = np.where(
                    table.any(1)[:, None], sinusoidal_positions(len(table), width, kind), 0
                )
                if np.abs(exact - table).max() < TABLE_ROUNDING:
                    found[key] = exact.reshape(shape)
    return found
