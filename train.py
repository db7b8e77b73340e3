"""Train a translation model: `python train.py` alone, or with four text files; see --help.

Without files the task is the embedded one, English number words to German ones.
"""

import argparse
import contextlib
import dataclasses
import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import tyro
from jax.sharding import Mesh
from rich.console import Console

from jax_transformer.config import TransformerConfig
from jax_transformer.data import number_words
from jax_transformer.data.batches import encode_corpus
from jax_transformer.data.corpus import ParallelCorpus, read_parallel
from jax_transformer.data.tokenizer import BytePairTokenizer, Tokenizer
from jax_transformer.decoding import check_generates
from jax_transformer.errors import InputError
from jax_transformer.model import Params
from jax_transformer.runtime import distributed
from jax_transformer.runtime.attention_backend import choose_for
from jax_transformer.runtime.host_memory import keep_freed_memory
from jax_transformer.runtime.sharding import describe, make_mesh
from jax_transformer.training.config import TrainingConfig
from jax_transformer.training.run import loop
from jax_transformer.training.run.checkpoints import Restored, restore
from jax_transformer.training.run.curves import draw_curves
from jax_transformer.training.run.metrics import METRICS_FILE, check_tensorboard, read_metrics
from jax_transformer.training.run.output import SETTINGS_FILE, check_output, claimed
from jax_transformer.training.run.settings_file import read_settings, to_yaml, write_settings
from jax_transformer.training.run.signals import Stopped, stop_requests
from jax_transformer.training.run.state import RunSettings, check_equal, check_same, corpus_digest
from jax_transformer.translation import alignment_plot, scores
from jax_transformer.translation import model_folder as checkpoint
from jax_transformer.translation.translate import translate

SAMPLES = 5  # translations printed at an evaluation and at the end
CURVES, ATTENTION = "curves.png", "attention.png"  # pictures in the output
FILES = ("source", "target", "valid_source", "valid_target")
# What no other start may take over; and what does not make a run another one.
OF_ONE_START = ("config", "overwrite", "resume", "coordinator", "num_processes", "process_id")
OF_THIS_CALL = (*OF_ONE_START, "output", "mesh", "lost_after", "keep_freed_memory", "training")


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Train a Transformer to translate, and write a checkpoint for `jax-transformer translate`.

    Without files the task is the embedded one, and the defaults are made for it; with --source
    they are made for some ten thousand sentences, and `--source FILE --help` shows them.
    """

    config: Path | None = None
    """YAML file of these settings, those of the training under `training`; flags beside it win."""

    source: Path | None = None
    """Training text, one sentence a line, plain or gzip."""

    target: Path | None = None
    """Its translation, line beside line."""

    valid_source: Path | None = None
    """Text that is held out, to choose the best parameters and to be translated at the end."""

    valid_target: Path | None = None
    """Its translation, line beside line."""

    output: Path | None = None
    """Directory of the checkpoint; if None, the first free one of runs/0, runs/1, ..."""

    overwrite: bool = False
    """Replace the checkpoint that is at --output."""

    resume: bool = False
    """Go on with the run that is at --output, under its own settings, from its last checkpoint."""

    tensorboard: bool = False
    """Write events for TensorBoard as well, into tensorboard/ in the output."""

    mesh: str | None = None
    """All of the devices as axes, such as data=4,fsdp=2: "data" has copies of the model, "fsdp"
    splits what it keeps, "tensor" its products; -1 takes what is left. If None, one device."""

    coordinator: str | None = None
    """Of several processes, host:port of the first one; the port is free there."""

    num_processes: int | None = None
    """How many processes there are."""

    process_id: int | None = None
    """Which of them this is, from 0."""

    lost_after: int = 120
    """Seconds of silence after which another process counts as lost, and this one ends."""

    keep_freed_memory: bool = True
    """Keep a step's memory for the next one, which is faster on a CPU; Linux only."""

    bleu_tokenization: str = "13a"
    """sacrebleu's tokenization for BLEU; "none" for text that is tokenised already."""

    preset: str = "vaswani2017"
    """The described implementation to train; the sizes below are set in it."""

    vocab_size: int = 6000
    """Entries of the byte-pair encoding that both languages share."""

    d_model: int = 256
    """Width of the residual stream."""

    num_heads: int = 8
    """Attention heads."""

    d_ff: int = 512
    """Inner width of the feed-forward networks."""

    num_encoder_layers: int = 3
    """Layers of the encoder."""

    num_decoder_layers: int = 3
    """Layers of the decoder."""

    dropout: float = 0.1
    """Dropout rate, wherever the preset drops."""

    max_length: int = 128
    """Most tokens of a sentence; a training pair with a longer one is dropped and counted."""

    training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)


NUMBER_WORDS = Arguments(
    vocab_size=90,
    d_model=64,
    num_heads=4,
    d_ff=256,
    num_encoder_layers=2,
    num_decoder_layers=2,
    dropout=0.0,
    max_length=64,
    training=TrainingConfig(
        steps=1000,
        warmup_steps=200,
        cooldown_steps=500,
        learning_rate_factor=0.5,
        label_smoothing=0.0,
        max_tokens=1536,
        bucket_count=4,
        evaluation_interval=250,
    ),
)


