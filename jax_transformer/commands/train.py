"""`jax-transformer train`: train a model on parallel or plain text, or on the number words."""

import dataclasses
import itertools
import shlex
import sys
import time
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path

import jax
from jax.sharding import Mesh
from rich.console import Console

from jax_transformer.commands.compilation_cache import keep_compilations
from jax_transformer.commands.train_arguments import NamedSettings, named_settings, new_arguments
from jax_transformer.config.declared import differing_fields
from jax_transformer.errors import InputError, check_installed
from jax_transformer.evaluation import scores
from jax_transformer.model.tree import in_dtype
from jax_transformer.runs import loop
from jax_transformer.runs.arguments import (
    TEXT_SIZES,
    Arguments,
    arguments_of_run,
    check_resumed,
    kept_arguments,
)
from jax_transformer.runs.checkpoints import CheckpointFolder, restore, steps_in
from jax_transformer.runs.corpora import Corpora, encode_corpora, read_corpora
from jax_transformer.runs.evaluation import Evaluation
from jax_transformer.runs.initial_model import InitialModel, with_teacher
from jax_transformer.runs.model_settings import check_model, model_config
from jax_transformer.runs.output import check_output, exclusive_folder
from jax_transformer.runs.signals import Stopped, stop_requests
from jax_transformer.runs.sound_corpora import read_sounds, task_ids
from jax_transformer.runs.state import RunSettings, check_same
from jax_transformer.runtime import distributed
from jax_transformer.runtime.host_memory import keep_freed_memory
from jax_transformer.runtime.sharding import describe, make_mesh
from jax_transformer.storage.folder import CHECKPOINTS, SETTINGS_FILE
from jax_transformer.storage.reading import library_digest
from jax_transformer.storage.writing import check_path, replace_file
from jax_transformer.storage.yaml_file import to_yaml
from jax_transformer.text.bpe_dropout import BPEDropout
from jax_transformer.training.budget import check_training
from jax_transformer.training.distillation import Teacher
from jax_transformer.training.freeze import trained_parts, trained_sizes
from jax_transformer.training.objective import check_packs
from jax_transformer.training.step import attention_choice
from jax_transformer.transcription.transcriber import origin_values
from jax_transformer.translation.model_folder import TrainedModel, model_digest
from jax_transformer.translation.translate import place

# Settings of the training that are shown at the start, even where they are the usual ones.
SHOWN = ("steps", "schedule", "max_tokens", "compute_dtype", "seed")


def train(*argv: str) -> None:
    """Parse the command line and train; an input error is one line and exit code 1."""
    console = training_console()
    keep_compilations()
    try:
        train_as_named(named_settings(argv), console)
    except Stopped as stopped:
        console.print(str(stopped))
        sys.exit(stopped.exit_code)
    except Exception as error:
        distributed.fail(error)


def training_console() -> Console:
    """Return where a run reports to: standard output."""
    return Console(markup=False, highlight=False, soft_wrap=True)


def train_as_named(named: NamedSettings, console: Console) -> Path:
    """Train as settings name it, write the model, and return the folder of the run.

    Raises:
        InputError: Something cannot be used.
        Stopped: A signal has ended the run, which is saved.
    """
    arguments = named.arguments()
    if arguments.keep_freed_memory:
        keep_freed_memory()
    distributed.initialize(
        arguments.coordinator,
        arguments.num_processes,
        arguments.process_id,
        lost_after=arguments.lost_after,
    )
    started, is_main = time.monotonic(), distributed.is_main()
    console.quiet = not is_main
    arguments, initial, resumed = _checked_arguments(named, console)
    mesh = make_mesh(arguments.mesh or ("data=-1" if jax.process_count() > 1 else None))
    settings, corpora = read_and_encode_text(arguments, initial, console, resumed)
    distributed.check_agreement(must_agree(settings, initial, mesh))
    if unnamed := arguments.output is None:
        created = distributed.from_main(str(first_free_run()).encode() if is_main else None)
        arguments = dataclasses.replace(arguments, output=Path(created.decode()))
    show_settings(arguments, settings, mesh, console)
    output = arguments.output
    number_words = arguments.source is None and arguments.text is None
    evaluation = Evaluation(
        settings=settings,
        text=corpora.validation_text,
        console=console,
        mesh=mesh,
        validation=corpora.validation,
    )
    check = partial(_check_not_taken, arguments, resumed)
    exclusive = exclusive_folder(output, check, unnamed) if is_main else nullcontext()
    with stop_requests(console.print) as stop, exclusive:
        if is_main:
            if not resumed:
                loop.discard_run(output)  # the checkpoints of one that is overwritten
            replace_file(output / SETTINGS_FILE, to_yaml(arguments.to_mapping()).encode())
        # The number words are translated at the end only, unless their score selects.
        translating = not number_words or arguments.training.select_by != "loss"
        run = loop.Run(
            directory=output,
            settings=settings,
            resumed=resumed,
            stop=stop,
            measure=evaluation.measure if translating else None,
            tensorboard=arguments.tensorboard,
            mesh=mesh,
            lost_after=arguments.lost_after,
            params=initial.params,
            init_checkpoint=initial.checkpoint,
            teachers=teachers_on(mesh, initial, arguments),
        )
        best = loop.train(run, corpora.training, corpora.validation, console)
    if stop.signal is not None:  # it came after the last step, too late for the loop
        saved = f"the run in {output} is saved, and its model is not written; resume writes it"
        raise Stopped(f"stopped by {stop.signal.name}: {saved}", stop.signal)
    if is_main:
        evaluation.finish(output, best)
        console.print(f"wall time, compilation included: {time.monotonic() - started:.0f} s")
        folder = shlex.quote(str(output))
        translate = f"jax-transformer translate {folder} < FILE"
        if settings.config.source_features is not None:
            console.print(f"to transcribe: jax-transformer transcribe {folder} FILE")
        elif corpora.validation_text.targets:
            console.print(f"to translate: {translate}")
            if not number_words:
                tokenization = shlex.quote(arguments.bleu_tokenization)
                score = f"sacrebleu REFERENCE --tokenize {tokenization}"
                console.print(f"to score: {translate} | {score}")
    return output


