"""Open questions settled by computing: the answers with which a model follows a record."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from jax_transformer.errors import InputError
from jax_transformer.porting.hypothesis import Hypothesis, build
from jax_transformer.porting.outside import FACTORS, WORDS, Outside, best_number, words_at
from jax_transformer.porting.places import SUBLAYERS
from jax_transformer.porting.questions import Question, Tables, find_questions
from jax_transformer.porting.record import EXACT, ROUGH, Record
from jax_transformer.porting.simulate import Fit, Point, Tensors, simulate
from jax_transformer.porting.structure import Layer, Structure

GAIN = 0.99  # a smaller distance than this share of the best one is an improvement
CLEAR = 2.0  # how many times larger the error of another answer must be
_FUSED = re.compile(r"((?:query|key|value)\+\S+) (?:rows|heads)")
STARTS = 4  # from which pairs of changes are tried
NOTHING = Fit((Point("nothing", np.inf, np.inf),), complete=False)
# Called with the places that agree, the number of places, and the forward passes so far.
Progress = Callable[[int, int, int], None]


class Alternative(NamedTuple):
    """Another answer to a question, and its largest error up to the first difference."""

    question: str
    answer: Any
    error: float


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a search found, after `passes` forward passes, whole or up to the first difference."""

    answers: dict[str, Any]
    hypothesis: Hypothesis
    fit: Fit
    alternatives: tuple[Alternative, ...]
    questions: dict[str, Question]
    passes: int
    seconds: float
    stopped: bool

    @property
    def undecided(self) -> tuple[Alternative, ...]:
        """The other answers that follow the record as well."""
        limit = max(CLEAR * self.fit.error, 1e-12)
        return tuple(other for other in self.alternatives if other.error <= limit)


