"""The arguments of `jax-transformer train`: flags, a YAML file, and what a new run starts from."""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tyro

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.origin import Origin
from jax_transformer.errors import InputError
from jax_transformer.model.transformer import Params
from jax_transformer.runs.corpora import Files, TextSettings
from jax_transformer.runs.existing_tokenizer import run_tokenizer
from jax_transformer.runs.model_settings import (
    ModelSettings,
    check_same_model,
    named_fields,
    preset_settings,
    settings_of,
)
from jax_transformer.runs.run_model import read_initial_model
from jax_transformer.runs.state import RunSettings, check_equal
from jax_transformer.storage.declared import replace_fields
from jax_transformer.storage.yaml_file import read_mapping
from jax_transformer.text.encoding import Filters
from jax_transformer.text.store import default_store
from jax_transformer.tokenizers import Tokenizer
from jax_transformer.training.config import TrainingConfig

# Arguments that hold for one start of the program, and are not written to settings.yaml; and those
# that may differ when a run is resumed.
OF_ONE_START = ("config", "overwrite", "resume", "coordinator", "num_processes", "process_id")
NOT_KEPT = (
    *OF_ONE_START,
    *("output", "prepared", "mesh", "lost_after", "keep_freed_memory", "training", "model"),
)
OWN_PATHS = ("init", "tokenizer", "target_tokenizer")
PATHS = (*Files._fields, *OWN_PATHS)  # kept as absolute paths
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

    source: tuple[Path, ...] | None = None
    """Training text, one sentence a line, plain or compressed (gzip, xz, zstd); several files are
    one text. A .tsv file holds sources and targets, with a tab between them."""

    target: tuple[Path, ...] | None = None
    """Translation of the training text, line by line; as many files as --source."""

    weights: tuple[float, ...] | None = None
    """One number for each file of --source: how often its pairs are drawn, in proportion. If None,
    each pair is drawn once an epoch."""

    valid_source: tuple[Path, ...] | None = None
    """Validation text: selects the best parameters and is translated at the end."""

    valid_target: tuple[Path, ...] | None = None
    """Translation of the validation text, line by line."""

    valid_pairs: int | None = None
    """Without validation files, pairs of the training text that are held out for validation, chosen
    by --seed; if None, 5 % of them, at least 1 and at most 1,000."""

    longest_side: int | None = None
    """Most tokens of a side of a training pair; longer pairs are dropped. If None, max_length."""

    max_ratio: float | None = None
    """Most tokens of the longer side of a training pair for each token of the shorter side; other
    pairs are dropped."""

    drop_duplicates: bool = False
    """Drop the training pairs that repeat an earlier one."""

    tokenizer_pairs: int = 2_000_000
    """Most training pairs that the tokenizer is trained on, chosen by --seed."""

    prepared: Path = dataclasses.field(default_factory=default_store)
    """Folder that keeps tokenizers and encoded text. A later run on the same text, tokenizer and
    limits uses them again."""

    init: Path | None = None
    """Model to start from: the folder of a model of this library or of Hugging Face. The run keeps
    its tokenizer, its config and its generation defaults; only the dropout rates may be others."""

    ignore_generation_config: bool = False
    """Ignore the generation defaults of the Hugging Face folder of --init."""

    source_lang: str | None = None
    """Code of the language of the sources, for a model or tokenizer with language codes; if None,
    the one that its folder names."""

    target_lang: str | None = None
    """Code of the language of the targets; if None, the one that the folder names."""

    tokenizer: Path | None = None
    """Tokenizer to use instead of training one: a tokenizer.json, or the folder of a tokenizer or
    of a model."""

    target_tokenizer: Path | None = None
    """Tokenizer of the targets, where --tokenizer is that of the sources; for a model with
    token_embeddings "separate"."""

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

    preset: str | None = "vaswani2017"
    """The described implementation to train. It gives the fields of the model that are not named;
    sizes that it leaves open are those of the task. None with --init."""

    vocab_size: int = 6000
    """Entries of the byte-pair encoding that both languages share; with --tokenizer or --init, the
    number of ids of the source's tokenizer."""

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

    def text_settings(self, max_length: int) -> TextSettings:
        """Return which text the run trains on, given the most tokens of a side of its model."""
        return TextSettings(
            self.files,
            self.weights,
            self.valid_pairs,
            self.training.seed,
            self.vocab_size,
            self.tokenizer_pairs,
            Filters(max_length, self.longest_side, self.max_ratio),
            self.drop_duplicates,
            self.prepared,
        )

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