def main() -> None:
    """Parse the command line and train; an input error is one line and exit code 1."""
    console = Console(markup=False, highlight=False, soft_wrap=True)
    keep_compilations()
    try:
        arguments, resumed = parse(defaults(sys.argv[1:])), None
        if arguments.keep_freed_memory:
            keep_freed_memory()
        distributed.initialize(
            arguments.coordinator,
            arguments.num_processes,
            arguments.process_id,
            lost_after=arguments.lost_after,
        )
        console.quiet = not distributed.is_main()
        if arguments.resume:
            arguments, resumed = parse_resumed(arguments, console)
        run(arguments, resumed, console)
    except Stopped as stopped:
        console.print(str(stopped))
        sys.exit(stopped.exit_code)
    except Exception as error:
        distributed.fail(error)


def keep_compilations() -> None:
    """Keep what XLA compiles in the user's cache folder, unless JAX is told of another one."""
    if jax.config.jax_compilation_cache_dir is None:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(folder / "jax-transformer"))


def defaults(argv: list[str]) -> Arguments:
    """Return what the command line's flags are set in: made for the task, or a file's settings.

    Raises:
        InputError: `read_settings` refuses the file.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--source")
    named, _ = parser.parse_known_args(argv)
    if named.config:
        return read_settings(named.config, Arguments())
    return Arguments() if named.source else NUMBER_WORDS


def parse(default: Arguments) -> Arguments:
    """Return the command line's arguments; what it does not name is as in `default`."""
    config = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
    return tyro.cli(Arguments, default=default, config=config)


def parse_resumed(arguments: Arguments, console: Console) -> tuple[Arguments, Restored]:
    """Return the run that is to go on, and its arguments with the command line's in their place.

    Raises:
        InputError: No run is named or there is none, or the command line asks for another one.
    """
    if arguments.output is None or arguments.overwrite:
        raise InputError("resume=True needs --output, the run's directory, and no --overwrite")
    resumed = restore(arguments.output / loop.CHECKPOINTS, console)
    saved = arguments_from_json(resumed.settings)
    arguments = parse(dataclasses.replace(saved, output=arguments.output))
    check_equal("vocab_size", saved.vocab_size, arguments.vocab_size)
    step = resumed.checkpoint.progress.step
    console.print(f"resumed at step {step:,} of {arguments.training.steps:,}")
    return arguments, resumed


def run(arguments: Arguments, resumed: Restored | None, console: Console) -> None:
    """Read, train, write the checkpoint, translate the held-out text."""
    started = time.monotonic()
    is_main = distributed.is_main()
    if is_main and arguments.output and not resumed:
        check_output(arguments.output, arguments.overwrite)
    arguments.training.check()
    mesh = make_mesh(arguments.mesh or ("data=-1" if jax.process_count() > 1 else None))
    scores.check_tokenization(arguments.bleu_tokenization)
    if arguments.tensorboard:
        check_tensorboard()

    training, validation = read_corpora(arguments)
    if resumed:
        tokenizer = resumed.settings.tokenizer
    else:
        tokenizer = BytePairTokenizer.train(
            training.sources + training.targets, arguments.vocab_size
        )
    config = model_config(arguments, tokenizer)
    training_ids = encode_corpus(training, tokenizer, config.max_length)
    validation_ids = encode_corpus(validation, tokenizer, config.max_length)
    if validation_ids.dropped_overlong:
        raise InputError(
            f"max_length={config.max_length} is too short for {validation_ids.dropped_overlong:,} "
            f"of {len(validation.sources):,} validation pairs; raise it or leave them out"
        )
    console.print(f"training: {training.report()}; {training_ids.report()}")
    console.print(f"validation: {validation.report()}; {validation_ids.report()}")

    settings = RunSettings(
        config,
        arguments.training,
        tokenizer,
        corpus_digest(training_ids, validation_ids),
        arguments_to_json(arguments),
    )
    output = arguments.output or first_free_run()
    if resumed:
        check_same(resumed.settings, settings, resumed.checkpoint.progress.step)
    distributed.check_agreement(facts(settings, mesh))
    arguments = dataclasses.replace(arguments, output=output)
    console.print(to_yaml(arguments, OF_ONE_START), end="")
    console.print(describe(mesh))
    dropped = config.attention_dropout_rate > 0
    console.print(
        str(
            choose_for(
                mesh.devices.flat[0], arguments.training.compute_dtype, config.head_dim, dropped
            )
        )
    )

    # Of several processes each translates by itself, the others' devices being out of its reach.
    own_mesh = mesh if jax.process_count() == 1 else make_mesh("data=-1", jax.local_devices())

    def measure(params: Params) -> dict[str, float]:
        model = checkpoint.TrainedModel(config, params, tokenizer)
        bleu = show_translations(model, validation, arguments, console, own_mesh)
        return {"validation_bleu": bleu.value}

    by_bleu = arguments.training.select_by == "bleu"
    with stop_requests() as stop, claimed(output) if is_main else contextlib.nullcontext():
        if is_main and not resumed:
            loop.discard_run(output)
        if is_main:
            write_settings(output / SETTINGS_FILE, arguments, OF_ONE_START)
        this_run = loop.Run(
            output,
            settings,
            resumed.checkpoint if resumed else None,
            stop,
            measure if arguments.source or by_bleu else None,
            arguments.tensorboard,
            mesh,
            arguments.lost_after,
        )
        best = loop.train(this_run, training_ids, validation_ids, console)
    if not is_main:
        return
    trained = checkpoint.TrainedModel(config, best.params, tokenizer)
    checkpoint.write(output, trained)
    console.print(f"checkpoint of step {best.step:,} written to {output}")

    draw_curves(output / CURVES, read_metrics(output / METRICS_FILE))
    some = validation.sources[: alignment_plot.MAX_LINES]
    alignments = alignment_plot.alignments(trained, some, translate(trained, some))
    alignment_plot.draw(output / ATTENTION, alignments, overwrite=True)
    console.print(f"drawn: {output / CURVES}, {output / ATTENTION}")
    show_translations(trained, validation, arguments, console, own_mesh)
    console.print(f"wall time, compilation included: {time.monotonic() - started:.0f} s")