class Search:
    """A search for the answers with which a model follows a record, or comes nearest to it.

    Each question is answered in turn by its best answer, until none gets better; then pairs of
    questions. An answer is better where more places agree, or where the first difference is
    smaller. Single tokens come first in a record, so norms, activation and positions are settled
    before queries, keys and heads, and these before masks.
    """

    def __init__(
        self,
        structure: Structure,
        tensors: Mapping[str, np.ndarray],
        record: Record,
        progress: Progress | None = None,
        minutes: float = 10.0,
    ) -> None:
        self.structure, self.tensors, self.record = structure, Tensors(tensors), record
        self.taps, self.progress = _layer_outputs(structure, record), progress
        self.start = time.perf_counter()
        self.end = self.start + 60 * minutes
        self.stopped = False
        layers = set(self.taps.values())
        self.places = sum(1 + len(layers & batch.blocks.keys()) for batch in record.batches)
        self.agreed = 0
        self.questions = find_questions(structure)
        tables = self.questions["the tables"]
        self.questions["the tables"] = _fitting_tables(tables, structure, record)
        if any(batch.src.shape[1] != batch.tgt.shape[1] for batch in record.batches):
            self.questions.pop("decoder_attention", None)  # the other one needs equal lengths
        self.known: dict[tuple[Any, ...], Fit] = {}
        self.passes = 0

    def run(self) -> Finding:
        """Search, and compare every other answer with what was found."""
        usual = {name: question.answers[0] for name, question in self.questions.items()}
        answers = self._descend(usual)
        if not self._fit(answers).complete:
            other = self._descend(self._nearest_start(usual))
            answers = max(answers, other, key=lambda reached: self._fit(reached).score)
        if self._fit(answers).points[-1].error > ROUGH:
            answers = self._from_words(answers)
        if not self._fit(answers).complete and "outside" not in answers:
            answers = self._from_other_starts(answers)
        answers, alternatives = self._refine(answers)
        hypothesis = build(self.structure, answers, self.record.pad_id or 0)
        fit = self._fit(answers)
        if fit.complete:  # also without the program's outputs, whose padding may be its own
            fit = simulate(self.tensors, hypothesis, self.record, {})
            alternatives = alternatives if fit.complete else ()
        counts = (self.passes, time.perf_counter() - self.start, self.stopped)
        return Finding(answers, hypothesis, fit, alternatives, self.questions, *counts)

    def _nearest_start(self, usual: dict[str, Any]) -> dict[str, Any]:
        """Return the usual answers with the norms, scale and positions that come nearest at first.

        A wrong one of them leads the others astray, and no change of one leads back.
        """
        place = self._fit(usual).points[0].name
        return min(self._starts(usual), key=lambda a: self._fit(a, place).points[-1].distance)

    def _starts(self, answers: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the answers with each choice of norms, scale and positions."""
        names = ("norm_placement", "norm", "embedding_scale", "positions")
        asked = {name: self.questions[name].answers for name in names if name in self.questions}
        if "positions" in asked:  # of a single token, rotary ones are none
            asked["positions"] = tuple(kind for kind in asked["positions"] if kind != "rotary")
        choices = itertools.product(*asked.values())
        return [answers | dict(zip(asked, choice, strict=True)) for choice in choices]

    def _build(self, answers: Mapping[str, Any]) -> Hypothesis | None:
        """Return the model of these answers; None where no config has it."""
        try:
            return build(self.structure, answers, self.record.pad_id or 0)
        except InputError:
            return None

    def _fit(self, answers: Mapping[str, Any], only: str | None = None) -> Fit:
        key = (only, *answers.values())
        if key in self.known:
            return self.known[key]
        hypothesis = self._build(answers)
        if hypothesis is None:
            return self.known.setdefault(key, NOTHING)
        fit = simulate(self.tensors, hypothesis, self.record, self.taps, only=only)
        self.known[key] = fit
        self.passes += 1
        if only is None:
            self.agreed = max(self.agreed, fit.score[0])
        if self.progress is not None:
            self.progress(self.agreed, self.places, self.passes)
        return fit

    def _is_over(self) -> bool:
        """Return whether the time is over."""
        self.stopped = self.stopped or time.perf_counter() > self.end
        return self.stopped

    def _improves(self, changed: Mapping[str, Any], fit: Fit) -> bool:
        """Return whether answers fit better; compares the first difference before the rest."""
        if self._is_over():
            return False
        point = fit.points[-1]
        if fit is not NOTHING:
            there = self._fit(changed, point.name).points[-1]
            if not there.distance < point.distance * GAIN:
                return False
        (agreed, distance), (before, farther) = self._fit(changed).score, fit.score
        further = agreed == before and distance > farther * GAIN and not fit.complete
        return agreed > before or further

    def _changes(self, answers: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
        for name, question in self.questions.items():
            for answer in question.answers:
                if answer != answers[name]:
                    yield name, answer

    def _descend(self, answers: dict[str, Any]) -> dict[str, Any]:
        """Return answers that no change of one, nor of two of them, improves."""
        while not self._fit(answers).complete:
            better = self._sweep(answers)
            if better == answers and not self._is_over():
                better = self._pair(answers)
            if better == answers:
                break
            answers = better
        return answers

    def _from_words(self, answers: dict[str, Any]) -> dict[str, Any]:
        """Return answers that agree further by something that no config has, if any do."""
        fit, questions, reached = self._fit(answers), self.questions, [answers]
        if fit is NOTHING:
            return answers
        usual = {name: question.answers[0] for name, question in questions.items()}
        for start, word in itertools.product((usual, answers), words_at(fit.points, self.record)):
            if (len(reached) > 1 and start is answers) or self._fit(reached[-1]).error <= EXACT:
                break
            asked = Question("outside", tuple(_unusual(word, self.structure)), "open")
            self.questions = {"outside": asked} | questions
            found = self._swept({"outside": asked.answers[0]} | start)
            is_factor = WORDS[word].numbers is FACTORS and not found["outside"].learned
            if is_factor and math.isclose(found["outside"].number, 1, rel_tol=1e-6):
                continue  # which is what configs have
            if self._fit(found).score[0] > fit.score[0]:
                settled = dataclasses.replace(asked, answers=(found["outside"],))
                self.questions = {"outside": settled} | questions
                reached.append(self._descend(found))
        best = max(
            reached, key=lambda answers: (self._fit(answers).score, -self._fit(answers).error)
        )
        self.questions = dict(questions)
        if "outside" in best:
            self.questions |= {"outside": Question("outside", (best["outside"],), "certain")}
        return best

    def _with_number(self, answers: dict[str, Any]) -> dict[str, Any]:
        """Return the answers with the best number of what no config has."""
        unusual, fit = answers.get("outside"), self._fit(answers)
        if unusual is None or fit.complete or unusual.learned:
            return answers

        def changed(number: float) -> dict[str, Any]:
            return answers | {"outside": unusual._replace(number=number)}

        def distance(number: float) -> float:
            return self._fit(changed(number), fit.points[-1].name).points[-1].distance

        better = changed(best_number(unusual.word, distance, unusual.number))
        return better if self._improves(better, fit) else answers

    def _sweep(self, answers: dict[str, Any]) -> dict[str, Any]:
        """Return the answers after each question got its best answer once."""
        for name, question in self.questions.items():
            best = answers
            for answer in question.answers:
                changed = answers | {name: answer}
                if self._improves(changed, self._fit(best)):
                    best = changed
            answers = best
        for changed in self._stacked_alike(answers):
            if self._improves(changed, self._fit(answers)):
                answers = changed
        return self._with_number(answers)

    def _stacked_alike(self, answers: dict[str, Any]) -> Iterable[dict[str, Any]]:
        """Yield the answers with all fused tensors stacked in one way, for numbers of heads.

        A program that stacks them head by head in one attention does so in all of them, and its
        values are right with the right number of heads only: one change alone improves nothing.
        """
        fused = {
            name: roles
            for name, roles in answers.items()
            if name.startswith("roles of ") and any(_FUSED.search(role) for role in roles)
        }
        for stack in ("rows", "heads") if fused else ():
            alike = {
                name: tuple(_FUSED.sub(rf"\1 {stack}", role) for role in roles)
                for name, roles in fused.items()
            }
            for heads in self.questions["num_heads"].answers:
                yield answers | alike | {"num_heads": heads}

    def _pair(self, answers: dict[str, Any]) -> dict[str, Any]:
        """Return the answers with the best change of two of them."""
        best, point = answers, self._fit(answers).points[-1]
        effective = [
            change
            for change in self._changes(answers)
            if self._fit(answers | dict([change]), point.name).points[-1] != point
        ]
        for first, second in itertools.combinations(effective, 2):
            if first[0] != second[0]:
                changed = answers | dict((first, second))
                if self._improves(changed, self._fit(best)):
                    best = changed
        return best

    def _from_other_starts(self, answers: dict[str, Any]) -> dict[str, Any]:
        """Return the best answers of descents from other norms and placements.

        Several tokens agree further only by other queries and keys, which no start changes.
        """
        if not self._fit(answers).points[-1].name.endswith(" of batch 0"):
            return answers
        starts, reached = self._starts(answers), [answers]

        def score(answers: dict[str, Any]) -> tuple[int, float]:
            return self._fit(answers).score

        def descents() -> Iterator[dict[str, Any]]:
            yield from map(self._swept, starts)
            yield from map(self._descend, sorted(reached, key=score, reverse=True)[:STARTS])
            for start in starts:
                yield from map(self._swept, self._stacked_alike(start))

        for answers in descents():
            if answers not in reached:
                reached.append(answers)
            if self._fit(answers).complete or self._is_over():
                break
        return max(reached, key=score)

    def _swept(self, answers: dict[str, Any]) -> dict[str, Any]:
        """Return answers that no change of one improves."""
        while not self._is_over() and (better := self._sweep(answers)) != answers:
            answers = better
        return answers

    def _refine(self, answers: dict[str, Any]) -> tuple[dict[str, Any], tuple[Alternative, ...]]:
        """Return the answers of the smallest error, and the errors of all others."""
        for _ in range(len(self.questions)):
            fit = self._fit(answers)
            if not fit.complete:
                break
            others = {
                change: self._fit(answers | dict([change])) for change in self._changes(answers)
            }
            complete = {change: other for change, other in others.items() if other.complete}
            change = min(complete, key=lambda c: complete[c].error, default=None)
            if change is None or complete[change].error * CLEAR > fit.error:
                break
            answers = answers | dict([change])
        best, hypothesis = self._fit(answers), self._build(answers)
        alternatives = []
        for name, answer in self._changes(answers):
            if name == "target padding hidden" and answers["later targets hidden"]:
                continue  # padding at the end is later than every token: it is hidden anyway
            changed = answers | {name: answer}
            if self._build(changed) not in (None, hypothesis):
                fit = self._fit(changed)
                if best.complete or len(fit.points) >= len(best.points):
                    alternatives.append(Alternative(name, answer, fit.error))
        return answers, tuple(sorted(alternatives, key=lambda other: other.error))


def _unusual(word: str, structure: Structure) -> Iterator[Outside]:
    """Yield what a program may do, by the usual numbers and by those that its layers learn."""
    if word == "scaled sublayers":
        sides = (("encoder", structure.encoder), ("decoder", structure.decoder))
        for learned in itertools.product(*itertools.starmap(_learned_factors, sides)):
            yield Outside(word, learned=tuple(itertools.chain(*learned)))
    for number in WORDS[word].numbers or (1.0,):
        yield Outside(word, number)


def _learned_factors(side: str, layer: Layer) -> Iterator[list[tuple[str, str]]]:
    """Yield our names of sublayers with the tensors of one number that may be theirs."""
    blocks = [block for block in SUBLAYERS if side == "decoder" or block != "cross_attention"]
    numbers = [name for name in layer.unused if math.prod(layer.stack.shapes[name]) == 1]
    numbers *= len(blocks) if len(numbers) == 1 else 1
    for order in dict.fromkeys(itertools.permutations(numbers, len(blocks))):
        yield [
            (f"{side}.layers.{index}.{block}", layer.stack.name(index, name))
            for index in range(len(layer.stack.indices))
            for block, name in zip(blocks, order, strict=True)
        ]


def layer_modules(structure: Structure) -> dict[str, str]:
    """Return the name of the program's module by our name of a layer."""
    return {
        f"{side}.layers.{place}": layer.module(place)
        for side, layer in (("encoder", structure.encoder), ("decoder", structure.decoder))
        for place in range(len(layer.stack.indices))
    }


def _layer_outputs(structure: Structure, record: Record) -> dict[str, str]:
    """Return the modules by layers, without networks whose output lacks the residual addition."""
    taps = layer_modules(structure)
    for side, layer in (("encoder", structure.encoder), ("decoder", structure.decoder)):
        network, blocks = layer.feed_forward, record.batches[-1].blocks
        last = layer.stack.name(0, network.units[network.roles.index("outer")].matrix)
        names = layer.module(0), last.rpartition(".")[0]
        ours, product = map(blocks.get, names)
        same = names[0] == names[1]  # a module of raw kernels
        if same or ours is None or product is None or product.size != ours.size:
            continue
        if any(np.array_equal(ours, y.reshape(ours.shape)) for y in (product, product.mT)):
            taps = {name: tap for name, tap in taps.items() if not name.startswith(side)}
    return taps


def _fitting_tables(question: Question, structure: Structure, record: Record) -> Question:
    """Return the question without answers whose tables are too small for the record."""
    vocabulary = record.batches[0].output.shape[-1]
    largest = [
        max((int(ids.max()) for ids in side if ids.ndim == 2), default=-1)
        for side in zip(*((batch.src, batch.tgt) for batch in record.batches), strict=True)
    ]

    longest = max(max(batch.src.shape[1], batch.tgt.shape[1]) for batch in record.batches)

    def fits(answer: Tables) -> bool:
        source, target, output, positions = answer
        if source is None:
            return vocabulary == structure.width
        rows = [structure.tables[source].shape[0], structure.tables[target].shape[0]]
        if any(size <= most for size, most in zip(rows, largest, strict=True)):
            return False
        if any(math.prod(structure.tables[i].shape) < longest * structure.width for i in positions):
            return False
        return vocabulary == (structure.width if output is None else rows[1])

    answers = tuple(answer for answer in question.answers if fits(answer))
    if not answers:
        tables = ", ".join(f"{t.matrix} {list(t.shape)}" for t in structure.tables) or "none"
        raise InputError(
            f"the record's logits have {vocabulary} entries and its largest ids are "
            f"{largest[0]} and {largest[1]}; no tables of the weights fit: {tables}"
        )
    return dataclasses.replace(question, answers=answers)
