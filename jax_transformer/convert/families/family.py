"""A model family of Hugging Face transformers as one description, and config.json by it."""

import fnmatch
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from flax import traverse_util
from msgspec import Meta

from jax_transformer.config import TransformerConfig
from jax_transformer.config.declared import checked, declarations
from jax_transformer.config.transformer_config import ENCODER_SIZES
from jax_transformer.convert.layouts.torch_nn import linear
from jax_transformer.convert.table import Layout, Row
from jax_transformer.errors import InputError, shorten
from jax_transformer.storage.folder import CONFIG_FILE

# The activations of transformers that this library has, in the form of `Family.words`.
ACTIVATIONS = {
    "relu": {"activation": "relu"},
    "gelu": {"activation": "gelu"},
    "gelu_new": {"activation": "gelu_tanh"},
    "gelu_pytorch_tanh": {"activation": "gelu_tanh"},
    "silu": {"activation": "silu"},
    "swish": {"activation": "silu"},
}
DEEPEST = 4  # objects inside each other in config.json whose keys are read
ENCODER_REMEDY = "; the encoder alone is read with part='encoder'"
# How the names of the classes end that have the heads of `TransformerConfig.head`.
HEADS = {"sequence": "ForSequenceClassification", "token": "ForTokenClassification"}
HEAD_NAMES = ("classification_head.", "classifier.")  # beginnings of the names of their tensors
HEAD_BIASES = ("classification_head.out_proj.bias", "classifier.bias")  # an element for each label
Labels = Annotated[int, Meta(ge=1, le=2**16)]  # a number of them, which a file may claim
ENCODER_DECODER = {"is_encoder_decoder": (True,), "is_decoder": (False,)}  # a part of `fixed`


def flag(field: str, true: Any, false: Any) -> dict[bool, dict[str, Any]]:
    """Return the words of a key that is true or false and sets one field."""
    return {True: {field: true}, False: {field: false}}


@dataclass(frozen=True)
class Family:
    """A model family of Hugging Face transformers.

    A key of an object inside config.json is "OBJECT.KEY". A key of config.json that no attribute
    names is not read: it belongs to generation, training or bookkeeping, or transformers does not
    read it either. A key without a default must be present.

    Attributes:
        model_type: The value of "model_type" in config.json; the layout has the same name.
        architecture: Class of transformers that loads the folder.
        encoder_architecture: Class of transformers that has the encoder alone; None if none has.
        heads: What `TransformerConfig.head` may be, each with a class of its own.
        head_start: `TransformerConfig.head_start` of these classes.
        head_prefix: What these classes put before the names of all other tensors.
        preset: Preset of `TransformerConfig`; it has every field that config.json does not set.
        fields: Keys whose value is a number, with the fields of the config that have this number:
            one field or several. Several keys of one field must agree.
        nullable: Those of them that may be null, which is None in the config.
        words: Keys with few possible values: for each value, the fields that it sets. Where two
            values set the same fields, the last is written. Several keys of one field must agree.
        fixed: Keys that must have one of these values; the first is written, and is what an
            absent key means.
        training_only: Keys that act on training in transformers but not here, with the value
            without effect, which is written. `notes` names those with another value.
        defaults: What an absent key means, as the class in transformers defines it.
        computed: Keys that follow from other keys where they are absent or null: the function
            gets the values of config.json with the defaults.
        written: Returns the keys to write in the place of some, which `computed` has made.
        implied: Returns the fields of the config that follow from the fields of config.json.
        tokenizer: Class of the tokenizer where a folder names none, in
            `tokenizers.readers.classes.CLASSES`; None where this library cannot read it.
        saves_buffers: Whether the class saves the layout's buffers.
        uses_stored_positions: Whether the class uses a position table as the file has it, rounded
            where the file is in half precision.
        other_parts: Names, as in fnmatch, of tensors of parts of the model that this library lacks:
            they are not read.
        file: What has the keys, in messages.
        unrecorded: Fields that no key has, so that they may have any value.
        full_name: Returns the layout's name of a tensor, given its name in the base class (for
            example BartModel, without an output); other names stay, and all names by default.
        is_tied: Returns whether the output projection of foreign tensors, by name, is tied. If it
            is given, it decides, and not "tie_word_embeddings" of config.json.
    """

    model_type: str
    architecture: str
    preset: str
    layout: Layout
    generation: Callable[[TransformerConfig], dict[str, Any]]
    fields: Mapping[str, str | tuple[str, ...]]
    words: Mapping[str, Mapping[Any, Mapping[str, Any]]] = field(default_factory=dict)
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    training_only: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    computed: Mapping[str, Callable[[Mapping[str, Any]], Any]] = field(default_factory=dict)
    implied: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    tokenizer: str | None = None
    saves_buffers: bool = False
    uses_stored_positions: bool = False
    full_name: Callable[[str], str] = str
    is_tied: Callable[[Mapping[str, Any]], bool] | None = None
    encoder_architecture: str | None = None
    heads: tuple[str, ...] = ()
    head_start: str = "bos"
    head_prefix: str = ""
    nullable: tuple[str, ...] = ()
    other_parts: tuple[str, ...] = ()
    file: str = CONFIG_FILE
    unrecorded: tuple[str, ...] = ("initialization",)
    written: Callable[[dict[str, Any]], dict[str, Any]] | None = None

    def lacks(self, tensor: str) -> bool:
        """Return whether a tensor of this name is of a part that this library lacks."""
        return any(fnmatch.fnmatchcase(tensor, name) for name in self.other_parts)

    def class_of(self, config: TransformerConfig) -> str | None:
        """Return the class of transformers for a config."""
        if config.head != "none":
            return self.classes_of_heads().get(config.head)
        return self.architecture if config.num_decoder_layers else self.encoder_architecture

    def classes_of_heads(self) -> dict[str, str]:
        """Return the class of transformers for each head."""
        name = self.architecture.removesuffix("ForConditionalGeneration")
        return {head: f"{name}{HEADS[head]}" for head in self.heads}

    def layout_name(self, tensor: str) -> str:
        """Return the layout's name of a tensor in a file of any class."""
        return self.full_name(tensor.removeprefix(self.head_prefix))

    def written_name(self, tensor: str, config: TransformerConfig) -> str:
        """Return the name of a tensor in a file, given the layout's."""
        is_inside = config.head != "none" and not tensor.startswith(HEAD_NAMES)
        return f"{self.head_prefix}{tensor}" if is_inside else tensor


