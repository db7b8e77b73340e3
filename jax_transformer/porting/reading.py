"""Reads a run of an unknown program: what it computes in the words of a config, and with what.

The values through which every path from an embedding to the logits goes cut a program into
sublayers; between them are norms. No name of a module or of a weight is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from jax_transformer.porting.distances import Site, read_bias, read_mask, twin
from jax_transformer.porting.embeddings import LookUp, find_look_up, read_embedding, read_tables
from jax_transformer.porting.findings import SIDES, Findings
from jax_transformer.porting.graph import Unread
from jax_transformer.porting.operations import MOVES
from jax_transformer.porting.probe import CLOSE, Affine, Elements, Norm, Point, Probe, capped
from jax_transformer.porting.recording import Call
from jax_transformer.porting.sublayers import (
    Attention,
    Network,
    affine_points,
    no_product,
    read_affine,
    read_attention,
    read_network,
    scores_of,
)

PATTERNS = {
    "encoder": ("self_attention", "feed_forward"),
    "decoder": ("self_attention", "cross_attention", "feed_forward"),
}
ONE_BEHIND_THE_OTHER = "a config's cross-attention reads what the self-attention was added to"


class Sublayer(NamedTuple):
    """A sublayer between two cuts of a stream: what it adds, and its norms."""

    join: Call  # the addition
    kind: str  # "self_attention", "cross_attention" or "feed_forward"
    read: Attention | Network
    before: Norm | None  # of its input
    behind: Norm | None  # of what it adds
    memory_norm: Norm | None
    after: Sequence[Norm] = ()  # behind the addition
    added: Elements | None = None  # a vector that is added behind the addition


def read_run(probe: Probe, longest: Probe, pad_id: int) -> Findings:
    """Return all that a run says, and all that no config has.

    Args:
        longest: The longest run, which shows windows and buckets of distances.
    """
    reader = _Reader(probe, longest, pad_id)
    with reader.found.refusing():
        reader.model()
    return reader.found


class _Reader:
    def __init__(self, probe: Probe, longest: Probe, pad_id: int) -> None:
        self.probe, self.graph, self.run = probe, probe.graph, probe.run
        self.longest, self.pad_id = longest, pad_id
        self.found = Findings()

    def model(self) -> None:
        source = find_look_up(self.probe, self.run.source, "source", self.pad_id)
        target = find_look_up(self.probe, self.run.target, "target", self.pad_id)
        tables = read_tables(self.found, self.probe, source, target)
        self.source_root = source.root
        self.dynamic = self.graph.after([source.root, target.root])
        self.tokens = {"encoder": source.ids != self.pad_id, "decoder": target.ids != self.pad_id}
        self.tokens["decoder"][:, 0] = True  # BOS is no padding, whatever its id
        of_target = self.graph.after([target.root])
        cuts = self.graph.cuts(source.root, [self.run.output])
        alone = [cut for cut in cuts if cut not in of_target]
        memory = self._stack("encoder", source, alone, None)
        cuts = self.graph.cuts(target.root, [self.run.output])
        self._output(self._stack("decoder", target, cuts, memory), tables)

    def _stack(self, stack: str, look_up: LookUp, cuts: Sequence[int], memory: int | None) -> int:
        """Read a stack; return the value at its end, before a product."""
        spans, chains = [], [[look_up.root]]
        for start, end in pairwise(cuts):
            products = self.graph.products([start], [end])
            if not products:
                chains[-1].append(end)
            elif len(self.graph.calls([start], [end])) > 1:
                spans.append((start, end))
                chains.append([end])
            else:
                break
        if not spans:
            calls = self.graph.products([look_up.root], cuts[-1:])
            raise Unread(f"the {stack} has no sublayer that is added to its input", calls)
        side, tokens = SIDES[stack], self.tokens[stack]
        place = read_embedding(self.found, self.probe, side, look_up, chains[0], tokens)
        with self.found.refusing():
            norm = self._norm_between(chains[0][place], chains[0][-1], stack)
            self.found.say("embedding_norm", norm is not None, f"{side}_embedding_norm")
            if norm:
                self.found.norm(f"{side}_embedding_norm", norm)
        ends = [*chains[1:-1], self._streams(chains[-1])]
        sublayers: list[Sublayer] = []
        for (start, end), chain in zip(spans, ends, strict=True):
            tail, added = chain, None
            if len(chain) > 1 and self.graph.changing(chain[:1], chain[1:2]):
                added = self.probe.shift(chain[0], chain[1])
                tail = chain if added is None else chain[1:]
            norms, place = self._leading_norms(tail, stack)
            with self.found.refusing():
                if stack == "encoder" or chain is not ends[-1]:
                    self._check_rest(tail[place:], stack)
                sublayer = self._sublayer(stack, start, end, memory)
                sublayers.append(sublayer._replace(after=norms, added=added))
        if len(sublayers) == len(spans):
            self._layers(stack, sublayers)
        return tail[place]

    def _streams(self, cuts: Sequence[int]) -> list[int]:
        """Return the cuts up to the last one in the shape of a stream: [B, L, D] or [L, B, D]."""
        shape = self.run.shapes[cuts[0]]
        shapes = shape, (*shape[1::-1], *shape[2:])
        last = max(n for n, cut in enumerate(cuts) if self.run.shapes[cut] in shapes)
        return [*cuts[: last + 1]]

    def _leading_norms(self, cuts: Sequence[int], stack: str) -> tuple[list[Norm], int]:
        """Return the norms at the beginning of a chain of cuts, and the place behind them.

        The longest slice is tried first: a norm without its scale is a norm, too.
        """
        found, place, last = [], 0, len(cuts) - 1
        while place < last:
            start = cuts[place]
            for end in range(last, place, -1):
                changes = self.graph.changing([start], [cuts[end]])
                if not changes or self.probe.is_identity(start, cuts[end], self.tokens[stack]):
                    break
                norm = self.probe.norm(start, cuts[end])
                if norm is not None and abs(norm.factor - 1) < 1e-6:
                    found.append(norm)
                    break
            else:
                break
            place = end
        return found, place

    def _check_rest(self, cuts: Sequence[int], stack: str) -> None:
        """Raise `Unread` for a chain of cuts that changes a stream."""
        for end in cuts[1:]:
            if calls := self.graph.changing(cuts[:1], [end]):
                raise Unread(f"the {stack}'s stream is changed, and by no norm", calls)

    def _norm_between(self, start: int, end: int, stack: str) -> Norm | None:
        """Return the norm of a slice; None where nothing is changed."""
        cuts = self.graph.cuts(start, [end])
        norms, place = self._leading_norms(cuts, stack)
        self._check_rest(cuts[place:], stack)
        if len(norms) > 1:
            raise Unread("several norms follow each other", self.graph.changing([start], [end]))
        return norms[0] if norms else None

    # Sublayers

    def _sublayer(self, stack: str, start: int, end: int, memory: int | None) -> Sublayer:
        """Read a sublayer: its residual addition, its norms, and what it computes."""
        inside = self.graph.between([start], [end])
        join = self.run.producer[end]
        while join.name in MOVES and len({*join.inputs} & inside) == 1:
            join = self.run.producer[next(key for key in join.inputs if key in inside)]
        sides = [key for key in join.inputs if key in inside]
        if join.name not in ("add", "add_") or len(sides) != 2:
            raise Unread("a sublayer is joined with its input otherwise than by adding", [join])
        sides.sort(key=lambda key: len(self.graph.products([start], [key])))
        if self.graph.products([start], sides[:1]):
            raise Unread(f"two sublayers read one input: {ONE_BEHIND_THE_OTHER}", [join])
        if not self.probe.is_identity(start, sides[0], self.tokens[stack]):
            calls = self.graph.changing([start], sides[:1])
            text = "the input of each sublayer is changed where it is added"
            raise Unread(f"{text}: no weights can stand for that", calls or [join])
        products = self.graph.products([start], sides[1:])
        dynamic = [call for call in products if len({*call.inputs} & self.dynamic) > 1]
        if dynamic:
            kind, begin, key_from = self._attention_inputs(start, sides[1], dynamic, memory)
            read, last = read_attention(self.probe, dynamic, begin, key_from, sides[1])
        else:
            kind, begin = "feed_forward", self._input(start, sides[1], products)
            read, last = read_network(self.probe, begin, sides[1])
        crossing = kind == "cross_attention"
        return Sublayer(
            join=join,
            kind=kind,
            read=read,
            before=self._norm_between(start, begin, stack),
            behind=self._norm_between(last, sides[1], stack),
            memory_norm=self._norm_between(memory, key_from, "encoder") if crossing else None,
        )

    def _input(
        self, start: int, end: int, products: Sequence[Call], keys: Sequence[int] = ()
    ) -> int:
        """Return the last value in the shape of a stream that all products of a slice read."""
        first = min(call.outputs[0] for call in products)
        cuts = self.graph.cuts(start, keys or [end])
        return self._streams([cut for cut in cuts if cut < first])[-1]

    def _attention_inputs(
        self, start: int, end: int, products: Sequence[Call], memory: int | None
    ) -> tuple[str, int, int]:
        """Return the kind of an attention, and the streams of its queries and of its keys."""
        graph = self.graph
        of_start, all_products = graph.after([start]), graph.products([start], [end])
        scores = scores_of(self.probe, products, [start] if memory is None else [start, memory])
        operands = [call.operands for call in scores]
        within = {key in of_start for _, key in operands}
        if len(within) > 1 or not all(query in of_start for query, _ in operands):
            raise Unread(f"two attentions are in one addition: {ONE_BEHIND_THE_OTHER}", scores)
        if memory in graph.before([key for _, key in operands if key in of_start], [start]):
            remedy = "decoder_attention='merged' does so, and needs a layout by hand"
            raise Unread(f"one attention reads targets and memory side by side: {remedy}", scores)
        ends = [key for call in products for key in call.operands if key in self.dynamic]
        if within == {True}:
            begin = self._input(start, end, all_products, [k for k in ends if k in of_start])
            return "self_attention", begin, begin
        begin = self._input(start, end, all_products, [query for query, _ in operands])
        return "cross_attention", begin, self._memory(memory, scores, ends, of_start)

    def _memory(
        self, memory: int | None, scores: Sequence[Call], ends: Sequence[int], of_start: set[int]
    ) -> int:
        """Return the value that the keys of a cross-attention are made of."""
        graph, keys = self.graph, [call.operands[1] for call in scores]
        starts = [] if memory is None else [memory]
        of_memory, products = graph.after(starts), graph.products(starts, keys)
        apart = [call for call in products if len({*call.inputs} & self.dynamic) > 1]
        others = graph.before(keys, starts) & graph.after([self.source_root]) - of_memory
        if apart or others or not {*keys} <= of_memory:
            text = "a cross-attention reads another value than the last output of the encoder"
            raise Unread(f"{text}, such as the output of the same encoder layer", scores)
        inside = [key for key in ends if key in of_memory and key not in of_start]
        return self._input(memory, inside[0], graph.products([memory], inside), inside)

    # Output

    def _output(self, start: int, tables: tuple[Elements, Elements]) -> None:
        """Read the last product, and what becomes of the logits; tables are source and target."""
        probe, end = self.probe, self.run.output
        at = probe.first_position(start)
        if not self.graph.products([start], [end]):
            if calls := self.graph.changing([start], [end]):
                raise Unread("the hidden states are changed before they are returned", calls)
            self.found.say("output_projection", "none", "the output")
            self.found.say("output_bias", False, "the output")
            return
        affine = [
            point
            for point in affine_points(probe, at, end)
            if self.graph.products([start], [point.key])
        ]
        if not affine:
            raise no_product(probe, at, end, "the output projection")
        # A bound divides the logits before its tanh, so that the affine part may end behind them.
        point = next((p for p in reversed(affine) if self._returned(p) is not None), affine[-1])
        read = read_affine(probe, [at], point, "the output projection")
        calls = self.graph.changing([start], [point.key])
        scaled = abs(read.factor * len(read.kernel) ** 0.5 - 1) < 1e-6
        self.found.say("output_scale", "inverse_sqrt_d_model" if scaled else "none", "the output")
        factors = [] if scaled else [read.factor]
        factors += [] if read.bias is None else [read.bias_factor]
        if any(abs(factor - 1) > CLOSE for factor in factors):
            remedy = "multiply the weight and the bias of the output projection by it"
            text = f"the logits are multiplied by {read.factor:.6g}: {remedy}"
            self.found.refuse(Unread(text, calls))
        tied = np.array_equal(read.kernel.T, tables[1])
        if not tied and np.array_equal(read.kernel.T, tables[0]):
            self.found.refuse(Unread("the output projection is the source's table", calls))
        self.found.say("output_projection", "tied" if tied else "linear", "the output")
        self.found.say("output_bias", read.bias is not None, "the output")
        self.found.place("output_projection/kernel", None if tied else read.kernel)
        self.found.place("output_projection/bias", read.bias)
        returned = self._returned(point)
        calls = self.graph.changing([point.key], [end])
        if returned is None:
            self.found.refuse(Unread("the logits are changed before they are returned", calls))
        elif isinstance(returned, float):
            self.found.say("logit_softcap", returned, "the output")
        elif returned != "logits":
            self.found.notes.append(f"the program returns the {returned} of the logits: {calls[0]}")

    def _returned(self, point: Point) -> str | float | None:
        """Return what the program returns of its logits: a word, or their bound; None otherwise."""
        if not self.graph.changing([point.key], [self.run.output]):
            return "logits"
        x = np.resize(np.linspace(-40, 40, 41), len(point.places))
        y = self.probe.output([point], Point(self.run.output, point.places), {}, x)
        powers = x - x.max() - np.log(np.exp(x - x.max()).sum())
        for kind, expected in (("log_softmax", powers), ("softmax", np.exp(powers))):
            if np.abs(y - expected).max() < CLOSE:
                return kind
        return capped(x, y)

    # Layers

    def _layers(self, stack: str, sublayers: Sequence[Sublayer]) -> None:
        """Put the sublayers of a stack together as layers."""
        pattern, found = PATTERNS[stack], self.found
        kinds = [sublayer.kind for sublayer in sublayers]
        count = len(kinds) // len(pattern)
        if kinds != [*pattern] * count:
            text = f"the {stack} has the sublayers {', '.join(kinds[: len(pattern) + 1])}, ..."
            found.refuse(Unread(text, [sublayer.join for sublayer in sublayers]))
            return
        found.say(f"num_{stack}_layers", count, stack)
        for number, sublayer in enumerate(sublayers):
            layer = f"{stack}/layers_{number // len(pattern)}"
            path, norms = f"{layer}/{sublayer.kind}", [*sublayer.after]
            placement = "sandwich" if sublayer.behind else "pre"
            if sublayer.before is None:
                placement = "post"
                if sublayer.behind or not norms:
                    text = "no norm is where a config has one"
                    found.refuse(Unread(text, [sublayer.join]))
                    continue
            found.norm(f"{path}_residual/norm", sublayer.before or norms.pop(0))
            if sublayer.behind:
                found.norm(f"{path}_residual/output_norm", sublayer.behind)
            found.say(f"{stack} norm_placement", placement, sublayer.join)
            last = sublayer is sublayers[-1]
            if len(norms) > last:
                found.refuse(Unread("a sublayer has one norm too many", [sublayer.join]))
            elif last:
                found.say(f"{stack} final_norm", bool(norms), stack)
                for norm in norms:
                    found.norm(f"{stack}/norm", norm)
            if isinstance(sublayer.read, Attention):
                self._attention_fields(stack, layer, sublayer, sublayer.read)
            else:
                self._network_fields(stack, path, sublayer, sublayer.read)

    def _product(self, path: str, affine: Affine, field: str, join: Call) -> None:
        """Note a product and its bias; the first one of a sublayer may have a factor."""
        if max(abs(affine.factor - 1), abs(affine.bias_factor - 1)) > 1e-6:
            text = f"a product is multiplied by {affine.factor:.6g}"
            self.found.refuse(Unread(f"{text}: multiply its weight and its bias by it", [join]))
        self.found.say(field, affine.bias is not None, path)
        self.found.place(f"{path}/kernel", affine.kernel)
        self.found.place(f"{path}/bias", affine.bias)

    def _attention_fields(
        self, stack: str, layer: str, sublayer: Sublayer, read: Attention
    ) -> None:
        found, heads, path = self.found, len(read.heads[0]), f"{layer}/{sublayer.kind}"
        scores, width = read.cores[0].calls[0], read.query.kernel.shape[1] // heads
        found.say(f"{stack} num_heads", heads, scores)
        value_width = read.output.kernel.shape[0] // heads
        for part, its_width in ((read.key, width), (read.value, value_width)):
            found.say(f"{stack} num_kv_heads", part.kernel.shape[1] // its_width, scores)
        found.say("d_kv", width, scores)
        found.say("d_v", value_width, scores)
        for name in ("query", "key"):  # their factors are in the divisor of the scores
            part = getattr(read, name)._replace(factor=1.0, bias_factor=1.0)
            self._product(f"{path}/{name}", part, "qkv_bias", sublayer.join)
        self._product(f"{path}/value", read.value, "qkv_bias", sublayer.join)
        output = self._with_added(read.output, sublayer.added)
        self._product(f"{path}/output", output, "attention_output_bias", sublayer.join)
        found.say("attention_scale", float(f"{read.divisor**2:.12g}"), scores)
        found.say("attention_softcap", read.softcap, scores)
        found.say("query_key_norm", read.norms is not None, scores)
        for name, norm in zip(("query", "key"), read.norms or (), strict=False):
            found.norm(f"{path}/{name}_norm", norm)
        if sublayer.kind == "cross_attention":
            found.say("memory_norm", sublayer.memory_norm is not None, sublayer.join)
            if sublayer.memory_norm:
                found.norm(f"{layer}/memory_norm", sublayer.memory_norm)
            if read.rotary:
                found.refuse(Unread("a cross-attention has rotary positions", read.cores[0].calls))
        else:
            found.rotary[stack].append(read.rotary)
        found.attentions.setdefault((stack, sublayer.kind), read)
        far = twin(self.run, self.longest.run, read)
        site = Site(stack=stack, layer=layer, kind=sublayer.kind, attention=read, far=far)
        with found.refusing():
            read_bias(found, self.probe, self.longest, site)
        with found.refusing(masks=True):
            read_mask(found, self.probe, self.longest, site, self.tokens)

    def _network_fields(self, stack: str, path: str, sublayer: Sublayer, read: Network) -> None:
        self.found.say(f"{stack} d_ff", read.inner.kernel.shape[1], sublayer.join)
        self.found.say("activation", read.activation, sublayer.join)
        self.found.say("gated_feed_forward", read.gate is not None, sublayer.join)
        outer = self._with_added(read.outer, sublayer.added)
        for name, part in (("inner", read.inner), ("gate", read.gate), ("outer", outer)):
            if part is not None:
                self._product(f"{path}/{name}", part, "feed_forward_bias", sublayer.join)

    def _with_added(self, affine: Affine, added: Elements | None) -> Affine:
        """Return the last product of a sublayer with a bias that is added behind the sum."""
        if added is None or affine.bias is not None:
            return affine
        return affine._replace(bias=added, bias_factor=affine.factor)
