"""The arguments of a training run: what it reads, what it starts from, where it writes.

`model` has the fields of the model, `training` those of the training. A resumed run takes both from
its checkpoint.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from jax_transformer.config import SPECIAL_IDS
from jax_transformer.config.declared import checked_fields
from jax_transformer.errors import InputError
from jax_transformer.runs.model_settings import preset_fields, undecided_fields
from jax_transformer.runs.state import RunSettings, check_equal
from jax_transformer.text.denoising import MOST_SENTINELS, Denoiser, DenoisingObjective, denoisers
from jax_transformer.text.encoding import Filters
from jax_transformer.text.parallel_text import Documents, Reading
from jax_transformer.text.store import default_store
from jax_transformer.tokenizers.readers.library import MOST_IDS
from jax_transformer.training.config import (
    CHANGEABLE,
    Count,
    Positive,
    TeacherWeight,
    Temperature,
    TrainingConfig,
)

# The metadata of a field says what a resumed run does with it, as `CHANGEABLE` does. Without any,
# the run keeps its own value and refuses another one.
OF_EACH_START = {"resumed": "of each start"}  # is in no checkpoint
UNWRITTEN = {"resumed": "unwritten"}  # is not in settings.yaml either
# Sizes of the model for some ten thousand sentences, and for the number words.
TEXT_SIZES = {"d_model": 256, "num_heads": 8, "d_ff": 512, "num_encoder_layers": 3}
TEXT_SIZES |= {"num_decoder_layers": 3, "max_length": 128, "dropout": 0.1}
DEFAULT_SENTINELS = 100
FEWEST_IDS = len(SPECIAL_IDS) + 2  # of a tokenizer: <unk> and one character
FILES = ("source", "target", "valid_source", "valid_target", "text", "valid_text")
NUMBER_WORDS_SIZES = {"d_model": 64, "num_heads": 4, "d_ff": 256, "num_encoder_layers": 2}
NUMBER_WORDS_SIZES |= {"num_decoder_layers": 2, "max_length": 64, "dropout": 0.0}


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
            files are one text. A .tsv, .csv or .jsonl file holds sources and targets: see
            --columns. For a model of sound, the sources are sound files; a path begins at the list.
        target: Translation of the training text, line by line: a file for each of --source that
            does not hold both.
        text: Plain text for --objective, alone or beside pairs; plain or compressed, of any size. A
            record of a .csv or .jsonl file is a document: see --text-column.
        text_unit: What a document is: each of the "lines", or what stands between "blank_lines". No
            example goes beyond a document; of "joined" lines, examples go on from line to line.
        valid_text: Plain text for validation.
        weights: One number for each file of --source, then of --text: how often its pairs or texts
            are drawn, in proportion. Without it, each is drawn once an epoch.
        prefixes: Text before the sources, for example "translate German to English: ": one for the
            pairs and one for the plain text; with --weights, one for each file.
        valid_source: Validation text, which selects the best parameters and is translated at the
            end.
        valid_target: Translation of the validation text, line by line.
        columns: Columns of the source and of the target in .tsv, .csv and .jsonl files: by names
            of the header or keys, for example de en or translation.de translation.en; by numbers,
            1 2, in files without a header. A .tsv file with no others needs none.
        text_column: Column of the document in .csv and .jsonl files of plain text; by default text.
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
        sentinels: Sentinels of a tokenizer that is trained: it is then a unigram model with <mask>
            and the mode tokens of UL2. By default 100 with --text, 0 without.
        byte_fallback: Whether that encoding also has the 256 bytes, from which it makes a character
            that the training text lacks; if not, it becomes <unk>.
        tokenizer_pairs: Most training pairs that the tokenizer is trained on, chosen by --seed.
        tokenizer: Tokenizer to use instead of training one: a tokenizer.json, or the folder of a
            tokenizer or of a model.
        target_tokenizer: Tokenizer of the targets, where --tokenizer is that of the sources; for a
            model with token_embeddings "separate".
        init: Folder of the model to start from, of this library or of Hugging Face; or its name on
            the Hugging Face hub. The run keeps its tokenizer, its config and its generation
            defaults; only the dropout rates may be others.
        init_keeps: What to keep of the last checkpoint of the run in --init beside its parameters:
            Adam's "moments", the "step" at which the schedule goes on, or both. Everything else may
            be another: learning rate, batches, text.
        teacher: Trained model to learn from, word by word (Kim and Rush 2016), for example a larger
            one: the folder of a model of this library or of Hugging Face. Its tokenizer is used.
        teacher_weight: Share of the teacher in the loss; the targets have the rest.
        teacher_temperature: What the logits of both are divided by in the teacher's part of the
            loss, which is multiplied by its square (Hinton et al. 2015).
        fresh_weights: Draw the weights anew: of --init, only the config and the tokenizer are used.
        ignore_generation_config: Ignore the generation defaults of a Hugging Face folder.
        source_lang: Code of the language of the sources; by default the one that the folder names.
        target_lang: Code of the language of the targets; by default the one that the folder names.
        language: Code of what is spoken, for a model of sound that has several languages.
        task: What a model of sound learns: to "transcribe", which is the default, or to "translate"
            to English.
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
        "config source target columns valid_source valid_target text vocab_size sentinels init "
        "output overwrite resume mesh preset d_model num_heads d_ff d_kv num_encoder_layers "
        "num_decoder_layers dropout steps schedule warmup_steps learning_rate freeze lora_rank "
        "objective label_smoothing max_tokens evaluation_interval dry_run".split()
    )
    config: Path | None = field(default=None, metadata=UNWRITTEN)
    source: tuple[Path, ...] | None = field(default=None, metadata=CHANGEABLE)
    target: tuple[Path, ...] | None = field(default=None, metadata=CHANGEABLE)
    text: tuple[Path, ...] | None = field(default=None, metadata=CHANGEABLE)
    text_unit: Documents = "lines"
    valid_text: tuple[Path, ...] | None = field(default=None, metadata=CHANGEABLE)
    weights: tuple[Positive, ...] | None = None
    prefixes: tuple[str, ...] | None = None
    valid_source: tuple[Path, ...] | None = field(default=None, metadata=CHANGEABLE)
    valid_target: tuple[Path, ...] | None = field(default=None, metadata=CHANGEABLE)
    columns: tuple[str, ...] | None = None
    text_column: str | None = None
    bad_lines: Literal["refuse", "skip"] = "refuse"
    valid_pairs: Count | None = None
    longest_side: Count | None = None
    max_ratio: Annotated[float, Meta(ge=1)] | None = None
    drop_duplicates: bool = False
    prepared: Path | None = field(default=None, metadata=CHANGEABLE)
    vocab_size: Annotated[int, Meta(ge=FEWEST_IDS, le=MOST_IDS)] = 6000
    sentinels: Annotated[int, Meta(ge=0, le=MOST_SENTINELS)] = 0
    byte_fallback: bool = False
    tokenizer_pairs: Count = 2_000_000
    tokenizer: Path | None = None
    target_tokenizer: Path | None = None
    init: Path | None = None
    init_keeps: tuple[Literal["moments", "step"], ...] = ()
    teacher: Path | None = None
    teacher_weight: TeacherWeight = 0.5
    teacher_temperature: Temperature = 1.0
    fresh_weights: bool = False
    ignore_generation_config: bool = field(default=False, metadata=CHANGEABLE)
    source_lang: str | None = None
    target_lang: str | None = None
    language: str | None = None
    task: Literal["transcribe", "translate"] | None = None
    output: Path | None = field(default=None, metadata=OF_EACH_START)
    overwrite: bool = field(default=False, metadata=UNWRITTEN)
    resume: bool = field(default=False, metadata=UNWRITTEN)
    tensorboard: bool = field(default=False, metadata=CHANGEABLE)
    bleu_tokenization: str = field(default="13a", metadata=CHANGEABLE)
    mesh: str | None = field(default=None, metadata=OF_EACH_START)
    coordinator: str | None = field(default=None, metadata=UNWRITTEN)
    num_processes: Count | None = field(default=None, metadata=UNWRITTEN)
    process_id: int | None = field(default=None, metadata=UNWRITTEN)
    lost_after: Count = field(default=120, metadata=OF_EACH_START)
    keep_freed_memory: bool = field(default=True, metadata=OF_EACH_START)
    preset: str | None = "vaswani2017"
    model: Mapping[str, Any] = field(
        default_factory=lambda: preset_fields("vaswani2017", TEXT_SIZES), metadata=OF_EACH_START
    )
    training: TrainingConfig = field(default_factory=TrainingConfig, metadata=OF_EACH_START)

    @property
    def objective(self) -> DenoisingObjective | None:
        """What the plain text trains; None where there is none."""
        objective = self.training.objective
        return None if objective == "translation" else objective

    def denoisers(self) -> tuple[Denoiser, ...]:
        """Return what makes the examples of the plain text; refuse noise that it cannot have."""
        density, mean_length = self.training.noise_density, self.training.mean_span_length
        if self.objective is not None:
            return denoisers(self.objective, density, mean_length)
        if density is not None or mean_length is not None:
            raise InputError("noise_density and mean_span_length need a denoising objective")
        return ()

    @property
    def filters(self) -> Filters:
        """Which pairs are kept."""
        return Filters(self.model["max_length"], self.longest_side, self.max_ratio)

    @property
    def reading(self) -> Reading:
        """How lines become pairs."""
        return Reading(self.columns, self.bad_lines)

    @property
    def plain_reading(self) -> Reading:
        """How lines become the documents of the plain text."""
        return Reading((self.text_column or "text",), self.bad_lines, self.text_unit)

    @property
    def store(self) -> Path:
        """The folder that keeps tokenizers and encoded text."""
        return self.prepared or default_store()

    def named_fields(self) -> dict[str, Any]:
        """Return the model's usual sizes, and its fields that differ from those of the preset."""
        expected = {} if self.preset is None else preset_fields(self.preset, {})
        return {
            name: value
            for name, value in self.model.items()
            if name in TEXT_SIZES or name not in expected or value != expected[name]
        }

    def to_mapping(self) -> dict[str, Any]:
        """Return the settings for settings.yaml, the model by its preset and what differs."""
        mapping = dataclasses.asdict(self)
        mapping["model"] = self.named_fields()
        return {name: value for name, value in mapping.items() if WHEN_RESUMED[name] != "unwritten"}


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

