"""What names and shapes cannot tell: each question with its answers, the likeliest first."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, get_args

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import InputError
from jax_transformer.porting.blocks import (
    ATTENTION_WORDS,
    CROSS_WORDS,
    FEED_FORWARD_WORDS,
    SELF_WORDS,
    Group,
    matrix_shape,
    vote,
)
from jax_transformer.porting.names import Unit, words
from jax_transformer.porting.structure import SINUSOIDS, Layer, Structure

Certainty = Literal["certain", "likely", "open"]

SIDES = ("encoder", "decoder")
SOURCE_WORDS = {"src", "source", "enc", "encoder", "input", "in", "x"}
TARGET_WORDS = {"tgt", "trg", "target", "dec", "decoder", "y"}
SIDE_WORDS = (SOURCE_WORDS, TARGET_WORDS)
POSITION_WORDS = {"pos", "position", "positions", "positional", "pe", "wpe"}
HEAD_WORDS = {"out", "output", "head", "generator", "proj", "projection", "fc", "lm", "logits"}
TABLE_WORDS = {"emb", "embed", "embedding", "embeddings", "tok", "token", "word", "lut", "table"}
EMBEDDING_WORDS = {*TABLE_WORDS, "layernorm"}
BEFORE_WORDS, AFTER_WORDS = {"pre", "before", "input", "in"}, {"post", "after", "output", "out"}
MOST_HEADS = 256
MOST_ORDERS = 24  # of the norms of a layer, the likeliest ones
_HINTS = inspect.get_annotations(TransformerConfig, eval_str=True)
LITERALS = "norm activation embedding_scale output_scale"
PLACEMENTS = ("post", "pre")  # parameters show the others
# The values of the fields that change numbers and no shape, the usual ones first.
VALUES: dict[str, tuple[Any, ...]] = {
    **{name: get_args(_HINTS[name]) for name in LITERALS.split()},
    "norm_placement": PLACEMENTS,
    "decoder_attention": ("self_then_cross", "self_over_memory"),
    "attention_scale": get_args(get_args(_HINTS["attention_scale"])[0]),
    "decoder_norm_placement": (None, *PLACEMENTS),
    "norm_epsilon": (1e-5, 1e-6, 1e-12, 1e-8, 1e-3, 1e-4, 1e-7, 1e-9),
    "positions": ("sinusoidal", "none", "rotary", *SINUSOIDS[1:]),
    "position_offset": (0, 2, 1),
    "position_rounding": get_args(_HINTS["position_rounding"]),
    "relative_attention_max_distance": (128, 64, 256, 32),
}
STACK_NORMS = ("encoder/norm", "decoder/norm")
EMBEDDING_NORMS = ("source_embedding_norm", "target_embedding_norm")
# Which attentions hide the source's padding: those of the encoder, those to the memory.
SOURCE_MASKS = {
    (True, True): "encoder and decoder",
    (False, False): "nowhere",
    (True, False): "encoder",
    (False, True): "decoder",
}


@dataclasses.dataclass(frozen=True)
class Question:
    """A choice that shapes leave open.

    Attributes:
        name: What is asked, in words.
        about: Names of the tensors that it concerns, "{i}" for a layer; () for a field of the
            config.
        texts: The answers in words; () where they are words themselves.
    """

    name: str
    answers: tuple[Any, ...]
    certainty: Certainty
    about: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()

    def text(self, answer: Any) -> str:
        """Return an answer in words."""
        if self.texts:
            return self.texts[self.answers.index(answer)]
        return ", ".join(answer) if isinstance(answer, tuple) else str(answer)


def find_questions(structure: Structure) -> dict[str, Question]:
    """Return the questions that a structure leaves, by name."""
    questions: list[Question] = []
    layers = (structure.encoder, structure.decoder)
    orientation = _known_orientation(structure)
    patterns: dict[tuple[str, ...], list[tuple[Layer, Group]]] = {}
    for layer in layers:
        for group in (*layer.attentions, layer.feed_forward):
            patterns.setdefault(group.pattern, []).append((layer, group))
    for places in patterns.values():
        questions += _group_questions(places, structure.width, orientation)
    questions.append(_self_or_cross(structure.decoder))
    questions += [_norm_order(layer, side) for layer, side in zip(layers, SIDES, strict=True)]
    questions += [_outside_norms(structure), tables := _tables(structure)]
    questions += _fields(structure, {bool(answer.positions) for answer in tables.answers})
    return {question.name: question for question in questions}


def _group_questions(
    places: Sequence[tuple[Layer, Group]], width: int, orientation: bool | None
) -> Iterable[Question]:
    group = places[0][1]
    name = group_name(group)

    def about(units: Iterable[int]) -> tuple[str, ...]:
        return tuple(
            layer.stack.template(suffix)
            for layer, other in places
            for unit in units
            for suffix in (other.units[unit].matrix, other.units[unit].bias)
            if suffix
        )

    roles = _role_answers(group, width)
    named: Certainty = "likely" if group.named else "open"
    concerned = [i for i in range(len(group.units)) if len({answer[i] for answer in roles}) > 1]
    yield Question(
        f"roles of {name}", roles, "certain" if len(roles) == 1 else named, about(concerned)
    )
    for index, unit in enumerate(group.units):
        rows, columns = matrix_shape(unit, width)
        if rows == columns:
            sure = orientation is not None or unit.matrix.endswith("weight")
            answers, texts = (True, False), ("(outputs, inputs)", "(inputs, outputs)")
            if orientation is False:
                answers, texts = answers[::-1], texts[::-1]
            certainty: Certainty = "likely" if sure else "open"
            name = orientation_name(group, index)
            yield Question(name, answers, certainty, about([index]), texts)


def group_name(group: Group) -> str:
    """Return a short name of the groups of one pattern."""
    kind, *names = group.pattern
    return f"{kind} ({', '.join(names)})"


def orientation_name(group: Group, index: int) -> str:
    """Return the name of the question whether a square kernel is (outputs, inputs)."""
    return f"orientation of {group.pattern[1 + index]} in {group_name(group)}"


def _role_answers(group: Group, width: int) -> tuple[tuple[str, ...], ...]:
    """Return the possible roles of a group's products, the likeliest first."""
    stacked = next((role for role in group.roles if "+" in role), None)
    if stacked is None:
        return group.assignments
    shape = matrix_shape(group.units[group.roles.index(stacked)], width)
    endings = (" rows",) if group.kind == "fused_gate" else (" rows", " heads")
    if shape[0] == width != shape[1]:
        endings = (" columns",)
    orders = [
        "+".join(order) + ending
        for ending in endings
        for order in itertools.permutations(stacked.split("+"))
    ]
    return tuple(
        tuple(order if role == stacked else role for role in roles)
        for order in orders
        for roles in group.assignments
    )