def _checked_arguments(
    named: NamedSettings, console: Console
) -> tuple[Arguments, InitialModel, CheckpointFolder | None]:
    """Return the arguments, what the run starts from, and the checkpoint if it is resumed.

    A run that is resumed keeps its arguments, except those that are named and may change.
    """
    arguments, resumed = named.arguments(), None
    if not arguments.resume:
        if distributed.is_main() and arguments.output:
            check_output(arguments.output, arguments.overwrite)
        arguments, initial = new_arguments(named)
    elif arguments.output is None or arguments.overwrite:
        raise InputError("resume=True needs --output, the run's directory, and no --overwrite")
    else:
        resumed = restore(arguments.output / CHECKPOINTS, console)
        settings, step = resumed.settings, resumed.progress.step
        saved = arguments_of_run(settings)
        arguments = named.replaced_in(saved)
        check_resumed(saved, arguments)
        config = model_config(arguments.model, settings.config)
        changed = settings._replace(config=config, training_config=arguments.training)
        check_same(settings, changed, step)  # before the text is read
        console.print(f"resumed at step {step:,} of {arguments.training.steps:,}")
        initial = InitialModel(
            settings.tokenizer,
            settings.config,
            generation=settings.generation,
            origin=settings.origin,
        )
        initial = with_teacher(initial, arguments)
    check_values(arguments, initial)
    return arguments, initial, resumed


def _check_not_taken(arguments: Arguments, resumed: CheckpointFolder | None) -> None:
    """Refuse an output that another run has taken while the text was read."""
    if resumed is None:
        check_output(arguments.output, arguments.overwrite)
    elif steps_in(arguments.output / CHECKPOINTS)[-1:] != [resumed.progress.step]:
        raise InputError(f"{arguments.output}: another process went on with it; resume again")


def check_values(arguments: Arguments, initial: InitialModel) -> None:
    """Refuse arguments that cannot work, before any text is read."""
    training = arguments.training
    check_path(arguments.store)
    arguments.denoisers()  # refuses noise that the objective cannot have
    if initial.tokenizer is None:
        config = check_model(arguments.model, arguments.vocab_size)
        # The text may have few characters.
        fewest = max(config.pad_id, config.bos_id, config.eos_id) + 1
        smallest = dataclasses.replace(config, src_vocab_size=fewest, tgt_vocab_size=fewest)
    else:
        smallest = config = model_config(arguments.model, initial.config or initial.tokenizer)
    check_training(smallest, training)
    if training.lora_rank and arguments.init is None:
        raise InputError(f"lora_rank={training.lora_rank} needs a trained model: name it by init")
    if training.bpe_dropout and (arguments.text or arguments.sentinels):
        raise InputError(
            f"bpe_dropout={training.bpe_dropout} is for pairs and a byte-pair encoding; set it to 0"
        )
    if training.bpe_dropout and initial.tokenizer is not None:
        BPEDropout(initial.tokenizer, training.bpe_dropout)
    if training.batching == "packed":
        check_packs(config)
    elif arguments.text:
        raise InputError("text is cut where rows end; set batching='packed'")
    scores.check_tokenization(arguments.bleu_tokenization)
    by = training.select_by
    if config.source_features is not None:
        check_installed("jiwer")
    elif arguments.language or arguments.task or training.spec_augment or by == "wer":
        named = f"language={arguments.language!r}, task={arguments.task!r}"
        named += f", spec_augment={training.spec_augment}, select_by={by!r}"
        raise InputError(f"{named}: the model reads no sound; leave them out, or name one by init")
    check_installed("matplotlib")
    if arguments.tensorboard:
        check_installed("tensorboardX")


