"""`jax-transformer train`: train a model on parallel text, or on the embedded number words."""

import argparse
import contextlib
import dataclasses
import itertools
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import tyro
from jax.sharding import Mesh
from rich.console import Console

from jax_transformer.commands.extras import check_installed
from jax_transformer.data.tokenizer import BytePairTokenizer
from jax_transformer.errors import InputError
from jax_transformer.runtime import distributed
from jax_transformer.runtime.attention_backend import choose_for
from jax_transformer.runtime.host_memory import keep_freed_memory
from jax_transformer.runtime.sharding import describe, make_mesh
from jax_transformer.training.config import TrainingConfig
from jax_transformer.training.objective import check_packs
from jax_transformer.training.run import loop
from jax_transformer.training.run.checkpoint_format import TRAINING_CONFIG_NAMES
from jax_transformer.training.run.checkpoints import Restored, restore
from jax_transformer.training.run.corpora import (
    EncodedCorpora,
    Files,
    check_files,
    encode_corpora,
    read_corpora,
)
from jax_transformer.training.run.model_settings import (
    ModelSettings,
    check_model,
    model_config,
    named_fields,
    preset_settings,
    settings_of,
)
from jax_transformer.training.run.output import SETTINGS_FILE, check_output, claimed
from jax_transformer.training.run.settings_file import read_mapping, replace_fields, to_yaml
from jax_transformer.training.run.signals import Stopped, StopRequest, stop_requests
from jax_transformer.training.run.state import RunSettings, check_equal, check_same, corpus_digest
from jax_transformer.translation import scores
from jax_transformer.translation.evaluation import Evaluation

# Arguments that hold for one start of the program, and are not written to settings.yaml; and those
# that may differ when a run is resumed.
OF_ONE_START = ("config", "overwrite", "resume", "coordinator", "num_processes", "process_id")
NOT_KEPT = (*OF_ONE_START, "output", "mesh", "lost_after", "keep_freed_memory", "training", "model")
# Sizes of the model for some ten thousand sentences, and for the number words.
TEXT_SIZES = {
    "d_model": 256,
    "num_heads": 8,
    "d_ff": 512,
    "num_encoder_layers": 3,
    "num_decoder_layers": 3,
    "max_length": 128,
    "dropout": 0.1,
}
NUMBER_WORDS_SIZES = {
    "d_model": 64,
    "num_heads": 4,
    "d_ff": 256,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "max_length": 64,
    "dropout": 0.0,
}


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Train a Transformer to translate, and write a model for `jax-transformer translate`.

    Without files the task is the embedded one, English number words to German ones, and the
    defaults are made for it. With --source they are made for some ten thousand sentences: see
    `--source FILE --help`.
    """

    config: Path | None = None
    """YAML file with these settings: the model's fields under `model`, those of the training under
    `training`. Flags win over the file, the file over the preset."""

    source: Path | None = None
    """Training text, one sentence a line, plain or gzip."""

    target: Path | None = None
    """Translation of the training text, line by line."""

    valid_source: Path | None = None
    """Validation text: selects the best parameters and is translated at the end."""

    valid_target: Path | None = None
    """Translation of the validation text, line by line."""

    valid_pairs: int | None = None
    """Without validation files, pairs of the training text that are held out for validation, chosen
    by --seed; if None, 5 % of them, at least 1 and at most 1,000."""

    output: Path | None = None
    """Directory of the run and of its model; if None, the first free one of runs/0, runs/1, ..."""

    overwrite: bool = False
    """Replace the model that is in --output."""

    resume: bool = False
    """Continue the run in --output from its last checkpoint, with its own settings."""

    tensorboard: bool = False
    """Also write events for TensorBoard, into tensorboard/ in the output."""

    mesh: str | None = None
    """Axes of the devices, such as data=4,fsdp=2: "data" copies the model, "fsdp" splits parameters
    and optimizer, "tensor" the matrix products; -1 takes the other devices. If None, one device."""

    coordinator: str | None = None
    """With several processes, host:port of the first one; the port must be free there."""

    num_processes: int | None = None
    """Number of processes."""

    process_id: int | None = None
    """Number of this process, from 0."""

    lost_after: int = 120
    """Seconds of silence after which another process counts as lost, and this one ends."""

    keep_freed_memory: bool = True
    """Keep the memory of a step for the next one, which is faster on a CPU; Linux only."""

    bleu_tokenization: str = "13a"
    """sacrebleu's tokenization for BLEU; "none" for text that is tokenised already."""

    preset: str = "vaswani2017"
    """The described implementation to train. It gives the fields of the model that are not named;
    sizes that it leaves open are those of the task."""

    vocab_size: int = 6000
    """Entries of the byte-pair encoding that both languages share."""

    model: ModelSettings = dataclasses.field(
        default_factory=lambda: preset_settings("vaswani2017", TEXT_SIZES)
    )
    """Fields of TransformerConfig. Vocabulary sizes and special ids (pad, BOS, EOS) come from the
    tokenizer."""

    training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)
    """Batches, schedule, optimizer and objective."""

    @property
    def files(self) -> Files:
        """The text files."""
        return Files(self.source, self.target, self.valid_source, self.valid_target)

    def to_mapping(self) -> dict[str, Any]:
        """Return the settings for settings.yaml, the model by its preset and what differs."""
        mapping = dataclasses.asdict(self)
        mapping["model"] = named_fields(self.model, self.preset, TEXT_SIZES)
        return {name: value for name, value in mapping.items() if name not in OF_ONE_START}