def head_rows() -> list[Row]:
    """Return the rows of the heads, whose names are the same in all classes."""
    rows = []
    for foreign, name, head in (
        ("classification_head.dense", "dense", "sequence"),
        ("classification_head.out_proj", "output", "sequence"),
        ("classifier", "output", "token"),
    ):
        rows += linear(foreign, f"head/{name}", when=("head", head))
    return rows


def config_from_json(
    family: Family, values: Mapping[str, Any], tied: bool | None = None
) -> TransformerConfig:
    """Return the config of a config.json; `tied` says whether the weights tie the output."""
    architectures = values.get("architectures")
    heads = (head for head, name in family.classes_of_heads().items() if architectures == [name])
    head = next(heads, "none")
    is_encoder = architectures == [family.encoder_architecture] or head == "token"
    values = dict(_flattened(values))
    for key, accepted in family.fixed.items():
        if is_encoder and key in ENCODER_DECODER:  # some encoders say it of their whole model
            continue
        if key in values and values[key] not in accepted:
            raise InputError(
                f"{family.file}: {key}={shorten(values[key])} must be {_one_of(accepted)}"
                f"{ENCODER_REMEDY if key in ENCODER_DECODER else ''}"
            )
    values = {**family.defaults, **values}
    for key, value in family.computed.items():
        if values.get(key) is None:
            values[key] = value(values)
    if tied is not None:
        values["tie_word_embeddings"] = tied
    for key in (*family.fields, *family.words):
        if key not in values:
            raise InputError(f"{family.file} has no {key!r}; add it")
    fields: dict[str, Any] = {}
    sources: dict[str, str] = {}
    declared = declarations(TransformerConfig)
    for key, names in family.fields.items():
        for name in _names(names):
            if values[key] is None and key not in family.nullable:
                raise InputError(f"{family.file}: {key}=null must be a number")
            value = checked(f"{family.file}: {key}", values[key], declared[name])
            if fields.setdefault(name, value) != value:
                raise InputError(
                    f"{family.file}: {key}={shorten(value)} must equal "
                    f"{sources[name]}={shorten(fields[name])}"
                )
            sources.setdefault(name, key)
    chosen: dict[str, Any] = {}
    for key, words in family.words.items():
        value = values[key]
        if (type(value), value) not in [(type(word), word) for word in words]:
            raise InputError(f"{family.file}: {key}={shorten(value)} must be {_one_of(words)}")
        if any(chosen.get(name, word) != word for name, word in words[value].items()):
            raise InputError(
                f"{family.file}: {key}={shorten(value)} must be the same in both stacks"
            )
        chosen |= words[value]
    fields |= chosen
    for size in ENCODER_SIZES:  # a size of the encoder that is the decoder's needs no field
        if fields.get(f"encoder_{size}") == fields.get(size):
            fields[f"encoder_{size}"] = None
    if family.implied is not None:
        fields |= family.implied(fields)
    try:
        config = TransformerConfig.preset(family.preset, **fields)
        if head != "none":
            return config.with_head(head, **_head_fields(family, values))
        return config.part("encoder" if is_encoder else "whole")
    except InputError as error:
        raise InputError(f"{family.file}: {error}") from error


