"""Translates or restores the validation text of a run, and scores it; writes model and pictures."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from jax_transformer.adapters import lora, write_adapter
from jax_transformer.decoding import generate
from jax_transformer.errors import InputError
from jax_transformer.evaluation import scores
from jax_transformer.model.transformer import Params
from jax_transformer.runs.loop import Best
from jax_transformer.runs.metrics import METRICS_FILE, read_metrics
from jax_transformer.runs.model_settings import trained_model
from jax_transformer.runs.state import RunSettings
from jax_transformer.runtime.sharding import make_mesh
from jax_transformer.storage.folder import ADAPTER, MODEL
from jax_transformer.storage.reading import errors_naming
from jax_transformer.storage.writing import staged_file
from jax_transformer.text.batches import pad
from jax_transformer.text.corpus import Corpus
from jax_transformer.text.parallel_text import Text
from jax_transformer.text.plan import plan_epoch
from jax_transformer.transcription.transcriber import Transcriber
from jax_transformer.translation import alignment_plot, model_folder
from jax_transformer.translation.model_folder import TrainedModel
from jax_transformer.translation.translate import translate

GREEDY = {"beam_size": 1, "num_hypotheses": 1}  # whatever the model's defaults are
EXAMPLES = 64  # of each denoiser, at most, that are restored
SOUNDS = 16  # that are transcribed together
SAMPLES = 5  # translations that are shown at an evaluation
CURVES, ATTENTION = "curves.png", "attention.png"  # pictures in the output
AXES = {  # of the curves: label of each panel, from the top; the values that it draws, in words
    "loss, nats a target token": {"loss": "training", "validation_loss": "validation"},
    "learning rate": {"learning_rate": "learning rate"},
    "BLEU of the validation text": {"validation_bleu": "BLEU"},
    "word error rate, %": {"validation_wer": "word error rate"},
}
TRAINING = {"color": "#e69f00", "linewidth": 1}
VALIDATION = {"color": "#0b3c6f", "linewidth": 1.5, "marker": "o", "markersize": 3}


@dataclasses.dataclass
class Evaluation:
    """Translates or transcribes the validation text greedily, with the model's other defaults.

    Of plain text it restores the tokens of some denoising examples.
    """

    settings: RunSettings
    text: Text
    console: Console
    mesh: Mesh
    validation: Corpus
    measured: tuple[int | None, list[str]] = (None, [])  # the last step, and its translations

    def measure(self, step: int, params: Params) -> dict[str, float]:
        """Show scores and translations of the parameters; return the values for the log."""
        shares = {}
        if self.validation.has_texts:
            shares = self._restored_shares(params)
            shown = (f"{task} {share:.1%}" for task, share in shares.items())
            self.console.print(f"tokens restored exactly: {', '.join(shown)}")
        values = {f"validation_restored_{task}": share for task, share in shares.items()}
        return values | (self._translate(step, params) if self.text.targets else {})

    def _restored_shares(self, params: Params) -> dict[str, float]:
        """Return, for each denoiser, the share of its target tokens that greedy search gives.

        A token counts if it stands at its place; EOS is one. Each call takes the same examples.
        """
        config, shares = self.settings.config, {}
        for task, corpus in self.validation.by_task().items():
            if not corpus.has_texts:
                continue
            pieces = plan_epoch(corpus, self.settings.training_config, 0)[0].pieces[:EXAMPLES]
            sides = corpus.read_pieces(pieces).sides()
            sources, targets = ([ids.tolist() for ids in side] for side in zip(*sides, strict=True))
            longest = max(map(len, targets)) - 1  # BOS is given
            src = pad(sources, config.pad_id)
            found = generate(params, config, src, max_new_tokens=longest, beam_size=1)
            tokens = np.asarray(found.tokens)[:, 0]
            expected = pad([target[1:] for target in targets], -1, tokens.shape[1])
            shares[task] = float((tokens == expected).sum() / (expected >= 0).sum())
        return shares

    def _translate(self, step: int, params: Params) -> dict[str, float]:
        """Show scores and translations of the parameters; return BLEU and chrF for the log."""
        # Each of several processes translates by itself: it cannot use the devices of the others.
        alone = jax.process_count() == 1
        mesh = self.mesh if alone else make_mesh("data=-1", jax.local_devices())
        model = trained_model(self.settings, params)
        values = {}
        if self.settings.config.source_features is None:
            found = translate(model, self.text.sources, **GREEDY, console=self.console, mesh=mesh)
            translations = [best.text for best, *_ in found]
        else:
            translations = self._transcribed(model, mesh)
            values["validation_wer"] = scores.word_error_rate(translations, self.text.targets)
            self.console.print(f"word error rate {values['validation_wer']:.2f} %")
        self.measured = step, translations
        arguments = self.settings.arguments
        bleu = scores.bleu(translations, [self.text.targets], arguments["bleu_tokenization"])
        chrf = scores.chrf(translations, [self.text.targets])
        if arguments["source"] is None and arguments["text"] is None:  # the number words
            share = scores.exact_match(translations, [self.text.targets])
            count = len(translations)
            self.console.print(f"exact match on {count:,} held-out numbers: {share:.2%}")
        else:
            self.console.print(bleu.report)
            self.console.print(chrf.report)
        if self.console.is_terminal:  # a log has them once, at the end
            self._show_samples()
        return values | {"validation_bleu": bleu.value, "validation_chrf": chrf.value}

    def _transcribed(self, model: TrainedModel, mesh: Mesh) -> list[str]:
        """Return the text of each validation sound, by one greedy search."""
        arguments, texts = self.settings.arguments, []
        heard = Transcriber(model, batch_size=SOUNDS, mesh=mesh).stream(
            self.text.sources,
            language=arguments["language"],
            task=arguments["task"] or "transcribe",
            beam_size=1,
            temperatures=(0.0,),
            no_speech=1.0,  # no window is silent
        )
        for transcript in heard:
            if transcript.fault is not None:
                raise InputError(transcript.fault)
            texts.append(transcript.text)
        return texts

    def finish(self, output: Path, best: Best) -> None:
        """Write the best model, draw the pictures, and show its translations if not shown last."""
        model = trained_model(self.settings, best.params)
        model_folder.write(output / MODEL, model, self.settings.origin)
        self.console.print(f"model of step {best.step:,} written to {output}")
        if adapter := lora.detach(best.params):
            origin = self.settings.origin
            write_adapter(
                output / ADAPTER,
                adapter,
                self.settings.config,
                family=None if origin is None else origin.model_type,
                base=self.settings.arguments["init"],
                dropout=self.settings.training_config.lora_dropout,
                overwrite=True,
            )
            self.console.print(f"its adapter alone, a folder of PEFT: {output / ADAPTER}")
        else:  # that of a run that this one has overwritten
            shutil.rmtree(output / ADAPTER, ignore_errors=True)
        pictures = {
            output / CURVES: lambda path: draw_curves(path, read_metrics(output / METRICS_FILE))
        }
        if self.text.targets and self.settings.config.source_features is None:
            pictures[output / ATTENTION] = lambda path: self._draw_attention(model, path)
        for picture, draw in pictures.items():
            try:
                draw(picture)
                self.console.print(f"drawn: {picture}")
            except (InputError, OSError) as error:
                self.console.print(f"WARNING: {picture} is not drawn ({error})")
        if not self.text.targets:
            return
        if self.measured[0] != best.step:
            self._translate(best.step, best.params)
        if not self.console.is_terminal:
            self._show_samples()

    def _show_samples(self) -> None:
        triples = zip(self.text.sources, self.measured[1], self.text.targets, strict=True)
        for sample in list(triples)[:: -(-len(self.text.sources) // SAMPLES)]:
            for label, line in zip(("source", "translation", "reference"), sample, strict=True):
                self.console.print(f"  {label + ':':<12} {line}")

    def _draw_attention(self, model: TrainedModel, picture: Path) -> None:
        lines = self.text.sources[: alignment_plot.MAX_LINES]
        best = list(translate(model, lines, **GREEDY))
        drawn = alignment_plot.alignments(model, lines, best)
        alignment_plot.draw(picture, drawn, overwrite=True)


def draw_curves(path: Path, reports: list[dict[str, Any]]) -> None:
    """Draw `reports`, as of `read_metrics`, in `path`: .png, .pdf or .svg; it is replaced."""
    # A figure without pyplot needs no window and leaves no global state.
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter

    known = set().union(*reports)
    drawn = {label: names for label, names in AXES.items() if known.intersection(names)}
    if not drawn:
        raise InputError("there is no report of a loss")
    figure = Figure(figsize=(8, 2.5 * len(drawn)), layout="constrained")
    panels = figure.subplots(len(drawn), sharex=True, squeeze=False)[:, 0]
    for panel, (label, names) in zip(panels, drawn.items(), strict=True):
        for name, words in names.items():
            points = [(report["step"], report[name]) for report in reports if name in report]
            if points:
                # They differ in lightness and in their marks, for readers in grey.
                style = VALIDATION if name.startswith("validation") else TRAINING
                panel.plot(*zip(*points, strict=True), label=words, **style)
        panel.set_ylabel(label)
        panel.spines[["top", "right"]].set_visible(False)
        if "loss" in names:
            panel.set_yscale("log")
            panel.yaxis.set_major_formatter("{x:g}")
            panel.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.4)))
        if len(panel.lines) > 1:
            panel.legend(frameon=False)
    panels[-1].set_xlabel("step")
    with errors_naming(path, "cannot be written", OSError), staged_file(path) as scratch:
        figure.savefig(scratch)