NUMBER_WORDS = Arguments(
    vocab_size=90,
    model=preset_settings("vaswani2017", NUMBER_WORDS_SIZES),
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


def train(*argv: str) -> None:
    """Parse the command line and train; an input error is one line and exit code 1."""
    console = Console(markup=False, highlight=False, soft_wrap=True)
    keep_compilations()
    try:
        arguments, resumed = parse(argv, defaults(argv)), None
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
            arguments, resumed = parse_resumed(argv, arguments, console)
        run(arguments, resumed, console)
    except Stopped as stopped:
        console.print(str(stopped))
        sys.exit(stopped.exit_code)
    except Exception as error:
        distributed.fail(error)


def keep_compilations() -> None:
    """Keep what XLA compiles in the user's cache folder, unless JAX is given another one."""
    if jax.config.jax_compilation_cache_dir is None:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(folder / "jax-transformer"))


def defaults(argv: Sequence[str]) -> Arguments:
    """Return the arguments that hold where the command line names no others.

    They are those of the task, in the sizes of the preset, with the settings of a file.

    Raises:
        InputError: The preset is unknown, or `replace_fields` refuses the file.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--source")
    parser.add_argument("--preset")
    named, _ = parser.parse_known_args(list(argv))
    if named.config is None and named.source is None:
        return with_preset(NUMBER_WORDS, named.preset, NUMBER_WORDS_SIZES)
    if named.config is None:
        return with_preset(Arguments(), named.preset, TEXT_SIZES)
    read = with_present_names(read_mapping(named.config), named.config)
    task = with_preset(Arguments(), named.preset or read.get("preset"), TEXT_SIZES)
    return replace_fields(task, read, str(named.config))


def with_preset(task: Arguments, preset: str | None, sizes: dict[str, Any]) -> Arguments:
    """Return a task's arguments with another preset in the task's sizes; None changes nothing.

    Raises:
        InputError: The preset is unknown.
    """
    if preset is None:
        return task
    return dataclasses.replace(task, preset=preset, model=preset_settings(preset, sizes))


def with_present_names(read: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return a file's settings under their present names.

    Files of earlier versions have the sizes of the model beside `model`, and other names in
    `training`.

    Raises:
        InputError: A size is there twice.
    """
    sizes = {name: read.pop(name) for name in TEXT_SIZES if name in read}
    model = read.get("model", {})
    if sizes and isinstance(model, dict):
        for name in sizes.keys() & model.keys():
            raise InputError(f"{path}: {name} is there twice; keep the one under model")
        read["model"] = sizes | model
    if isinstance(read.get("training"), dict):
        read["training"] = {
            TRAINING_CONFIG_NAMES.get(name, name): value for name, value in read["training"].items()
        }
    return read