def _known_orientation(structure: Structure) -> bool | None:
    """Return whether kernels are (outputs, inputs), where biases of others say so, else None."""
    for layer in (structure.encoder, structure.decoder):
        for group in (*layer.attentions, layer.feed_forward):
            for unit in group.units:
                outputs, inputs = matrix_shape(unit, structure.width)
                if unit.bias_length and outputs != inputs:
                    return unit.bias_length == outputs
    return None


def _ranked(
    name: str,
    answers: Iterable[Any],
    score: Callable[[Any], float],
    about: Iterable[str],
    text: Callable[[Any], str] | None = None,
    clear: float = 0.5,
) -> Question:
    """Return the question with its answers by their scores, the largest first.

    The first answer is likely if its score is that much larger than the second one's.
    """
    ordered = tuple(sorted(answers, key=lambda answer: -score(answer)))
    certainty: Certainty = "certain"
    if len(ordered) > 1:
        certainty = "likely" if score(ordered[0]) >= score(ordered[1]) + clear else "open"
    texts = tuple(map(text, ordered)) if text else ()
    return Question(name, ordered, certainty, tuple(filter(None, about)), texts)


def _self_or_cross(decoder: Layer) -> Question:
    crossing = [
        sum(vote(unit, CROSS_WORDS, SELF_WORDS) for unit in group.units)
        for group in decoder.attentions
    ]
    units = [unit.matrix for group in decoder.attentions for unit in group.units]
    names = [group.units[0].matrix.strip(".") for group in decoder.attentions]
    return _ranked(
        "the decoder's self-attention and cross-attention",
        ((0, 1), (1, 0)),
        lambda answer: crossing[answer[1]],
        map(decoder.stack.template, units),
        lambda answer: f"{names[answer[0]]} is in the self-attention",
    )


