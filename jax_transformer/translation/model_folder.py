"""A trained model on disk: a folder of config.json, tokenizer.json and model.safetensors.

config.json describes the model: its config, its generation defaults, and the sha256 of every other
file. model.safetensors has the names and shapes of `torch_reference`, so that
`torch_reference.Transformer(config).load_state_dict(safetensors.torch.load_file(path))` loads it.
"""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_transformer import __version__
from jax_transformer.adapters import lora, peft_folder
from jax_transformer.config import SPECIAL_IDS, TransformerConfig
from jax_transformer.config.declared import check_names, checked, declarations
from jax_transformer.convert.languages import generating
from jax_transformer.convert.layouts.reference import LAYOUT
from jax_transformer.convert.origin import MAX_ORIGIN, ORIGIN_FILE, Origin
from jax_transformer.convert.report import ConversionError
from jax_transformer.convert.table import expand
from jax_transformer.convert.transfer import jax_leaf, to_params, to_tensors
from jax_transformer.decoding.generation_config import MODEL_OPTIONS, GenerationConfig
from jax_transformer.errors import InputError, shorten
from jax_transformer.model.checks import check_attention, check_params, check_whole_number
from jax_transformer.model.transformer import Params
from jax_transformer.model.tree import in_dtype
from jax_transformer.storage import weights as files
from jax_transformer.storage.folder import (
    CHECKPOINTS,
    CONFIG_FILE,
    SETTINGS_FILE,
    WEIGHTS_FILE,
    check_free,
    model_folder_of,
    staged,
)
from jax_transformer.storage.marian_files import is_marian
from jax_transformer.storage.reading import (
    MAX_TOKENIZER,
    file_digest,
    json_digest,
    read_bytes,
    read_json,
    with_tuples,
)
from jax_transformer.tokenizers import (
    Tokenizer,
    describe,
    from_description,
    read_files,
    write_files,
)

MODEL_TYPE = "jax_transformer"
FORMAT = 1  # of config.json
DTYPES = ("float32", "bfloat16")  # of the parameters
# Generation defaults of the models that this library trains.
GENERATION = MappingProxyType({"beam_size": 1, "length_penalty": 0.6})


class TrainedModel(NamedTuple):
    """A model, usually one that can translate text; it unpacks into its four parts.

    Attributes:
        config: The shape of the model.
        params: The parameters, a nested dict of arrays.
        tokenizer: Turns text into ids, and ids into text; None is a model of ids alone.
        generation: Defaults of `generate` by name, out of `MODEL_OPTIONS`.
    """

    config: TransformerConfig
    params: Params
    tokenizer: Tokenizer | None
    generation: Mapping[str, Any] = GENERATION

    def __repr__(self) -> str:
        """Return one line: a notebook would print every parameter."""
        config, leaves = self.config, jax.tree.leaves(self.params)
        dtypes = ", ".join(sorted({leaf.dtype.name for leaf in leaves}))
        return (
            f"TrainedModel({sum(leaf.size for leaf in leaves):,} parameters of {dtypes}, "
            f"{config.num_encoder_layers} + {config.num_decoder_layers} layers, "
            f"d_model={config.d_model}, vocabularies of {config.src_vocab_size:,} and "
            f"{config.tgt_vocab_size:,} tokens; fields: {', '.join(self._fields)})"
        )

    def with_languages(
        self, source_lang: str | None, target_lang: str | None, name: str
    ) -> "TrainedModel":
        """Return the model set to language codes; None keeps the one that it is set to.

        Args:
            name: What the model is called in error messages.
        """
        is_of_text = self.tokenizer is not None and self.config.source_features is None
        if not is_of_text and (source_lang, target_lang) == (None, None):
            return self
        tokenizer = self.for_text(name).tokenizer.with_languages(source_lang, target_lang, name)
        config, generation = generating(self.config, self.generation, tokenizer, name)
        return self._replace(config=config, tokenizer=tokenizer, generation=generation)

    def for_text(self, name: str, or_sound: bool = False) -> "TrainedModel":
        """Return the model, which `name` calls; refuse one of ids alone, or that reads sound."""
        if self.tokenizer is None:
            raise InputError(f"{name}: is a model of ids alone; save it with a tokenizer for text")
        if self.config.source_features is not None and not or_sound:
            raise InputError(f"{name}: reads sound, not text; use Transcriber")
        return self

    def generation_config(self, **options: Any) -> GenerationConfig:
        """Return the options of a search: those that are named, and the model's defaults.

        Without any `max_new_tokens`, it is the model's `max_length`. What the model bans stays
        banned beside the `banned_tokens` that are named.
        """
        check_names(options, declarations(GenerationConfig))
        for name, default in {"max_new_tokens": self.config.max_length, **self.generation}.items():
            options.setdefault(name, default)
        chosen = GenerationConfig(**options)
        banned = {*chosen.banned_tokens, *self.generation.get("banned_tokens", ())}
        return dataclasses.replace(chosen, banned_tokens=tuple(sorted(banned)))

    def with_adapter(self, folder: str | Path | None) -> "TrainedModel":
        """Return the model with the adapter in a folder of PEFT; it shares the other parameters.

        Raises:
            InputError: As `adapters.read_adapter`.
        """
        if folder is None:
            return self
        adapter = peft_folder.read_adapter(folder, self.config)
        return self._replace(params=lora.attach(self.params, adapter))

    def with_dtype(self, dtype: str | None) -> "TrainedModel":
        """Return the model with parameters of another type; None keeps theirs."""
        return self if dtype is None else self._replace(params=in_dtype(self.params, dtype))

    def with_max_length(self, max_length: int | None, name: str) -> "TrainedModel":
        """Return the model with another limit of its texts, in tokens; None keeps its own."""
        if max_length in (None, self.config.max_length):
            return self
        check_whole_number("max_length", max_length, least=1)
        if self.config.positions == "learned":
            raise InputError(
                f"{name}: max_length={max_length}: the position table was learned for "
                f"{self.config.max_length} tokens, and has no other rows; leave max_length out"
            )
        check_attention(self.config, max_length)
        return self._replace(config=dataclasses.replace(self.config, max_length=max_length))