def parse(argv: Sequence[str], default: Arguments) -> Arguments:
    """Return the command line's arguments; those that it does not name are as in `default`."""
    return tyro.cli(
        Arguments,
        prog="jax-transformer train",
        args=list(argv),
        default=default,
        config=(tyro.conf.OmitArgPrefixes,),
    )


def parse_resumed(
    argv: Sequence[str], arguments: Arguments, console: Console
) -> tuple[Arguments, Restored]:
    """Return the arguments of the run in --output, and the run; the command line's win.

    Raises:
        InputError: There is no such run, or the command line asks for another one.
    """
    if arguments.output is None or arguments.overwrite:
        raise InputError("resume=True needs --output, the run's directory, and no --overwrite")
    resumed = restore(arguments.output / loop.CHECKPOINTS, console)
    saved = arguments_of_run(resumed.settings)
    arguments = parse(argv, dataclasses.replace(saved, output=arguments.output))
    for name in ("preset", "vocab_size", "valid_pairs"):
        check_equal(name, getattr(saved, name), getattr(arguments, name))
    step = resumed.checkpoint.progress.step
    console.print(f"resumed at step {step:,} of {arguments.training.steps:,}")
    return arguments, resumed


def run(arguments: Arguments, resumed: Restored | None, console: Console) -> None:
    """Read the text, train, write the model, translate the validation text."""
    started = time.monotonic()
    is_main = distributed.is_main()
    if is_main and arguments.output and not resumed:
        check_output(arguments.output, arguments.overwrite)
    check_values(arguments)
    mesh = make_mesh(arguments.mesh or ("data=-1" if jax.process_count() > 1 else None))

    settings, corpora = prepare(arguments, resumed, console)
    arguments = dataclasses.replace(arguments, output=arguments.output or first_free_run())
    if resumed:
        check_same(resumed.settings, settings, resumed.checkpoint.progress.step)
    distributed.check_agreement(facts(settings, mesh))
    show_settings(arguments, settings, mesh, console)

    exact = arguments.source is None
    evaluation = Evaluation(
        settings, corpora.validation_text, arguments.bleu_tokenization, exact, console, mesh
    )
    claim = claimed(arguments.output) if is_main else contextlib.nullcontext()
    with stop_requests(console.print) as stop, claim:
        if is_main:
            start_directory(arguments, resumed)
        this_run = make_run(arguments, settings, resumed, stop, evaluation)
        best = loop.train(this_run, corpora.training, corpora.validation, console)
    if is_main:
        evaluation.finish(arguments.output, best)
        console.print(f"wall time, compilation included: {time.monotonic() - started:.0f} s")
        console.print(next_commands(arguments))


def check_values(arguments: Arguments) -> None:
    """Refuse arguments that cannot work, before any text is read.

    Raises:
        InputError: A value is wrong; the message names it.
        ModuleNotFoundError: A library is missing that is needed later.
    """
    arguments.training.check()
    config = check_model(arguments.model, arguments.vocab_size)
    if arguments.training.batching == "packed":
        check_packs(config)
    check_files(arguments.files, arguments.valid_pairs)
    scores.check_tokenization(arguments.bleu_tokenization)
    check_installed("matplotlib")
    if arguments.tensorboard:
        check_installed("tensorboardX")


def prepare(
    arguments: Arguments, resumed: Restored | None, console: Console
) -> tuple[RunSettings, EncodedCorpora]:
    """Read the text, train the tokenizer on it or take that of the run, encode the text.

    Raises:
        InputError: A file cannot be used, or the model does not fit it.
    """
    seed = arguments.training.seed
    corpora = read_corpora(arguments.files, arguments.valid_pairs, seed)
    if resumed:
        tokenizer = resumed.settings.tokenizer
    else:
        lines = corpora.training.sources + corpora.training.targets
        tokenizer = BytePairTokenizer.train(lines, arguments.vocab_size)
    config = model_config(arguments.model, tokenizer)
    encoded = encode_corpora(corpora, tokenizer, config.max_length)
    for line in encoded.report:
        console.print(line)
    settings = RunSettings(
        config,
        arguments.training,
        tokenizer,
        corpus_digest(encoded.training, encoded.validation),
        kept_arguments(arguments),
    )
    return settings, encoded


