"""`jax-transformer evaluate`: scores of translations against references."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from jax_transformer.errors import InputError
from jax_transformer.evaluation import scores
from jax_transformer.evaluation.metricx import inputs, load_metricx
from jax_transformer.storage.writing import check_new_file, replace_file
from jax_transformer.text.text_files import decode_lines, open_text


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Print BLEU, chrF and the share of exact matches, with sacrebleu's signatures; and MetricX.

    Line i of each file belongs to line i of the others.

    Attributes:
        translations: File of translations, as translate writes it.
        references: File of references, or several: BLEU and chrF take what is nearest in any of
            them. Without it, MetricX alone judges, by the sources.
        sources: File of sources, for MetricX.
        others: Files of other systems' translations, each compared with TRANSLATIONS by sacrebleu's
            paired bootstrap test: usually, a p below 0.05 is called a difference.
        worst: Print so many lines with the worst scores: MetricX's where it judges, else chrF's.
        line_scores: File to write with the scores of each line, between tabs: BLEU, chrF, MetricX.
        overwrite: Replace that file.
        bleu_tokenization: sacrebleu's tokenization for BLEU; "none" for tokenised text.
        metricx: Folder of a MetricX-23 or MetricX-24.
        metricx_version: 23 or 24: they read other inputs, and their folders do not say which.
        metricx_tokenizer: Folder of the mT5 whose tokenizer MetricX has; by default, --metricx.
    """

    translations: Path
    references: tuple[Path, ...] = ()
    sources: Path | None = None
    others: tuple[Path, ...] = ()
    worst: Annotated[int, Meta(ge=1)] | None = None
    line_scores: Path | None = None
    overwrite: bool = False
    bleu_tokenization: str = "13a"
    metricx: Path | None = None
    metricx_version: Annotated[int, Meta(ge=23, le=24)] | None = None
    metricx_tokenizer: Path | None = None

    def __post_init__(self) -> None:
        """Refuse arguments with which nothing can be scored."""
        scores.check_tokenization(self.bleu_tokenization)
        if (self.metricx is None) != (self.metricx_version is None):
            given = f"metricx={self.metricx}, metricx_version={self.metricx_version}"
            raise InputError(f"{given}: name both of them, or neither")
        if not self.references and (self.metricx is None or self.others):
            raise InputError("references=None: BLEU and chrF need them; name their file")
        if len(self.references) > 1 and self.metricx is not None:
            fault = f"references={' '.join(map(str, self.references))}"
            raise InputError(f"{fault}: MetricX reads one text for each line; name one file")
        if self.others and (self.line_scores or self.worst):
            name = "line_scores" if self.line_scores else "worst"
            raise InputError(f"{name}: the lines are those of one system; leave out others")
        if self.line_scores is not None:
            read = (self.translations, *self.references, self.sources)
            if self.line_scores.resolve() in {path.resolve() for path in read if path}:
                fault = f"{self.line_scores}: is read and would be written"
                raise InputError(f"{fault}; name another output")
            check_new_file(self.line_scores, self.overwrite, "file of line_scores")


def evaluate(arguments: Arguments) -> None:
    """Score the translations of one system, or of several."""
    names, version = [arguments.translations, *arguments.others], arguments.metricx_version
    first = _lines(arguments.translations)
    systems = [first, *(_lines(path, len(first)) for path in arguments.others)]
    references = [_lines(path, len(first)) for path in arguments.references]
    sources = [] if arguments.sources is None else _lines(arguments.sources, len(first))
    tokenization = arguments.bleu_tokenization
    judge, read, chance = None, [], {}
    if version is not None:
        reference = references[0] if references else []
        read = [inputs(version, lines, reference, sources) for lines in systems]
        judge = load_metricx(arguments.metricx, version, arguments.metricx_tokenizer)
    if arguments.others:
        chance = scores.p_values(systems, references, tokenization)
        if not chance:
            print(f"p is not tested: there are fewer than {scores.FEWEST_LINES} lines")
    by_line: dict[str, Sequence[float]] = {}
    for number, (name, lines) in enumerate(zip(names, systems, strict=True)):
        if arguments.others:
            print(f"{name}:")
        if references:
            found = scores.bleu(lines, references, tokenization), scores.chrf(lines, references)
            for score, values in zip(found, chance.values() or ((), ()), strict=True):
                p = f" p = {values[number - 1]:.4f}" if number and values else ""
                print(score.report + p)
            exact = scores.exact_match(lines, references)
            print(f"exact match = {exact:.2%} of {len(lines):,} lines")
        if judge is not None:
            judged = judge(read[number])
            print(f"MetricX-{version} = {judged.mean():.4f} (0 is the best, 25 the worst)")
            by_line["MetricX"] = judged.tolist()
    if references and (arguments.line_scores or arguments.worst):
        found = scores.line_scores(first, references, tokenization)
        by_line = {**dict(zip(("BLEU", "chrF"), found, strict=True)), **by_line}
    if arguments.line_scores is not None:
        rows = zip(*by_line.values(), strict=True)
        lines = ("\t".join(map("{:.4f}".format, row)) + "\n" for row in rows)
        replace_file(arguments.line_scores, "".join(lines).encode())
    if arguments.worst is not None:
        named = [("source", sources)] if sources else []
        named += [("translation", first), *(("reference", lines) for lines in references)]
        _print_worst(arguments.worst, by_line, named)


def _print_worst(
    count: int, by_line: Mapping[str, Sequence[float]], named: Sequence[tuple[str, list[str]]]
) -> None:
    """Print the lines with the worst scores of the last measure, the worst first."""
    measure, values = [*by_line.items()][-1]
    order = sorted(range(len(values)), key=values.__getitem__, reverse=measure == "MetricX")
    for place in order[:count]:
        print(f"line {place + 1}: {measure} = {values[place]:.2f}")
        for name, lines in named:
            print(f"  {name + ':':<12} {lines[place]}")


def _lines(path: Path, expected: int | None = None) -> list[str]:
    """Return the lines of a file, which must be as many as expected."""
    with open_text(path) as file:
        lines = list(decode_lines(file, str(path)))
    if not lines:
        raise InputError(f"{path}: has no lines; name a file with a line for each translation")
    if expected is not None and len(lines) != expected:
        fault = f"{path}: has {len(lines):,} lines, but the translations {expected:,}"
        raise InputError(f"{fault}; line i of one file must belong to line i of the other")
    return lines