def check_dtype(dtype: str | None) -> None:
    """Refuse a type that parameters cannot have; None keeps theirs."""
    if dtype not in (None, *DTYPES):
        raise InputError(f"dtype={shorten(dtype)} must be {' or '.join(map(repr, DTYPES))}")


def load(
    folder: str | Path,
    *,
    ignore_generation_config: bool = False,
    source_lang: str | None = None,
    target_lang: str | None = None,
    part: str = "whole",
) -> TrainedModel:
    """Load a trained model from its folder: one of this library or of Hugging Face.

    Nothing is downloaded, and no code in the folder is run. The result unpacks:

        config, params, tokenizer, generation = jax_transformer.load("runs/0")
        src = jax_transformer.pad(tokenizer.encode_source(["a line", "b"]), config.pad_id)
        best = jax_transformer.generate(params, config, src, **{"max_new_tokens": 50, **generation})
        print(tokenizer.decode(best.tokens[0, 0, : best.lengths[0, 0]]))

    Args:
        folder: The output of training, or a folder with the config.json of a Hugging Face model
            whose family this library knows.
        ignore_generation_config: Whether the generation defaults of a Hugging Face folder are
            ignored, for example because one of them cannot be honoured.
        source_lang: Code of the language of the sources, for a model with language codes; None is
            the one that the folder names.
        target_lang: Code of the language of the targets; None is the one that the folder names.
        part: "whole", or "encoder": the encoder alone, for `jax_transformer.encode`; the weights of
            the decoder are not read. A folder of an encoder alone needs no `part`.

    Raises:
        InputError: The folder is not that of a trained model, training has not finished, a file
            is missing or damaged, or the files do not belong together; the model has no such
            language, or does not say which language to translate into. The message is one line.
    """
    model = read(
        folder,
        ignore_generation_config=ignore_generation_config,
        source_lang=source_lang,
        target_lang=target_lang,
        part=part,
    )
    return model.with_languages(None, None, str(folder))


def read(folder: str | Path, **options: Any) -> TrainedModel:
    """Return a model as `load` does, by its options, but its target language may be unknown."""
    folder = model_folder_of(Path(folder))
    description = {"model_type": "marian_npz"} if is_marian(folder) else _read_description(folder)
    if not isinstance(description.get("model_type"), str):
        path = folder / CONFIG_FILE
        raise InputError(f"{path}: is damaged (it names no model_type); copy the model again")
    # The digest marks a model of this library, so that a damaged model_type is recognised.
    if description["model_type"] != MODEL_TYPE and "config_sha256" not in description:
        from jax_transformer.convert.huggingface import load_folder

        return TrainedModel(*load_folder(folder, **options))
    config, generation = _check_description(folder, description)
    for name, digest in description["sha256"].items():
        _check_digest(folder / name, digest)
    path = folder / WEIGHTS_FILE
    reads = None
    if (part := options.get("part", "whole")) != "whole":
        config, generation = config.part(part), {}
        reads = {row.foreign for row in expand(LAYOUT, config)}.__contains__
    tensors = files.read(path, reads=reads)
    for name, array in tensors.items():
        if array.dtype.name not in DTYPES:
            wanted = " or ".join(DTYPES)
            raise InputError(f"{path}: {name} is {array.dtype}, but must be {wanted}")
    with _first_fault(path):
        params, _ = to_params(tensors, config, LAYOUT, leaf=jax_leaf(), consume=True)
    tokenizer = _read_tokenizer(folder, description) if description["tokenizer"] else None
    model = TrainedModel(config, params, tokenizer, generation)
    source_lang, target_lang = options.get("source_lang"), options.get("target_lang")
    if source_lang is not None or target_lang is not None:
        tokenizer = model.for_text(str(folder)).tokenizer
        tokenizer = tokenizer.with_languages(source_lang, target_lang, str(folder))
        model = model._replace(tokenizer=tokenizer)
    _check_parts(model, f"{folder / CONFIG_FILE}: ")
    return model