def _norm_order(layer: Layer, side: str) -> Question:
    """Return the question which norm belongs to which block of a layer."""
    blocks = [block for block in NORM_WORDS if side == "decoder" or block in ENCODER_BLOCKS]
    sublayers = [block for block in blocks if block != "memory_norm"]
    if len(layer.norms) >= 2 * len(sublayers):  # one before and one after each of them
        blocks[len(sublayers) : len(sublayers)] = [f"{block} output_" for block in sublayers]
    blocks = blocks[: len(layer.norms)]

    def score(answer: tuple[str, ...]) -> float:
        norms = enumerate(zip(layer.norms, answer, strict=True))
        return sum(_norm_score(norm, block, layer, index) for index, (norm, block) in norms)

    names = [name for norm in layer.norms for name in (norm.scale, norm.bias) if name]
    about = map(layer.stack.template, names)
    name = f"the norms of an {side} layer"
    question = _ranked(name, itertools.permutations(blocks), score, about, clear=1.0)
    return dataclasses.replace(question, answers=question.answers[:MOST_ORDERS])


ENCODER_BLOCKS = ("self_attention", "feed_forward")
# The usual place of the norm of a block in a layer, its words, and those of other blocks.
NORM_WORDS = {
    "self_attention": (0, ATTENTION_WORDS - CROSS_WORDS, CROSS_WORDS | FEED_FORWARD_WORDS),
    "cross_attention": (1, CROSS_WORDS, SELF_WORDS | FEED_FORWARD_WORDS),
    "feed_forward": (-1, FEED_FORWARD_WORDS, ATTENTION_WORDS),
    "memory_norm": (2, {"mem", "memory", "kv", "context"}, SELF_WORDS | FEED_FORWARD_WORDS),
}


def _norm_score(norm: Unit, block: str, layer: Layer, index: int) -> float:
    """Return how well a norm's name and place suit a block."""
    block, _, output = block.partition(" ")
    position, usual, unusual = NORM_WORDS[block]
    score = 0.5 if index == position % len(layer.norms) else 0.0
    module = norm.name.rpartition(".")[0].rpartition(".")[0]
    groups = {
        "self_attention": layer.attentions[:1],
        "cross_attention": layer.attentions[1:],
        "feed_forward": (layer.feed_forward,),
        "memory_norm": (),
    }[block]
    if module and any(unit.matrix.startswith(f"{module}.") for g in groups for unit in g.units):
        score += 2
    spoken = {word for word in words(norm.name) if word not in ("layer", "norm")}
    after = bool(spoken & AFTER_WORDS) - bool(spoken & BEFORE_WORDS)
    score += 2 * after if output else -2 * after
    return score + len(spoken & usual) - len(spoken & unusual)