def _head_fields(family: Family, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a head by config.json, whose absent id2label means LABEL_0 and so on."""
    named = values.get("id2label")
    if named is None:
        count = checked("num_labels", values.get("num_labels", 2), Labels)
        named = {number: f"LABEL_{number}" for number in range(count)}
    items = named.items() if isinstance(named, Mapping) else ()
    labels = {str(number): label for number, label in items}
    numbers = [str(number) for number in range(len(labels))]
    if not numbers or {*labels} != {*numbers}:
        raise InputError(f"id2label={shorten(named)} must name the labels from 0, without gaps")
    return {
        "labels": [labels[number] for number in numbers],
        "head_start": family.head_start,
        "head_dropout": values.get("classifier_dropout") or 0.0,
        "problem_type": values.get("problem_type"),
    }


def config_to_json(family: Family, config: TransformerConfig) -> dict[str, Any]:
    """Return the content of config.json for a config: the inverse of `config_from_json`."""
    wanted = config.explicit()
    is_encoder, architecture = not config.num_decoder_layers, family.class_of(config)
    if architecture is None:
        raise InputError(
            f"transformers has no class for the encoder of a {family.architecture} alone, or none "
            f"with head={config.head!r}; convert.to_torch gives its tensors"
        )
    values = {
        "architectures": [architecture],
        "model_type": family.model_type,
        **{key: accepted[0] for key, accepted in family.fixed.items()},
        **family.training_only,
        **{key: wanted[_names(fields)[0]] for key, fields in family.fields.items()},
    }
    for key, words in family.words.items():
        for word, fields in words.items():
            if fields.items() <= wanted.items():
                values[key] = word
        values.setdefault(key, next(iter(words)))  # no word fits: the comparison below names it
    if config.head != "none":
        values |= {
            "id2label": {str(number): label for number, label in enumerate(config.labels)},
            "label2id": {label: number for number, label in enumerate(config.labels)},
            "problem_type": config.problem_type,
            "classifier_dropout": config.head_dropout,
        }
    if is_encoder:  # these keys are of the whole model, which the encoder does not know
        values |= {"num_decoder_layers": config.num_encoder_layers, "is_encoder_decoder": False}
    if family.written is not None:
        values = family.written(values)
    values = traverse_util.unflatten_dict(values, sep=".")
    possible = config_from_json(family, values).explicit()
    free = {*family.unrecorded, *(["position_rounding"] if family.uses_stored_positions else [])}
    differing = [
        f"{name}={value!r} must be {possible[name]!r}"
        for name, value in wanted.items()
        if name not in free and value != possible[name]
    ]
    if differing:
        raise InputError(
            f"no {architecture} has this config: {'; '.join(differing)}; "
            f"such a model is trained with preset={family.preset!r}"
        )
    return values


def generation_without_forced_end(config: TransformerConfig) -> dict[str, Any]:
    """Return the generation defaults of M2M100, whose files never force EOS, and of T5."""
    return {
        "decoder_start_token_id": config.bos_id,
        "eos_token_id": config.eos_id,
        "max_length": config.max_length,
        "pad_token_id": config.pad_id,
    }


def generation(config: TransformerConfig) -> dict[str, Any]:
    """Return the generation defaults of a family whose targets all end with EOS."""
    return {**generation_without_forced_end(config), "forced_eos_token_id": config.eos_id}


def notes(family: Family, values: Mapping[str, Any]) -> list[str]:
    """Return lines: what is not read, and keys of config.json that are not applied in training."""
    parts = ", ".join(family.other_parts)
    return [f"not read, only copied on the way home: {parts}"] * bool(parts) + [
        f"{family.file}: {key}={value!r} is kept, but not applied in training"
        for key, neutral in family.training_only.items()
        if (value := values.get(key, family.defaults.get(key, neutral))) != neutral
    ]


def _flattened(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of objects and of the objects inside them, with dots between."""
    for key, value in values.items():
        yield f"{prefix}{key}", value
        if isinstance(value, Mapping) and prefix.count(".") < DEEPEST:
            yield from _flattened(value, f"{prefix}{key}.")


def _names(fields: str | tuple[str, ...]) -> tuple[str, ...]:
    return (fields,) if isinstance(fields, str) else fields


def _one_of(values: Mapping[Any, Any] | tuple[Any, ...]) -> str:
    """Return possible values as config.json spells them."""
    spelt = [json.dumps(value) for value in values]
    return spelt[0] if len(spelt) == 1 else f"one of {', '.join(spelt)}"