def load_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of a model of this library; reads no weights."""
    folder, description = _own_description(folder)
    if description["tokenizer"] is None:
        raise InputError(f"{folder}: is a model of ids alone; name a folder with a tokenizer")
    for name in description["tokenizer"]["files"]:
        _check_digest(folder / name, description["sha256"][name])
    return _read_tokenizer(folder, description)


def _read_tokenizer(folder: Path, description: Mapping[str, Any]) -> Tokenizer:
    described = description["tokenizer"]
    return from_description(described, read_files(folder, described["files"]), str(folder))


def read_origin(folder: Path) -> Origin | None:
    """Return where a model of this library comes from; None if it was not a Hugging Face folder."""
    folder, description = _own_description(folder)
    if ORIGIN_FILE not in description["sha256"]:
        return None
    _check_digest(folder / ORIGIN_FILE, description["sha256"][ORIGIN_FILE])
    return Origin.from_bytes(read_bytes(folder / ORIGIN_FILE, "cannot be read", MAX_ORIGIN))


def save(folder: str | Path, model: TrainedModel | Sequence[Any], overwrite: bool = False) -> None:
    """Save a trained model as a folder, which `load`, `Translator` and all commands read.

    All files are written, or none.

        jax_transformer.save("runs/mine", (config, params, tokenizer, {"beam_size": 4}))

    Args:
        folder: A new folder.
        model: As `load` returns it: the config, the parameters in float32 or bfloat16, the
            tokenizer, or None for a model of ids alone; and the generation defaults, which are
            those of `train` if they are left out: beam_size 1 and length_penalty 0.6.
        overwrite: Whether to replace the trained model that is there.

    Raises:
        InputError: The folder exists, or cannot be written; the parts of the model have another
            type or do not belong together, or an option cannot be a default of a model.
    """
    if not isinstance(model, list | tuple) or len(model) not in (3, 4):
        raise InputError(
            f"model of type {type(model).__name__} must be what load returns: (config, params, "
            "tokenizer, generation)"
        )
    model = TrainedModel(*model)
    check_params(model.params, model.config)
    if not isinstance(model.tokenizer, Tokenizer | None):
        raise InputError(
            f"tokenizer of type {type(model.tokenizer).__name__} must be a Tokenizer of this "
            "library, which jax_transformer.tokenizers reads and trains, or None: ids alone"
        )
    for path, leaf in jax.tree.leaves_with_path(model.params):
        if leaf.dtype.name not in DTYPES:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise InputError(f"{name} is {leaf.dtype}, but must be {' or '.join(DTYPES)}")
    for name in model.generation:
        if name not in MODEL_OPTIONS:
            raise InputError(f"generation: {name!r} is no default that a model may have")
    _check_parts(model, "")
    check_free(Path(folder), overwrite)
    write(Path(folder), model)


def _check_parts(model: TrainedModel, where: str) -> None:
    """Refuse parts that do not belong together, and defaults with which no search can begin."""
    config, tokenizer = model.config, model.tokenizer
    names = ["src_vocab_size", "tgt_vocab_size", *SPECIAL_IDS] if tokenizer else []
    if tokenizer and tokenizer.languages is not None:  # they decide what a target begins with
        names.remove("bos_id")
    for name in names:
        value, wanted = getattr(config, name), getattr(tokenizer, name)
        if value != wanted:
            raise InputError(f"{where}{name}={value} must be the tokenizer's {wanted}")
    if not config.generates:
        return
    try:
        model.generation_config().check_model(config)
    except InputError as error:
        raise InputError(f"{where}generation: {error}") from error


def write(folder: Path, model: TrainedModel, origin: Origin | None = None) -> None:
    """Write all files of a trained model or none, into a folder whose other files stay."""
    with _first_fault(folder):
        tensors, _ = to_tensors(model.params, model.config, LAYOUT, copy=False)
    with staged(folder) as staging:
        if model.tokenizer is not None:
            write_files(staging, model.tokenizer)
        if origin is not None:
            (staging / ORIGIN_FILE).write_bytes(origin.to_bytes())
        files.write(staging / WEIGHTS_FILE, tensors, metadata={"format": "pt"})
        description = {
            "model_type": MODEL_TYPE,
            "format": FORMAT,
            "library_version": __version__,
            "config": model.config.to_dict(),
            "generation": dict(model.generation),
            "tokenizer": model.tokenizer and describe(model.tokenizer),
            "sha256": {path.name: file_digest(path) for path in sorted(staging.iterdir())},
        }
        description["config_sha256"] = _description_digest(description)
        (staging / CONFIG_FILE).write_text(json.dumps(description, indent=2) + "\n", "utf-8")


def model_digest(model: TrainedModel) -> str:
    """Return the sha256 of everything that decides what a model generates by default."""
    digest = hashlib.sha256(model.tokenizer.digest().encode())
    described = {"config": model.config.to_dict(), "generation": dict(model.generation)}
    digest.update(json_digest(described).encode())
    for leaf in jax.tree.leaves(model.params):
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()


def _own_description(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return the folder of a model of this library, and the content of its config.json."""
    folder = model_folder_of(folder)
    description = _read_description(folder)
    _check_description(folder, description)
    return folder, description


