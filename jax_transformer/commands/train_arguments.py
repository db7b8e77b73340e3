"""The arguments of `jax-transformer train`: flags, a YAML file, and what a new run starts from."""

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta

from jax_transformer.commands.command_line import Parser, described, show_help
from jax_transformer.config import TransformerConfig
from jax_transformer.config.declared import check_mapping, checked_fields, declarations
from jax_transformer.convert.origin import Origin
from jax_transformer.errors import InputError
from jax_transformer.runs.checkpoints import CheckpointFolder, read_step, steps_in
from jax_transformer.runs.corpora import Files, TextSettings
from jax_transformer.runs.model_settings import (
    DECIDED,
    check_same_model,
    named_fields,
    preset_fields,
    read_initial_model,
    read_tokenizer,
    trained_model,
    undecided_fields,
)
from jax_transformer.runs.state import RunSettings, check_equal
from jax_transformer.storage.folder import CHECKPOINTS
from jax_transformer.storage.yaml_file import read_yaml
from jax_transformer.text.denoising import MOST_SENTINELS, denoisers
from jax_transformer.text.encoding import Filters
from jax_transformer.text.parallel_text import Documents, Reading
from jax_transformer.text.store import default_store
from jax_transformer.text.vocabulary import Vocabulary
from jax_transformer.tokenizers import Tokenizer, separate
from jax_transformer.training.config import Count, Positive, TrainingConfig
from jax_transformer.translation.model_folder import TrainedModel

# Arguments that hold for one start of the program, and are not written to settings.yaml; and those
# that may differ when a run is resumed.
OF_ONE_START = ("config", "overwrite", "resume", "coordinator", "num_processes", "process_id")
NOT_KEPT = {*OF_ONE_START, "output", "mesh", "lost_after", "keep_freed_memory", "training", "model"}
KEPT_WHEN_RESUMED = ("preset", "vocab_size", "byte_fallback", "valid_pairs", "init", "tokenizer")
KEPT_WHEN_RESUMED += ("target_tokenizer", "weights", "longest_side", "max_ratio", "drop_duplicates")
KEPT_WHEN_RESUMED += ("teacher", "teacher_weight", "init_keeps")
KEPT_WHEN_RESUMED += ("text_unit", "prefixes", "sentinels", "fresh_weights")
KEPT_WHEN_RESUMED += ("tokenizer_pairs", "tsv_columns", "bad_lines", "source_lang", "target_lang")
PARTS = {"model": TransformerConfig, "training": TrainingConfig}  # of the settings
# Sizes of the model for some ten thousand sentences, and for the number words.
TEXT_SIZES = {"d_model": 256, "num_heads": 8, "d_ff": 512, "num_encoder_layers": 3}
TEXT_SIZES |= {"num_decoder_layers": 3, "max_length": 128, "dropout": 0.1}
DEFAULT_SENTINELS = 100
NUMBER_WORDS_SIZES = {"d_model": 64, "num_heads": 4, "d_ff": 256, "num_encoder_layers": 2}
NUMBER_WORDS_SIZES |= {"num_decoder_layers": 2, "max_length": 64, "dropout": 0.0}


