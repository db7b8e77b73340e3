"""A config and a layout for weights that nobody described, and how sure they are."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.buffers import PositionTable
from jax_transformer.convert.table import HEAD, USUAL_MASKS, BoundRow, Layout, Row
from jax_transformer.convert.transfer import check_state_dict
from jax_transformer.porting.hypothesis import build, to_layout
from jax_transformer.porting.names import join_heads
from jax_transformer.porting.questions import Certainty, Question, find_questions
from jax_transformer.porting.record import ROUGH, Record
from jax_transformer.porting.structure import Structure, find_structure
from jax_transformer.storage.weights.arrays import as_numpy

if TYPE_CHECKING:
    from jax_transformer.porting.search import Alternative, Finding, Progress

ORDER: tuple[Certainty, ...] = ("certain", "likely", "open")
MOST_ANSWERS = 6  # that a line shows
CLEAR = 2.0  # how many times larger the error of the next answer must be


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """A config and a layout; prints as the rows, the config and what is open.

    Attributes:
        certainty: How sure the place of each tensor is, by its name.
        questions: What is not settled, the suggested answer first.
    """

    config: TransformerConfig
    layout: Layout
    certainty: dict[str, Certainty]
    questions: tuple[Question, ...]
    finding: Finding | None = None

    @property
    def fits(self) -> bool:
        """Whether a record was given and the model follows it."""
        finding = self.finding
        return finding is not None and finding.fit.complete and not finding.hypothesis.outside

    @property
    def shares(self) -> dict[Certainty, float]:
        """Share of the tensors whose place is certain, likely or open."""
        counts = Counter(self.certainty.values())
        return {level: counts[level] / len(self.certainty) for level in ORDER}

    def __str__(self) -> str:
        lines = [*self._rows(), "", *self._fields(), ""]
        shares = ", ".join(f"{share:.0%} {level}" for level, share in self.shares.items())
        lines.append(f"{len(self.certainty)} tensors placed: {shares}")
        for question in self.questions:
            first, *others = map(question.text, question.answers[:MOST_ANSWERS])
            more = "; ..." if len(question.answers) > MOST_ANSWERS else ""
            lines.append(f"  {question.certainty}: {question.name}: {first}")
            lines.append(f"      or {'; '.join(others)}{more}")
        return "\n".join([*lines, *self._found()])

    def _rows(self) -> list[str]:
        layout = self.layout
        names = [row.foreign for row in layout.rows]
        names += [buffer.foreign for buffer in layout.buffers]
        width = max(map(len, [*names, *layout.unused]))
        lines = []
        for row in layout.rows:
            level = self.certainty[row.foreign.replace("{i}", "0").replace(HEAD, "0")]
            text = f"{together(row.paths)} {described(row)}".rstrip()
            lines.append(f"{level:<8}{row.foreign:<{width}}  {text}")
        constants = {
            buffer.foreign: "the computed position table"
            if isinstance(buffer.value, PositionTable)
            else f"a {buffer.value.kind} of numbers, given back as it is"
            for buffer in layout.buffers
        }
        constants |= dict.fromkeys(layout.unused, "not read, and cannot be given back")
        return [*lines, *(f"certain {name:<{width}}  {text}" for name, text in constants.items())]

    def _fields(self) -> list[str]:
        fields = self.config.to_dict()
        defaults = {f.name: f.default for f in dataclasses.fields(TransformerConfig)}
        return [f"{name} = {value!r}" for name, value in fields.items() if value != defaults[name]]

    def _found(self) -> list[str]:
        if self.finding is None:
            return []
        fit, passes, seconds = self.finding.fit, self.finding.passes, self.finding.seconds
        effort = f"{passes:,} forward passes in {seconds:.1f} s"
        if not self.fits:
            cut = ["the search was stopped: give it more --minutes"] if self.finding.stopped else []
            return [*_misses(self.finding), *cut, effort]
        lines = [f"the model follows the record within {fit.error:.0e}, after {effort}"]
        if self.layout.masks != USUAL_MASKS:
            lines.append(f"masks of your program, for encode and decode: {self.layout.masks}")
        undecided = self.finding.undecided
        near = [other for other in self.finding.alternatives if other not in undecided]
        return [*lines, *_near(self.finding, near)]


def suggest(
    tensors: Mapping[str, Any],
    record: Record | None = None,
    progress: Progress | None = None,
    *,
    minutes: float = 10.0,
) -> Suggestion:
    """Return a config and a layout for the weights of an encoder-decoder.

    Names and shapes show the stacks, layers and blocks. What they leave open is taken as it is
    usual, or settled by a record of what the program computed.

    Args:
        record: What the program computed; needs torch.
        progress: Is called during the search; see `search.Progress`.

    Raises:
        InputError: The tensors are those of no encoder-decoder that this library can have; names
            those at fault.
    """
    check_state_dict(tensors)
    arrays = {name: as_numpy(tensor) for name, tensor in tensors.items()}
    names = [*arrays]
    arrays, joined = join_heads(arrays)
    structure = find_structure(arrays, max(Counter(joined.values()).values(), default=None))
    questions = find_questions(structure)
    undecided = tuple(question for question in questions.values() if len(question.answers) > 1)
    finding, settled = None, undecided
    if record is None:
        hypothesis = build(structure, {q.name: q.answers[0] for q in questions.values()})
    else:
        from jax_transformer.porting.search import Search

        finding = Search(structure, arrays, record, progress, minutes).run()
        hypothesis, undecided = finding.hypothesis, _undecided(finding)
        settled = undecided if finding.fit.complete else settled
    levels = _certainty(structure, arrays, settled)
    certainty = {name: levels[joined.get(name, name)] for name in names}
    layout = to_layout(structure, hypothesis, arrays)
    return Suggestion(hypothesis.config, layout, certainty, undecided, finding)


def _undecided(finding: Finding) -> tuple[Question, ...]:
    """Return the questions that a record leaves, the answer that was taken first."""
    if not finding.fit.complete:
        return ()
    answers: dict[str, list[Any]] = {}
    for other in finding.undecided:
        answers.setdefault(other.question, [finding.answers[other.question]]).append(other.answer)
    return tuple(
        dataclasses.replace(
            (question := finding.questions[name]),
            answers=tuple(values),
            certainty="open",
            texts=tuple(map(question.text, values)),
        )
        for name, values in answers.items()
    )


def _certainty(
    structure: Structure, arrays: Mapping[str, np.ndarray], questions: tuple[Question, ...]
) -> dict[str, Certainty]:
    """Return how sure the place of each tensor is: as sure as the least sure question about it."""
    levels: dict[str, Certainty] = {}
    for question in questions:
        for name in question.about:
            levels[name] = max(levels.get(name, "certain"), question.certainty, key=ORDER.index)
    certainty: dict[str, Certainty] = dict.fromkeys(arrays, "certain")
    for layer in (structure.encoder, structure.decoder):
        for place in range(len(layer.stack.indices)):
            for suffix in layer.stack.shapes:
                level = levels.get(layer.stack.template(suffix), "certain")
                certainty[layer.stack.name(place, suffix)] = level
    certainty |= {name: level for name, level in levels.items() if name in certainty}
    certainty |= {copy: certainty[original] for copy, original in structure.copies.items()}
    return certainty


def _misses(finding: Finding) -> list[str]:
    """Return what no config has, where nothing fits, and the nearest miss."""
    fit, unusual = finding.fit, finding.hypothesis.outside
    lines = [unusual.sentence(finding.hypothesis.config.d_model)] if unusual else []
    if fit.complete:
        return [*lines, f"with that the model follows the record within {fit.error:.0e}"]
    point = fit.points[-1]
    place, _, batch = point.name.partition(" of batch ")
    if point.error <= ROUGH:
        rounding = "in float64 a right answer comes within 1e-15"
        near = f"near, not equal: {place} in batch {batch} is {point.error:.0e} off; {rounding}"
        return [*lines, near]
    lines.append(
        f"nothing fits at {place} in batch {batch}: the nearest model is {point.error:.0e} off"
    )
    if int(batch) == 1 and len(fit.points) > 1:
        lines.append(
            "single tokens agree and several do not: queries and keys meet in a way that no config "
            "has, or none that is searched"
        )
    elif int(batch) > 1:
        lines.append("rows without padding agree: the masks are others than a config can have")
    return [*lines, *_near(finding, finding.alternatives)]


def _near(finding: Finding, alternatives: Sequence[Alternative]) -> list[str]:
    """Return the other answer that is nearest, where it is clearly nearer than the next one."""
    first, *others = alternatives or (None,)
    if first is None or (others and others[0].error < CLEAR * first.error):
        return []
    text = finding.questions[first.question].text(first.answer)
    return [f"{first.question}: {text} would be {first.error:.0e} off"]


def together(paths: Sequence[str]) -> str:
    """Return paths that differ in some keys, as a/{b,c}/d."""
    split = [path.split("/") for path in paths]
    if len(set(map(len, split))) > 1:
        return ", ".join(paths)
    keys = [list(dict.fromkeys(column)) for column in zip(*split, strict=True)]
    return "/".join(key[0] if len(key) == 1 else f"{{{','.join(key)}}}" for key in keys)


def described(row: Row | BoundRow) -> str:
    """Return how parameters become their tensor: "transposed to [4, -1]", "transposed by rows"."""
    changes = ["transposed"] if row.operation.transposed else []
    changes += [f"to {list(row.operation.shape)}"] if row.operation.shape else []
    changes += [f"by {row.stack}"] if len(row.paths) > 1 else []
    return " ".join(changes)