def _read_description(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    try:
        return read_json(path)
    except InputError as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            raise InputError(_missing(folder)) from error
        reason = str(error).removeprefix(str(path)).strip()
        raise InputError(f"{path}: is damaged ({reason}); copy the model again") from error


def _missing(folder: Path) -> str:
    """Return the message for a folder without config.json: an unfinished run, or not a model."""
    checkpoints = folder / CHECKPOINTS
    if checkpoints.is_dir() and any(path.name.isdecimal() for path in checkpoints.iterdir()):
        return (
            f"{folder}: training has not finished; resume it with `jax-transformer train --resume "
            f"--output {folder}`, or use `jax-transformer average {folder} NEW_FOLDER`"
        )
    if (folder / SETTINGS_FILE).is_file():
        fault = "training has not finished and has written no checkpoint"
        return f"{folder}: {fault}; start it again with the same command"
    if (folder / peft_folder.SETTINGS).is_file():
        return f"{folder}: is an adapter; name its model, and this folder by --adapter or adapter="
    reason = f"it has no {CONFIG_FILE}" if folder.exists() else "there is no such folder"
    return f"{folder}: is not the folder of a trained model, because {reason}"


def _check_description(
    folder: Path, description: dict[str, Any]
) -> tuple[TransformerConfig, dict[str, Any]]:
    """Return the config and the generation defaults of an own model's config.json."""
    path = folder / CONFIG_FILE
    if description.get("format") != FORMAT:
        raise InputError(
            f"{path}: is of format {description.get('format')!r:.40}, but this version of the "
            f"library reads format {FORMAT}; use the version that wrote it"
        )
    if description.get("config_sha256") != _description_digest(description):
        raise InputError(
            f"{path}: was changed after the model was written (config_sha256 differs); copy the "
            "model again, and give other options as arguments"
        )
    try:
        config = TransformerConfig.from_dict(description["config"])
        generation = with_tuples({**description["generation"]})
        names = {*description["sha256"].keys()}
        wanted = {WEIGHTS_FILE}
        if (described := description["tokenizer"]) is not None:
            checked("tokenizer.kind", described["kind"], str)
            wanted |= {*checked("tokenizer.files", described["files"], tuple[str, ...])}
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except (LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: is damaged ({error!r}); copy the model again") from error
    if names - {ORIGIN_FILE} != wanted:
        raise InputError(f"{path}: sha256 must name the files {', '.join(sorted(wanted))}")
    for name in generation:
        if name not in MODEL_OPTIONS:
            raise InputError(f"{path}: generation: {name!r} is not an option of this version")
    return config, generation


def _check_digest(path: Path, digest: object) -> None:
    if not path.is_file():
        raise InputError(f"{path}: is missing; copy the model again")
    if path.name == WEIGHTS_FILE:
        files.read_metadata(path)  # its header says how large it is: a longer file is not read
    if file_digest(path, None if path.name == WEIGHTS_FILE else MAX_TOKENIZER) != digest:
        raise InputError(
            f"{path}: is damaged or of another model (its sha256 is not that in {CONFIG_FILE}); "
            "copy the model again"
        )


@contextlib.contextmanager
def _first_fault(path: Path) -> Iterator[None]:
    """Turn an error of conversion into one line that names the file and the first fault."""
    try:
        yield
    except ConversionError as error:
        first, *others = error.report.faults
        more = f"; {len(others)} more tensors are at fault" if others else ""
        raise InputError(
            f"{path}: the parameters are not those of the config: {first.name}: {first.kind}"
            f"{', ' if first.detail else ''}{first.detail}{more}"
        ) from error
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def _description_digest(description: dict[str, Any]) -> str:
    """Return the sha256 of everything in config.json except this digest itself."""
    content = {name: value for name, value in description.items() if name != "config_sha256"}
    return json_digest(content)