def _outside_norms(structure: Structure) -> Question:
    """Return the question which norms end the stacks and which norm the embeddings."""
    count = len(structure.norms)
    slots: list[tuple[str, ...]] = []
    if count <= 2:
        slots += itertools.permutations(STACK_NORMS, count)
    if count >= 2:
        for ends in itertools.combinations(STACK_NORMS, count - 2):
            slots += itertools.permutations((*EMBEDDING_NORMS, *ends))
    if not slots:
        names = ", ".join(norm.name for norm in structure.norms[:6])
        raise InputError(
            f"{count} norms stand outside the layers ({names}); this library has at most four: one "
            "for the embeddings of each side and one at the end of each stack"
        )

    def score(answer: tuple[str, ...]) -> float:
        total = 0.0
        for norm, slot in zip(structure.norms, answer, strict=True):
            side = vote(norm, SOURCE_WORDS, TARGET_WORDS)
            total += side if slot in (STACK_NORMS[0], EMBEDDING_NORMS[0]) else -side
            embeds = vote(norm, EMBEDDING_WORDS, ())
            total += embeds - 1 if slot in EMBEDDING_NORMS else -embeds
        return total

    about = [name for norm in structure.norms for name in (norm.scale, norm.bias)]
    names = [norm.scale for norm in structure.norms]
    name = "the norms outside the layers"
    return _ranked(name, slots, score, about, lambda answer: _pairs(names, answer))


class Tables(NamedTuple):
    """Which table embeds the source, the target, and projects the output; which are positions.

    `positions` are the tables of source and target, twice the same where they share it, or () where
    positions are not learned.
    """

    source: int | None
    target: int | None
    output: int | None
    positions: tuple[int, ...] = ()


def _tables(structure: Structure) -> Question:
    """Return the question what each table outside the layers holds."""
    tables, numbers = structure.tables, range(len(structure.tables))
    answers = [Tables(None, None, None)] if not tables else []
    pairs = [() if structure.encoder.relative else pair for pair in _position_pairs(structure)]
    for source, target, positions in itertools.product(numbers, numbers, dict.fromkeys(pairs)):
        possible = (Tables(source, target, output, positions) for output in (*numbers, None))
        answers += [answer for answer in possible if _is_possible(answer, structure)]
    if not answers:
        names = ", ".join(f"{table.matrix} {list(table.shape)}" for table in tables)
        raise InputError(
            f"the tables {names} are not those of a source, a target and an output, with or "
            "without two of positions"
        )

    def score(answer: Tables) -> int:
        source, target, output, positions = answer
        if source is None:
            return 0
        total = vote(tables[source], SOURCE_WORDS, TARGET_WORDS | HEAD_WORDS)
        total += vote(tables[target], TARGET_WORDS, SOURCE_WORDS | HEAD_WORDS)
        total += vote(tables[source], TABLE_WORDS, ()) + vote(tables[target], TABLE_WORDS, ())
        total += 5 * sum(vote(tables[i], POSITION_WORDS, ()) > 0 for i in positions)
        total -= 4 * (len({*positions}) == 1)  # a table of tokens, unless its name says more
        for index, side, opposite in zip(positions, SIDE_WORDS, SIDE_WORDS[::-1], strict=False):
            total += vote(tables[index], side, opposite) > 0
        if output is None:
            return total - 3
        if output not in (source, target):
            total += 2 * vote(tables[output], HEAD_WORDS, TABLE_WORDS)
            total += 3 * bool(tables[output].bias)
        return total

    about = [name for table in tables for name in (table.matrix, table.bias)]
    return _ranked(
        "the tables", answers, score, about, lambda answer: _tables_text(answer, structure)
    )


def _position_pairs(structure: Structure) -> list[tuple[int, ...]]:
    """Return the tables that may be positions of source and target, one for both, and none."""
    width, tables = structure.width, structure.tables
    rows = [
        math.prod(table.shape) // width if table.shape[-1] == width and not table.bias else None
        for table in tables
    ]
    pairs = [
        (i, j)
        for i, j in itertools.product(range(len(tables)), repeat=2)
        if rows[i] == rows[j] is not None and not (i == j and structure.sinusoids)
    ]
    return [(), *pairs]


def _is_possible(answer: Tables, structure: Structure) -> bool:
    """Return whether the shapes of tables allow an answer, and it uses each of them."""
    tables, width = structure.tables, structure.width
    tokens = {answer.source, answer.target, answer.output} - {None}
    if tokens | {*answer.positions} != {*range(len(tables))} or tokens & {*answer.positions}:
        return False
    sides = [tables[answer.source], tables[answer.target]]
    if any(len(t.shape) != 2 or t.shape[1] != width or t.bias for t in sides):
        return False
    if answer.output in (None, answer.target):
        return True
    head = tables[answer.output].shape
    size = sides[1].shape[0]
    # An output tied to the source's table is no config.
    return answer.output != answer.source and head in ((size, width), (width, size))