def facts(settings: RunSettings, mesh: Mesh) -> dict[str, str]:
    """Return what all processes of a run must have in common, by name."""
    shared = {"library": distributed.library_digest(), "jax": jax.__version__}
    shared |= dataclasses.asdict(settings.config) | dataclasses.asdict(settings.training_config)
    shared |= {"tokenizer": settings.tokenizer.digest(), "text": settings.data_sha256}
    shared |= {"mesh": describe(mesh)}
    return {name: str(value) for name, value in shared.items()}


def show_translations(
    model: checkpoint.TrainedModel,
    validation: ParallelCorpus,
    arguments: Arguments,
    console: Console,
    mesh: Mesh,
) -> scores.Score:
    """Translate the held-out text, show some of it and how good it is; return its BLEU."""
    hypotheses = translate(model, validation.sources, console=console, mesh=mesh)
    translations = [best.text for best, *_ in hypotheses]
    triples = list(zip(validation.sources, translations, validation.targets, strict=True))
    for source, translation, reference in triples[:: -(-len(triples) // SAMPLES)]:
        console.print(f"  {source}\n    {translation}\n    ({reference})")
    bleu = scores.bleu(translations, validation.targets, arguments.bleu_tokenization)
    if arguments.source:
        console.print(bleu.report)
        console.print(scores.chrf(translations, validation.targets).report)
    else:
        share = scores.exact_match(translations, validation.targets)
        console.print(f"exact match on {len(translations):,} held-out numbers: {share:.2%}")
    return bleu


def read_corpora(arguments: Arguments) -> tuple[ParallelCorpus, ParallelCorpus]:
    """Return the training and the held-out pairs: of the four files, or the number words.

    Raises:
        InputError: Some of the files are not named, or cannot be used.
    """
    paths = [getattr(arguments, name) for name in FILES]
    if not any(paths):
        return number_words.corpus(arguments.training.seed)
    for name, path in zip(FILES, paths, strict=True):
        if path is None:
            raise InputError(f"{name}=None: name all four of {', '.join(FILES)}, or none")
    return read_parallel(*paths[:2]), read_parallel(*paths[2:])


def model_config(arguments: Arguments, tokenizer: Tokenizer) -> TransformerConfig:
    """Return the shape of the model.

    Raises:
        InputError: A size is wrong, or the preset is no model of token ids.
    """
    config = TransformerConfig.preset(
        arguments.preset,
        src_vocab_size=tokenizer.vocab_size,
        tgt_vocab_size=tokenizer.vocab_size,
        d_model=arguments.d_model,
        num_heads=arguments.num_heads,
        d_ff=arguments.d_ff,
        num_encoder_layers=arguments.num_encoder_layers,
        num_decoder_layers=arguments.num_decoder_layers,
        dropout=arguments.dropout,
        max_length=arguments.max_length,
        pad_id=tokenizer.pad_id,
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
    )
    check_generates(config)
    return config


def arguments_to_json(arguments: Arguments) -> dict[str, Any]:
    """Return what `arguments_from_json` needs beside the settings of the training."""
    kept = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(arguments)}
    for name in OF_THIS_CALL:
        del kept[name]
    return kept | {name: str(kept[name].absolute()) for name in FILES if kept[name]}


def arguments_from_json(settings: RunSettings) -> Arguments:
    """Return the arguments that a run was started with."""
    kept = settings.arguments
    paths = {name: Path(kept[name]) for name in FILES if kept[name]}
    return Arguments(**kept | paths, training=settings.training_config)


def first_free_run() -> Path:
    """Return the first of runs/0, runs/1, ... that does not exist."""
    runs = (Path("runs") / str(number) for number in itertools.count())
    return next(run for run in runs if not run.exists())


if __name__ == "__main__":
    main()
