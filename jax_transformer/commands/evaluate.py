"""`jax-transformer evaluate`: scores of translations against references."""

import dataclasses
import os
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from jax_transformer.errors import InputError
from jax_transformer.evaluation import scores
from jax_transformer.evaluation.metricx import inputs, load_metricx
from jax_transformer.text.text_files import decode_lines, open_text


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Print BLEU, chrF and the share of exact matches, with sacrebleu's signatures; and MetricX.

    Line i of each file belongs to line i of the others.

    Attributes:
        translations: File of translations, as translate writes it.
        references: File of references. Without it, MetricX alone judges, by the sources.
        sources: File of sources, for MetricX.
        others: Files of other systems' translations, each compared with TRANSLATIONS by sacrebleu's
            paired bootstrap test: usually, a p below 0.05 is called a difference.
        bleu_tokenization: sacrebleu's tokenization for BLEU; "none" for tokenised text.
        metricx: Folder of a MetricX-23 or MetricX-24.
        metricx_version: 23 or 24: they read other inputs, and their folders do not say which.
        metricx_tokenizer: Folder of the mT5 whose tokenizer MetricX has; by default, --metricx.
    """

    translations: Path
    references: Path | None = None
    sources: Path | None = None
    others: tuple[Path, ...] = ()
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
        if self.references is None and (self.metricx is None or self.others):
            raise InputError("references=None: BLEU and chrF need them; name their file")


def evaluate(arguments: Arguments) -> None:
    """Score the translations of one system, or of several."""
    names, version = [arguments.translations, *arguments.others], arguments.metricx_version
    paths, tokenization = [arguments.references, arguments.sources], arguments.bleu_tokenization
    *systems, references, sources = map(_lines, [*names, *paths])
    for path, lines in zip([*names, *paths], [*systems, references, sources], strict=True):
        if path and not len(lines) == len(systems[0]) > 0:
            fault = f"{path}: has {len(lines):,} lines, but the translations {len(systems[0]):,}"
            raise InputError(f"{fault}; line i of one file must belong to line i of the other")
    judge, read, chance = None, [], {}
    if version is not None:
        read = [inputs(version, lines, references, sources) for lines in systems]
        judge = load_metricx(arguments.metricx, version, arguments.metricx_tokenizer)
    if arguments.others:
        chance = scores.p_values(systems, references, tokenization)
    for number, (name, lines) in enumerate(zip(names, systems, strict=True)):
        if arguments.others:
            print(f"{name}:")
        if references:
            found = scores.bleu(lines, references, tokenization), scores.chrf(lines, references)
            for score, values in zip(found, chance.values() or ((), ()), strict=True):
                print(score.report + (f" p = {values[number - 1]:.4f}" if number else ""))
            exact = scores.exact_match(lines, references)
            print(f"exact match = {exact:.2%} of {len(lines):,} lines")
        if judge is not None:
            mean = judge(read[number]).mean()
            print(f"MetricX-{version} = {mean:.4f} (0 is the best, 25 the worst)")


def _lines(path: Path | None) -> list[str]:
    """Return the lines of a file; none without a file."""
    if path is None:
        return []
    with open_text(path) as file:
        return list(decode_lines(file, os.fspath(path)))