WHEN_RESUMED = {each.name: each.metadata.get("resumed") for each in dataclasses.fields(Arguments)}


def kept_arguments(arguments: Arguments) -> dict[str, Any]:
    """Return the arguments that `arguments_of_run` needs beside the other settings, as JSON.

    A resumed run does not read the folder of --init, perhaps a name on the hub: it stays as named.
    """
    kept = {
        name: _absolute(value)
        for name, value in vars(arguments).items()
        if WHEN_RESUMED[name] in (None, "changeable")
    }
    return kept | {"init": arguments.init and str(arguments.init)}


def arguments_of_run(settings: RunSettings) -> Arguments:
    """Return the arguments that a run was started with; its config says what the model is."""
    model = undecided_fields(settings.config.to_dict())
    arguments = Arguments(model=model, training=settings.training_config)
    return dataclasses.replace(arguments, **checked_fields(Arguments, settings.arguments))


def check_resumed(saved: Arguments, named: Arguments) -> None:
    """Refuse arguments that a resumed run keeps and that differ from its own."""
    for name, value in vars(saved).items():
        # BLEU that selects the best parameters is computed in the same way throughout.
        selects = name == "bleu_tokenization" and saved.training.select_by == "bleu"
        if selects or WHEN_RESUMED[name] is None:
            check_equal(name, _absolute(value), _absolute(getattr(named, name)))


def _absolute(value: Any) -> Any:
    """Return a path as an absolute one, and a tuple as a list, as JSON has it."""
    if isinstance(value, tuple):
        return [_absolute(part) for part in value]
    return str(value.absolute()) if isinstance(value, Path) else value