class Start(NamedTuple):
    """What a run has before it reads its text.

    Attributes:
        tokenizer: The tokenizer; None trains one on the text.
        config: The shape of the model; None leaves it to the arguments.
        params: Parameters of a new run, float32 and on the host; None draws them.
        generation: Generation defaults of the model; None for those of the models that this
            library trains.
        origin: The Hugging Face folder that the model comes from; None if there is none.
        report: Lines for the reader.
    """

    tokenizer: Tokenizer | None = None
    config: TransformerConfig | None = None
    params: Params | None = None
    generation: Mapping[str, Any] | None = None
    origin: Origin | None = None
    report: tuple[str, ...] = ()


NO_START = Start()


def start_of_run(settings: RunSettings) -> Start:
    """Return what a resumed run has; its checkpoint has the parameters."""
    return Start(
        settings.tokenizer,
        settings.config,
        generation=settings.generation,
        origin=settings.origin,
    )


def read_start(arguments: Arguments) -> Start:
    """Return what a new run starts from: the model of --init, or the tokenizer of --tokenizer.

    Raises:
        InputError: A folder or file cannot be used, or --tokenizer is not the tokenizer of --init.
    """
    tokenizer = run_tokenizer(arguments.tokenizer, arguments.target_tokenizer)
    languages = arguments.source_lang, arguments.target_lang
    if tokenizer is not None:
        tokenizer = tokenizer.with_languages(*languages, str(arguments.tokenizer))
    elif arguments.init is None and languages != (None, None):
        raise InputError(
            f"source_lang={languages[0]!r} and target_lang={languages[1]!r} need a model or a "
            "tokenizer that has language codes: name it by --init or --tokenizer"
        )
    if arguments.init is None:
        return Start(tokenizer)
    (config, params, own, generation), origin, report = read_initial_model(
        arguments.init, arguments.ignore_generation_config, *languages
    )
    if tokenizer is not None and tokenizer.digest() != own.digest():
        raise InputError(
            f"tokenizer={arguments.tokenizer} is not the tokenizer of the model in "
            f"{arguments.init}: their sha256 are {tokenizer.digest()} and {own.digest()}; leave "
            "tokenizer out"
        )
    return Start(own, config, params, generation, origin, report)


def check_start(arguments: Arguments, start: Start) -> None:
    """Refuse arguments that contradict what a new run starts from.

    Raises:
        InputError: A field of the model, the preset or the size of the vocabulary differs (names
            both values), or the model has one table for the tokens of two tokenizers.
    """
    if start.config is not None:
        name = str(arguments.init)
        check_same_model(arguments.model, arguments.preset, start.config, name)
    if start.tokenizer is not None and arguments.vocab_size != start.tokenizer.src_vocab_size:
        raise InputError(
            f"vocab_size={arguments.vocab_size} is not that of the tokenizer, which has "
            f"{start.tokenizer.src_vocab_size}; leave vocab_size out"
        )
    tables = arguments.model.token_embeddings
    has_two = start.tokenizer is not None and start.tokenizer.kind == "separate"
    if has_two and tables != "separate":
        name = "tokenizer" if arguments.target_tokenizer is None else "target_tokenizer"
        raise InputError(
            f"{name}={getattr(arguments, name)}: two tokenizers need token_embeddings='separate', "
            f"but the model has {tables!r}"
        )