# The headings of the help, by the first argument under each.
HEADINGS = {"source": "text", "vocab_size": "tokenizer", "init": "initial model", "output": "run"}
HEADINGS |= {"mesh": "devices and processes", "preset": "preset", "d_model": "sizes of the model"}
HEADINGS |= {"token_embeddings": "embeddings and positions", "output_projection": "output"}
HEADINGS |= {"attention_scale": "attention and feed-forward networks", "norm": "norms"}
HEADINGS |= {"dropout": "dropout and initialization", "steps": "steps and learning rate"}
HEADINGS |= {"adam_beta1": "optimizer", "num_microbatches": "memory, precision and averages"}
HEADINGS |= {"label_smoothing": "objective and batches", "evaluation_interval": "evaluation"}
PREPARE = """Encode the training text as `jax-transformer train` would do, and keep it.

The arguments are those of `jax-transformer train`, so a command line can be used for both. Those
that do not concern the text change nothing and are not shown here."""


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Train a Transformer on pairs or plain text; `jax-transformer translate` takes the model.

    Without files the task is the embedded one, English number words to German ones, and the
    defaults are made for it. With --source they are made for some ten thousand sentences: see
    `--source FILE --help`.

    Attributes:
        config: YAML file with these settings: the model's fields under `model`, those of the
            training under `training`. Flags win over the file, the file over the preset.
        source: Training text, one sentence a line, plain or compressed (gzip, xz, zstd); several
            files are one text. A .tsv file holds sources and targets, with a tab between them.
        target: Translation of the training text, line by line: a file for each of --source that is
            not a .tsv file.
        text: Plain text for --objective, alone or beside pairs; plain or compressed, of any size.
        text_unit: What a document is: each of the "lines", or what stands between "blank_lines". No
            example goes beyond a document; of "joined" lines, examples go on from line to line.
        valid_text: Plain text for validation.
        weights: One number for each file of --source, then of --text: how often its pairs or texts
            are drawn, in proportion. Without it, each is drawn once an epoch.
        prefixes: Text before the sources, for example "translate German to English: ": one for the
            pairs and one for the plain text; with --weights, one for each file.
        valid_source: Validation text: selects the best parameters and is translated at the end.
        valid_target: Translation of the validation text, line by line.
        tsv_columns: Columns of the source and of the target in .tsv files, for example 1 2; without
            it, the files have only these two.
        bad_lines: If a line is not UTF-8 text, has a NUL character or lacks a column, or the
            tokenizer refuses it, refuse the text, or skip its pair, which is counted.
        valid_pairs: Without validation files, pairs of the training text that are held out for
            validation, chosen by --seed; by default 5 % of them, at least 1 and at most 1,000.
        longest_side: Most tokens of a side of a training pair that is kept; by default
            --max-length.
        max_ratio: Most tokens of the longer side, for each of the shorter, of a pair that is kept.
        drop_duplicates: Drop the training pairs that repeat an earlier one.
        prepared: Folder that keeps tokenizers and encoded text; by default one in the user's cache.
            A later run on the same text, tokenizer and limits uses them again.
        vocab_size: Entries of the byte-pair encoding that both languages share; with --tokenizer or
            --init, the number of ids of the source's tokenizer.
        sentinels: Number of sentinels of a tokenizer that is trained: it is then a unigram model
            with <mask> and the mode tokens of UL2. By default 100 with --text, 0 without.
        byte_fallback: Whether that encoding also has the 256 bytes, from which it makes a character
            that the training text lacks; if not, it becomes <unk>.
        tokenizer_pairs: Most training pairs that the tokenizer is trained on, chosen by --seed.
        tokenizer: Tokenizer to use instead of training one: a tokenizer.json, or the folder of a
            tokenizer or of a model.
        target_tokenizer: Tokenizer of the targets, where --tokenizer is that of the sources; for a
            model with token_embeddings "separate".
        init: Model to start from: the folder of a model of this library or of Hugging Face. The run
            keeps its tokenizer, its config and its generation defaults; only the dropout rates may
            be others.
        init_keeps: What to keep of the last checkpoint of the run in --init beside its parameters:
            Adam's "moments", the "step" at which the schedule goes on, or both. Everything else may
            be another: learning rate, batches, text.
        teacher: Trained model to learn from, word by word (Kim and Rush 2016), for example a larger
            one: the folder of a model of this library or of Hugging Face. Its tokenizer is used.
        teacher_weight: Share of the teacher in the loss; the targets have the rest.
        fresh_weights: Draw the weights anew: of --init, only the config and the tokenizer are used.
        ignore_generation_config: Ignore the generation defaults of a Hugging Face folder.
        source_lang: Code of the language of the sources; by default the one that the folder names.
        target_lang: Code of the language of the targets; by default the one that the folder names.
        output: Folder of the run and its model; by default the first free of runs/0, runs/1, ...
        overwrite: Replace the model that is in --output.
        resume: Continue the run in --output from its last checkpoint, with its own settings.
        tensorboard: Also write events for TensorBoard, into tensorboard/ in the output.
        bleu_tokenization: sacrebleu's tokenization for BLEU; "none" for tokenised text.
        mesh: Axes of the devices, for example data=4,fsdp=2: "data" copies the model, "fsdp" splits
            parameters and optimizer, "tensor" the matrix products; -1 takes the other devices.
            Without it, one device.
        coordinator: With several processes, host:port of the first one, where the port is free.
        num_processes: Number of processes.
        process_id: Number of this process, from 0.
        lost_after: Seconds of silence of another process after which this one ends.
        keep_freed_memory: Keep the memory of a step for the next one: faster on a CPU, Linux only.
        preset: The described implementation to train, unless --init names a model. It gives the
            fields of the model that are not named; sizes that it leaves open are those of the task.
            Only the presets of Hugging Face families can be written as Hugging Face folders later:
            marian, for example, and not the default.
        model: Fields of TransformerConfig. Vocabulary sizes and special ids (pad, BOS, EOS) come
            from the tokenizer.
        training: Batches, schedule, optimizer and objective.
    """

    USUAL = tuple(
        "config source target valid_source valid_target text objective init output resume mesh "
        "steps warmup_steps "
        "max_tokens dry_run".split()
    )
    config: Path | None = None
    source: tuple[Path, ...] | None = None
    target: tuple[Path, ...] | None = None
    text: tuple[Path, ...] | None = None
    text_unit: Documents = "lines"
    valid_text: tuple[Path, ...] | None = None
    weights: tuple[Positive, ...] | None = None
    prefixes: tuple[str, ...] | None = None
    valid_source: tuple[Path, ...] | None = None
    valid_target: tuple[Path, ...] | None = None
    tsv_columns: tuple[Count, ...] | None = None
    bad_lines: Literal["refuse", "skip"] = "refuse"
    valid_pairs: Count | None = None
    longest_side: Count | None = None
    max_ratio: Annotated[float, Meta(ge=1)] | None = None
    drop_duplicates: bool = False
    prepared: Path | None = None
    vocab_size: Count = 6000
    sentinels: Annotated[int, Meta(ge=0, le=MOST_SENTINELS)] = 0
    byte_fallback: bool = False
    tokenizer_pairs: Count = 2_000_000
    tokenizer: Path | None = None
    target_tokenizer: Path | None = None
    init: Path | None = None
    init_keeps: tuple[Literal["moments", "step"], ...] = ()
    teacher: Path | None = None
    teacher_weight: Annotated[float, Meta(gt=0, le=1)] = 0.5
    fresh_weights: bool = False
    ignore_generation_config: bool = False
    source_lang: str | None = None
    target_lang: str | None = None
    output: Path | None = None
    overwrite: bool = False
    resume: bool = False
    tensorboard: bool = False
    bleu_tokenization: str = "13a"
    mesh: str | None = None
    coordinator: str | None = None
    num_processes: Count | None = None
    process_id: int | None = None
    lost_after: Count = 120
    keep_freed_memory: bool = True
    preset: str | None = "vaswani2017"
    model: Mapping[str, Any] = dataclasses.field(
        default_factory=lambda: preset_fields("vaswani2017", TEXT_SIZES)
    )
    training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)

    def text_settings(self) -> TextSettings:
        """Return which text the run trains on."""
        training, pairs = self.training, (self.source, self.target)
        validation = self.valid_source, self.valid_target
        plain = None if training.objective == "translation" else training.objective
        noise = training.noise_density, training.mean_span_length
        if plain is None and noise != (None, None):
            raise InputError("noise_density and mean_span_length need a denoising objective")
        return TextSettings(
            Files(*pairs, *validation, self.text, self.valid_text),
            self.weights,
            self.valid_pairs,
            training.seed,
            Vocabulary(self.vocab_size, self.byte_fallback, self.sentinels),
            self.tokenizer_pairs,
            Filters(self.model["max_length"], self.longest_side, self.max_ratio),
            self.drop_duplicates,
            self.prepared or default_store(),
            Reading(self.tsv_columns, self.bad_lines),
            self.text_unit,
            plain,
            denoisers(plain, *noise) if plain else (),
            self.prefixes,
        )

    def to_mapping(self) -> dict[str, Any]:
        """Return the settings for settings.yaml, the model by its preset and what differs."""
        mapping = dataclasses.asdict(self)
        mapping["model"] = named_fields(self.model, self.preset, TEXT_SIZES)
        return {name: value for name, value in mapping.items() if name not in OF_ONE_START}


NUMBER_WORDS = Arguments(
    vocab_size=90,
    model=preset_fields("vaswani2017", NUMBER_WORDS_SIZES),
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


class InitialModel(NamedTuple):
    """The model or the tokenizer that a run starts from; the fields are as in `RunSettings`."""

    tokenizer: Tokenizer | None = None  # None trains one on the text
    config: TransformerConfig | None = None  # None leaves it to the arguments
    params: Mapping[str, Any] | None = None  # float32 and on the host; None draws them
    generation: Mapping[str, Any] | None = None
    origin: Origin | None = None
    report: tuple[str, ...] = ()
    teacher: TrainedModel | None = None  # float32 and on the host
    kept: CheckpointFolder | None = None  # of --init, where --init-keeps names parts of it


NO_MODEL = InitialModel()


def initial_model(arguments: Arguments) -> InitialModel:
    """Return what a new run starts from: the model of --init, or the tokenizer of --tokenizer."""
    source, target = arguments.tokenizer, arguments.target_tokenizer
    if target and not source:
        raise InputError(
            f"tokenizer=None: name that of the sources beside target_tokenizer={target}"
        )
    tokenizer = read_tokenizer(source) if source else None
    if target:
        tokenizer = separate(tokenizer, read_tokenizer(target))
    languages = arguments.source_lang, arguments.target_lang
    if tokenizer is not None:
        tokenizer = tokenizer.with_languages(*languages, str(source))
    elif arguments.init is None and languages != (None, None):
        raise InputError(
            f"source_lang={languages[0]!r} and target_lang={languages[1]!r} need a model or a "
            "tokenizer that has language codes: name it by --init or --tokenizer"
        )
    kept = last_checkpoint(arguments) if arguments.init_keeps else None
    if arguments.init is None:
        if arguments.fresh_weights:
            raise InputError("fresh_weights=True needs the folder of a model: name it by --init")
        return InitialModel(tokenizer)
    if kept is None:
        options = arguments.ignore_generation_config, *languages
        model, origin, report = read_initial_model(arguments.init, *options)
    else:
        model = trained_model(kept.settings, kept.read().state.params)
        origin, report = kept.settings.origin, ()
    config, params, model_tokenizer, generation = model
    if tokenizer is not None and tokenizer.digest() != model_tokenizer.digest():
        raise InputError(
            f"tokenizer={source} is not the tokenizer of the model in {arguments.init}: their "
            f"sha256 are {tokenizer.digest()} and {model_tokenizer.digest()}; leave tokenizer out"
        )
    params = None if arguments.fresh_weights else params
    return InitialModel(model_tokenizer, config, params, generation, origin, report, kept=kept)


def last_checkpoint(arguments: Arguments) -> CheckpointFolder:
    """Return the last checkpoint of the run in --init, of which --init-keeps names parts."""
    keeps, folder, training = arguments.init_keeps, arguments.init, arguments.training
    named = f"init_keeps={' '.join(keeps)}"
    if folder is None or not (steps := steps_in(folder / CHECKPOINTS)):
        raise InputError(f"{named}: init={folder} is no run with checkpoints; name one by --init")
    saved = read_step(folder / CHECKPOINTS, steps[-1])
    earlier = saved.settings.training_config
    wanted = {"freeze": earlier.freeze, "optimizer": "adam", "lora_rank": None}
    for owner, settings in ((f"{folder}: ", earlier), ("", training)):
        for name, value in wanted.items() if "moments" in keeps else ():
            if (found := getattr(settings, name)) != value:
                raise InputError(f"{named}: {owner}{name}={found!r} must be {value!r}")
    if arguments.fresh_weights:
        raise InputError(f"{named}: fresh_weights=True keeps nothing; leave one of them out")
    if "step" in keeps and training.steps <= steps[-1]:
        raise InputError(f"{named}: steps={training.steps} must be above its step {steps[-1]:,}")
    return saved


def with_teacher(initial: InitialModel, arguments: Arguments) -> InitialModel:
    """Return what a run starts from with the model of --teacher, whose tokenizer it has."""
    if arguments.teacher is None:
        return initial
    options = arguments.ignore_generation_config, arguments.source_lang, arguments.target_lang
    teacher, *_ = read_initial_model(arguments.teacher, *options)
    tokenizer = initial.tokenizer or teacher.tokenizer
    if tokenizer.digest() != teacher.tokenizer.digest():
        fault = f"teacher={arguments.teacher} has another tokenizer than the run"
        raise InputError(f"{fault}; leave out the arguments that name the run's, or the teacher")
    return initial._replace(tokenizer=tokenizer, teacher=teacher)


class NamedSettings(NamedTuple):
    """What a command line and its --config file name, by name; flags win over the file."""

    run: dict[str, Any]  # fields of Arguments
    model: dict[str, Any]  # of TransformerConfig
    training: dict[str, Any]  # of TrainingConfig
    dry_run: bool = False  # of `prepare`

    def arguments(self, initial: InitialModel = NO_MODEL) -> Arguments:
        """Return the arguments: what is named wins, then `initial`, the preset and the task."""
        numbers = not {"config", "source", "text"} & self.run.keys()
        task, sizes = (NUMBER_WORDS, NUMBER_WORDS_SIZES) if numbers else (Arguments(), TEXT_SIZES)
        if "text" in self.run:
            packed = dataclasses.replace(task.training, batching="packed")
            task = dataclasses.replace(task, sentinels=DEFAULT_SENTINELS, training=packed)
        if (preset := self.run.get("preset")) is not None:
            task = dataclasses.replace(task, model=preset_fields(preset, sizes))
        if initial.tokenizer is not None:
            task = dataclasses.replace(task, vocab_size=initial.tokenizer.src_vocab_size)
        if initial.config is not None:
            model = undecided_fields(initial.config.to_dict())
            task = dataclasses.replace(task, preset=None, model=model)
        return self.replaced_in(task)

    def replaced_in(self, arguments: Arguments) -> Arguments:
        """Return arguments with the named ones replaced."""
        training = dataclasses.replace(arguments.training, **self.training)
        model = {**arguments.model, **self.model}
        return dataclasses.replace(arguments, **self.run, model=model, training=training)


def new_arguments(named: NamedSettings) -> tuple[Arguments, InitialModel]:
    """Return the arguments of a new run, and what it starts from, which they do not contradict."""
    initial = with_teacher(initial_model(named.arguments()), named.arguments())
    arguments = named.arguments(initial)
    if initial.config is not None:
        check_same_model(arguments.model, arguments.preset, initial.config, str(arguments.init))
    if initial.tokenizer is not None and arguments.vocab_size != initial.tokenizer.src_vocab_size:
        raise InputError(
            f"vocab_size={arguments.vocab_size} is not that of the tokenizer, which has "
            f"{initial.tokenizer.src_vocab_size}; leave vocab_size out"
        )
    tables = arguments.model["token_embeddings"]
    has_two = initial.tokenizer is not None and initial.tokenizer.kind == "separate"
    if has_two and tables != "separate":
        name = "tokenizer" if arguments.target_tokenizer is None else "target_tokenizer"
        raise InputError(
            f"{name}={getattr(arguments, name)}: two tokenizers need token_embeddings='separate', "
            f"but the model has {tables!r}"
        )
    return arguments, initial


def named_settings(argv: Sequence[str], command: str = "train") -> NamedSettings:
    """Return what a command line names; with --help it is shown, and the program ends."""
    flags = _parser(Arguments(), command).parse(argv)
    asks, asks_all = flags.pop("help", False), flags.pop("help_all", False)
    dry_run = flags.pop("dry_run", False)
    nested: dict[str, Any] = {
        part: {name: flags.pop(name) for name in declarations(settings) if name in flags}
        for part, settings in PARTS.items()
    }
    by_flag, by_file = _checked(nested | flags, "", text=True), ({}, {}, {})
    if path := by_flag[0].get("config"):
        by_file = _checked(check_mapping(read_yaml(path), f"{path}: "), f"{path}: ")
    parts = (file | flag for file, flag in zip(by_file, by_flag, strict=True))
    named = NamedSettings(*parts, dry_run)
    if asks or asks_all:
        shown = [*itertools.chain(*map(declarations, (Arguments, *PARTS.values())))]
        if command == "prepare":  # what concerns the text
            shown = ["dry_run", *shown[: shown.index("output")], "max_length", "seed"]
        shown = [name for name in shown if name not in DECIDED]
        usual = [name for name in shown if name in Arguments.USUAL]
        show_help(_parser(named.arguments(), command, shown if asks_all else usual))
    return named


def _checked(
    named: Mapping[str, Any], prefix: str, *, text: bool = False
) -> tuple[dict[str, Any], ...]:
    """Return the fields of Arguments, of TransformerConfig and of TrainingConfig."""
    of_run = dict(named)
    for name in Files._fields:  # one file needs no list
        if isinstance(of_run.get(name), str):
            of_run[name] = [of_run[name]]
    parts = []
    for part, settings in PARTS.items():
        where = f"{prefix}{part}: " if prefix else ""
        parts.append(checked_fields(settings, of_run.pop(part, {}), where, text=text))
    return checked_fields(Arguments, of_run, prefix, text=text), *parts


def _parser(defaults: Arguments, command: str, shown: Collection[str] | None = None) -> Parser:
    prepares = command == "prepare"
    parser = Parser(command, PREPARE if prepares else described(Arguments)[0], shown=shown)
    if prepares:
        parser.add("dry_run", bool, "Keep nothing of the text; say what would be kept.", False)
    values = vars(defaults) | dict(defaults.model) | vars(defaults.training)
    for settings in (Arguments, *PARTS.values()):
        helps, types = described(settings)[1], declarations(settings)
        for name in (name for name in types if name not in PARTS):
            if name in HEADINGS:
                parser.heading = parser.add_argument_group(HEADINGS[name])
            parser.add(name, types[name], helps[name], values.get(name))
    return parser


def kept_arguments(arguments: Arguments) -> dict[str, Any]:
    """Return the arguments that `arguments_of_run` needs beside the other settings, as JSON."""
    named = vars(arguments).items()
    return {name: _absolute(value) for name, value in named if name not in NOT_KEPT}


def arguments_of_run(settings: RunSettings) -> Arguments:
    """Return the arguments that a run was started with; its config says what the model is."""
    model = undecided_fields(settings.config.to_dict())
    arguments = Arguments(model=model, training=settings.training_config)
    return dataclasses.replace(arguments, **checked_fields(Arguments, settings.arguments))


def check_resumed(saved: Arguments, named: Arguments) -> None:
    """Refuse arguments that a resumed run keeps and that differ from its own."""
    kept = KEPT_WHEN_RESUMED
    # BLEU that selects the best parameters is computed in the same way throughout.
    if saved.training.select_by == "bleu":
        kept += ("bleu_tokenization",)
    for name in kept:
        values = (getattr(arguments, name) for arguments in (saved, named))
        check_equal(name, *(_absolute(value) for value in values))


def _absolute(value: Any) -> Any:
    """Return a path as an absolute one, and a tuple as a list, as JSON has it."""
    if isinstance(value, tuple):
        return [_absolute(part) for part in value]
    return str(value.absolute()) if isinstance(value, Path) else value