def read_and_encode_text(
    arguments: Arguments,
    initial: InitialModel,
    console: Console,
    resumed: CheckpointFolder | None = None,
) -> tuple[RunSettings, Corpora]:
    """Read the text, train the tokenizer on it if there is none, encode the text."""
    expected_sha256 = resumed.settings.text_sha256 if resumed else None
    if arguments.model["source_features"] is None:
        run_text = read_corpora(arguments, initial.tokenizer, console)
        tokenizer = run_text.tokenizer
        config = model_config(arguments.model, initial.config or tokenizer)
        check_training(config, arguments.training)
        encoded = encode_corpora(run_text, arguments, console, expected_sha256)
    else:
        tokenizer = initial.tokenizer
        config = model_config(arguments.model, initial.config or tokenizer)
        begin = task_ids(arguments, tokenizer, origin_values(initial.origin).get("is_multilingual"))
        encoded = read_sounds(arguments, tokenizer, config, begin, console, expected_sha256)
    for line in (*initial.report, *encoded.report):
        console.print(line)
    settings = RunSettings(
        config=config,
        training_config=arguments.training,
        tokenizer=tokenizer,
        text_sha256=encoded.sha256,
        arguments=kept_arguments(arguments),
        generation=initial.generation,
        origin=initial.origin,
    )
    return settings, encoded


def show_settings(
    arguments: Arguments, settings: RunSettings, mesh: Mesh, console: Console
) -> None:
    """Show the settings that say most, the devices and the implementation of attention."""
    config, training = settings.config, arguments.training
    model = f"preset {arguments.preset}" if arguments.preset else f"that of {arguments.init}"
    named = arguments.named_fields()
    fields = (f"{name}={named[name]}" for name in (named if arguments.preset else TEXT_SIZES))
    tokens = f"{config.src_vocab_size:,}"
    if arguments.tokenizer is None and config.src_vocab_size < arguments.vocab_size:
        tokens = f"{tokens} of at most {arguments.vocab_size:,}"  # a small text has no more
    console.print(f"model: {model}, {', '.join(fields)}, {tokens} tokens")
    differing = differing_fields(training)
    shown = (
        f"{name}={value}"
        for name, value in vars(training).items()
        if name in SHOWN or name in differing
    )
    console.print(f"training: {', '.join(shown)}")
    if training.warmup_steps >= training.steps:
        lengths = f"warmup_steps={training.warmup_steps}, steps={training.steps}"
        console.print(f"WARNING: {lengths}: the learning rate does not reach its peak")
    console.print(f"all settings: {arguments.output / SETTINGS_FILE}")
    console.print(describe(mesh))
    console.print(str(attention_choice(mesh.devices.flat[0], config, training)))
    trained, whole = trained_sizes(config, training)
    parts = f": {trained_parts(config, training)}" if training.freeze else ""
    if training.lora_rank is not None:
        parts = f"{parts}, in an adapter of {', '.join(training.lora_targets)}"
    console.print(f"{trained:,} of {whole:,} parameters are trained{parts}")


def teachers_on(mesh: Mesh, initial: InitialModel, arguments: Arguments) -> tuple[Teacher, ...]:
    """Return the model of --teacher on the devices of a mesh; nothing without one."""
    if (model := initial.teacher) is None:
        return ()
    dtype = arguments.training.compute_dtype
    half = model._replace(params=in_dtype(model.params, dtype))
    weight, temperature = arguments.teacher_weight, arguments.teacher_temperature
    return (Teacher(place(half, mesh).params, model.config, weight, temperature),)


def must_agree(settings: RunSettings, initial: InitialModel, mesh: Mesh) -> dict[str, str]:
    """Return by name what all processes of a run must have in common."""
    shared = {"library": library_digest(), "jax": jax.__version__}
    shared |= dataclasses.asdict(settings.config) | dataclasses.asdict(settings.training_config)
    shared |= {"tokenizer": settings.tokenizer.digest(), "text": settings.text_sha256}
    shared |= {"mesh": describe(mesh)}
    if initial.params is not None:
        model = TrainedModel(initial.config, initial.params, initial.tokenizer, initial.generation)
        shared["initial model"] = model_digest(model)
    if initial.teacher is not None:
        shared["teacher"] = model_digest(initial.teacher)
    return {name: str(value) for name, value in shared.items()}


def first_free_run() -> Path:
    """Create and return the first of runs/0, runs/1, ... that does not exist."""
    numbers = itertools.count()
    while True:
        path = Path("runs", str(next(numbers)))
        with suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