def defaults(argv: Sequence[str], start: Start = NO_START) -> Arguments:
    """Return the arguments that hold where the command line names no others.

    They are those of the task, in the sizes of the preset, or the model that the run starts from,
    with the settings of a file.

    Raises:
        InputError: The preset is unknown, or `replace_fields` refuses the file.
    """
    named = _named_first(argv)
    if named.config is None and named.source is None:
        return with_start(with_preset(NUMBER_WORDS, named.preset, NUMBER_WORDS_SIZES), start)
    if named.config is None:
        return with_start(with_preset(Arguments(), named.preset, TEXT_SIZES), start)
    read = with_present_names(read_mapping(named.config), named.config)
    task = with_preset(Arguments(), named.preset or read.get("preset"), TEXT_SIZES)
    return replace_fields(with_start(task, start), read, str(named.config))


def with_file(argv: Sequence[str], saved: Arguments) -> Arguments:
    """Return the arguments of a run with the fields replaced that the command line's file names.

    The output is that of `saved`.

    Raises:
        InputError: `replace_fields` refuses the file.
    """
    path = _named_first(argv).config
    if path is None:
        return saved
    read = with_present_names(read_mapping(path), path)
    given = replace_fields(saved, read, str(path))
    return dataclasses.replace(given, output=saved.output)


def _named_first(argv: Sequence[str]) -> argparse.Namespace:
    """Return what the defaults of the other arguments depend on: config, source and preset."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--source")
    parser.add_argument("--preset")
    return parser.parse_known_args(list(argv))[0]


def with_start(task: Arguments, start: Start) -> Arguments:
    """Return a task's arguments with what a new run starts from: its vocabulary and its model."""
    if start.tokenizer is not None:
        task = dataclasses.replace(task, vocab_size=start.tokenizer.src_vocab_size)
    if start.config is not None:
        task = dataclasses.replace(task, preset=None, model=settings_of(start.config))
    return task


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


def kept_arguments(arguments: Arguments) -> dict[str, Any]:
    """Return the arguments that `arguments_of_run` needs beside the other settings, as JSON."""
    kept = {
        field.name: getattr(arguments, field.name)
        for field in dataclasses.fields(arguments)
        if field.name not in NOT_KEPT
    }
    return kept | {name: _absolute(kept[name]) for name in PATHS if kept[name]}


def arguments_of_run(settings: RunSettings) -> Arguments:
    """Return the arguments that a run was started with; its config says what the model is."""
    known = {field.name for field in dataclasses.fields(Arguments)}
    kept = {name: value for name, value in settings.arguments.items() if name in known}
    paths = {name: Path(kept[name]) for name in OWN_PATHS if kept.get(name)}
    for name in Files._fields:
        if kept.get(name):  # one file in the checkpoints of earlier versions
            files = [kept[name]] if isinstance(kept[name], str) else kept[name]
            paths[name] = tuple(map(Path, files))
    return Arguments(
        **kept | paths, model=settings_of(settings.config), training=settings.training_config
    )


def check_resumed(saved: Arguments, given: Arguments) -> None:
    """Refuse arguments that a resumed run keeps and that differ from its own.

    Raises:
        InputError: An argument differs; the message names it with both values.
    """
    kept = ("preset", "vocab_size", "valid_pairs", "init", "tokenizer", "target_tokenizer")
    text = ("weights", "longest_side", "max_ratio", "drop_duplicates", "tokenizer_pairs")
    # BLEU that selects the best parameters is computed in the same way throughout.
    selecting = ("bleu_tokenization",) if saved.training.select_by == "bleu" else ()
    for name in (*kept, *text, "source_lang", "target_lang", *selecting):
        values = (getattr(arguments, name) for arguments in (saved, given))
        check_equal(name, *(_absolute(value) for value in values))


def _absolute(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_absolute(part) for part in value]
    return str(value.absolute()) if isinstance(value, Path) else value