def _tables_text(answer: Tables, structure: Structure) -> str:
    names = ["none" if i is None else structure.tables[i].matrix for i in answer[:3]]
    text = _pairs(("source", "target", "output"), names)
    if answer.positions:
        positions = [structure.tables[i].matrix for i in answer.positions]
        text += ", " + _pairs(("positions of the source", "of the target"), positions)
    return text


def _pairs(names: Sequence[str], values: Sequence[str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in zip(names, values, strict=True))


def _fields(structure: Structure, learned: set[bool]) -> Iterable[Question]:
    """Return the fields of the config that no shape shows; `learned`: whether positions may be."""
    with_bias, without = VALUES["norm"][:3], VALUES["norm"][3:]
    norms = with_bias if structure.encoder.norms[0].bias else (*without, *with_bias[::-1])
    gated = structure.encoder.feed_forward.kind != "feed_forward"
    yield Question("norm_placement", VALUES["norm_placement"][::-1], "open")
    placements = VALUES["decoder_norm_placement"]
    texts = ("as norm_placement", *placements[1:])
    yield Question("decoder_norm_placement", placements, "likely", texts=texts)
    yield Question("norm", norms, "open")
    yield Question("norm_epsilon", VALUES["norm_epsilon"], "open")
    yield Question("activation", VALUES["activation"][:: -1 if gated else 1], "open")
    yield Question("num_heads", _heads(structure), "open")
    yield Question("attention_scale", VALUES["attention_scale"], "likely")
    if structure.tables:
        yield Question("embedding_scale", VALUES["embedding_scale"], "open")
        yield Question("output_scale", VALUES["output_scale"], "likely")
    if structure.encoder.relative:
        yield Question("positions", ("relative",), "certain")
        name = "relative_attention_max_distance"
        yield Question(name, VALUES[name], "likely")
    elif learned == {True}:
        yield Question("positions", ("learned",), "certain")
        yield Question("position_offset", VALUES["position_offset"], "open")
    elif structure.sinusoids:
        first = structure.sinusoids[0]
        yield Question("positions", (first.kind, "none"), "likely")
        yield Question("position_offset", (first.offset,), "certain")
        yield Question("position_rounding", VALUES["position_rounding"], "likely")
    else:
        yield Question("positions", VALUES["positions"], "open")
        yield Question("position_offset", VALUES["position_offset"], "likely")
    if len(structure.decoder.norms) == 3:
        yield Question("decoder_attention", VALUES["decoder_attention"], "likely")
    hidden, texts = tuple(SOURCE_MASKS), tuple(SOURCE_MASKS.values())
    yield Question("source padding hidden in", hidden, "open", texts=texts)
    yield Question("target padding hidden", (True, False), "open")
    yield Question("later targets hidden", (True, False), "likely")


def _heads(structure: Structure) -> tuple[int, ...]:
    """Return the possible numbers of heads, the usual widths of a head first."""
    if structure.num_heads:
        return (structure.num_heads,)
    group, width = structure.encoder.attentions[0], structure.width
    for unit in group.units:
        if len(unit.shape) == 3:
            return (unit.shape[1] if unit.shape[0] == width else unit.shape[0],)
        if group.kind == "shared" and unit.shape[0] != width:
            return (width // unit.shape[0],)
    relative, stack = structure.encoder.relative, structure.encoder.stack
    if relative:
        return ((stack.shapes | stack.first_only)[relative][1],)
    return possible_heads(group.inner)


def possible_heads(inner: int) -> tuple[int, ...]:
    """Return the numbers of heads that may be as wide together, the usual widths first."""
    divisors = [heads for heads in range(1, min(inner, MOST_HEADS) + 1) if inner % heads == 0]
    return tuple(sorted(divisors, key=lambda heads: (heads == 1, abs(inner / heads - 64))))