def show_settings(
    arguments: Arguments, settings: RunSettings, mesh: Mesh, console: Console
) -> None:
    """Show the settings as resolved, the devices and the implementation of attention."""
    console.print(to_yaml(arguments.to_mapping()), end="")
    console.print(describe(mesh))
    config = settings.config
    device, dtype = mesh.devices.flat[0], arguments.training.compute_dtype
    dropped = config.attention_dropout_rate > 0
    console.print(str(choose_for(device, dtype, config.head_dim, dropped)))


def start_directory(arguments: Arguments, resumed: Restored | None) -> None:
    """Write settings.yaml; remove the checkpoints of a run that is overwritten."""
    if not resumed:
        loop.discard_run(arguments.output)
    text = to_yaml(arguments.to_mapping())
    (arguments.output / SETTINGS_FILE).write_text(text, encoding="utf-8")


def make_run(
    arguments: Arguments,
    settings: RunSettings,
    resumed: Restored | None,
    stop: StopRequest,
    evaluation: Evaluation,
) -> loop.Run:
    """Return the run; the number words are translated at its end only, unless BLEU selects."""
    translating = arguments.source or arguments.training.select_by == "bleu"
    return loop.Run(
        arguments.output,
        settings,
        resumed.checkpoint if resumed else None,
        stop,
        evaluation.measure if translating else None,
        arguments.tensorboard,
        evaluation.mesh,
        arguments.lost_after,
    )


def next_commands(arguments: Arguments) -> str:
    """Return the commands that translate with the model and score a translated file."""
    output = shlex.quote(str(arguments.output))
    lines = [f"to translate: jax-transformer translate {output} < FILE"]
    if arguments.source:
        tokenization = shlex.quote(arguments.bleu_tokenization)
        lines.append(
            f"to score: jax-transformer translate {output} < FILE | "
            f"sacrebleu REFERENCE --tokenize {tokenization}"
        )
    return "\n".join(lines)


def facts(settings: RunSettings, mesh: Mesh) -> dict[str, str]:
    """Return the facts that all processes of a run must have in common, by name."""
    shared = {"library": distributed.library_digest(), "jax": jax.__version__}
    shared |= dataclasses.asdict(settings.config) | dataclasses.asdict(settings.training_config)
    shared |= {"tokenizer": settings.tokenizer.digest(), "text": settings.data_sha256}
    shared |= {"mesh": describe(mesh)}
    return {name: str(value) for name, value in shared.items()}


def kept_arguments(arguments: Arguments) -> dict[str, Any]:
    """Return the arguments that `arguments_of_run` needs beside the other settings, as JSON."""
    kept = {
        field.name: getattr(arguments, field.name)
        for field in dataclasses.fields(arguments)
        if field.name not in NOT_KEPT
    }
    return kept | {name: str(kept[name].absolute()) for name in Files._fields if kept[name]}


def arguments_of_run(settings: RunSettings) -> Arguments:
    """Return the arguments that a run was started with; its config says what the model is."""
    known = {field.name for field in dataclasses.fields(Arguments)}
    kept = {name: value for name, value in settings.arguments.items() if name in known}
    paths = {name: Path(kept[name]) for name in Files._fields if kept.get(name)}
    return Arguments(
        **kept | paths, model=settings_of(settings.config), training=settings.training_config
    )


def first_free_run() -> Path:
    """Return the first of runs/0, runs/1, ... that does not exist."""
    runs = (Path("runs") / str(number) for number in itertools.count())
    return next(path for path in runs if not path.exists())
