"""The flags and the YAML file of `jax-transformer train`, and the arguments that they name."""

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from jax_transformer.commands.command_line import Parser, described
from jax_transformer.config import TransformerConfig
from jax_transformer.config.declared import (
    check_mapping,
    check_names,
    checked_fields,
    declarations,
)
from jax_transformer.errors import InputError
from jax_transformer.runs.arguments import (
    DEFAULT_SENTINELS,
    FILES,
    NUMBER_WORDS,
    NUMBER_WORDS_SIZES,
    TEXT_SIZES,
    Arguments,
)
from jax_transformer.runs.initial_model import NO_MODEL, InitialModel, initial_model, with_teacher
from jax_transformer.runs.model_settings import (
    DECIDED,
    check_same_model,
    preset_fields,
    undecided_fields,
)
from jax_transformer.storage.yaml_file import read_yaml
from jax_transformer.training.config import TrainingConfig

PARTS = {"model": TransformerConfig, "training": TrainingConfig}  # of the settings
# The headings of the help, by the first argument under each.
HEADINGS = {"source": "text", "vocab_size": "tokenizer", "init": "initial model, teacher"}
HEADINGS |= {"output": "run", "mesh": "devices and processes", "preset": "preset"}
HEADINGS |= {"d_model": "sizes of the model", "token_embeddings": "embeddings and positions"}
HEADINGS |= {"output_projection": "output", "norm": "norms"}
HEADINGS |= {"attention_scale": "attention and feed-forward networks"}
HEADINGS |= {"dropout": "dropout and initialization", "steps": "steps and learning rate"}
HEADINGS |= {"optimizer": "optimizer", "freeze": "what is trained"}
HEADINGS |= {"num_microbatches": "memory, precision and averages", "objective": "objective"}
HEADINGS |= {"max_tokens": "batches", "evaluation_interval": "evaluation", "bpe_dropout": "chance"}
PREPARE = """Encode the training text as `jax-transformer train` would do, and keep it.

The arguments are those of `jax-transformer train`, so a command line can be used for both. Those
that do not concern the text change nothing and are not shown here."""


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
        """Return arguments with the named ones replaced; refuse a named one without effect."""
        training = dataclasses.replace(arguments.training, **self.training)
        training.check_acting(self.training)
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
    by_flag, by_file = _checked(_in_parts(flags), "", text=True), ({}, {}, {})
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
        parser = _parser(named.arguments(), command, shown if asks_all else usual, not asks_all)
        parser.print_help()
        parser.exit()
    return named


def named_values(values: Mapping[str, Any]) -> NamedSettings:
    """Return what a call in Python names: settings of the run, the model and the training."""
    parts = map(declarations, (Arguments, *PARTS.values()))
    known = [name for part in parts for name in part if name not in PARTS]
    check_names(values, known)
    return NamedSettings(*_checked(_in_parts(values), ""))


def _in_parts(named: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with those of the model and of the training as mappings of their own."""
    parts = {
        part: {name: named[name] for name in declarations(settings) if name in named}
        for part, settings in PARTS.items()
    }
    of_parts = set().union(*parts.values())
    return {name: value for name, value in named.items() if name not in of_parts} | parts


def _checked(
    named: Mapping[str, Any], prefix: str, *, text: bool = False
) -> tuple[dict[str, Any], ...]:
    """Return the fields of Arguments, of TransformerConfig and of TrainingConfig."""
    of_run = dict(named)
    for name in FILES:  # one file needs no list
        if isinstance(of_run.get(name), str):
            of_run[name] = [of_run[name]]
    parts = []
    for part, settings in PARTS.items():
        where = f"{prefix}{part}: " if prefix else ""
        parts.append(checked_fields(settings, of_run.pop(part, {}), where, text=text))
    return checked_fields(Arguments, of_run, prefix, text=text), *parts


def _parser(
    defaults: Arguments,
    command: str,
    shown: Collection[str] | None = None,
    is_short: bool = False,
) -> Parser:
    prepares = command == "prepare"
    text = PREPARE if prepares else described(Arguments)[0]
    parser = Parser(command, text, shown=shown, is_short=is_short)
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
