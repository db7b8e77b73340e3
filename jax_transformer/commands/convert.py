"""`jax-transformer convert`: weights from one layout to another."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jax_transformer.adapters import lora, read_adapter
from jax_transformer.config import TransformerConfig
from jax_transformer.convert import check_config, huggingface, read_layout, to_params, to_tensors
from jax_transformer.convert.adaptation import adapt
from jax_transformer.convert.families import FAMILIES
from jax_transformer.convert.families.family import Family, notes
from jax_transformer.convert.layout_file import config_of, is_layout_file
from jax_transformer.convert.origin import Origin, read_origin
from jax_transformer.convert.report import Report
from jax_transformer.errors import InputError
from jax_transformer.porting.layouts import get_layout
from jax_transformer.porting.trainers import TRAINERS, read_trainer
from jax_transformer.storage import weights as files
from jax_transformer.storage.marian_files import is_marian
from jax_transformer.storage.reading import parse_json, read_json
from jax_transformer.storage.weights.shards import MAX_SHARD_SIZE
from jax_transformer.tokenizers import Tokenizer
from jax_transformer.tokenizers.readers.classes import read_class, tokenizer_names, written_config

CONFIG_KEY = "config"  # of a .safetensors file's metadata


class SourceModel(NamedTuple):
    """A model that was read."""

    config: TransformerConfig
    params: dict[str, Any]
    tokenizer: Tokenizer | None = None  # None where the source has none that this library can read
    report: Report | None = None  # what became of each tensor of a weight file
    origin: Origin | None = None
    left: Sequence[str] = ()  # files of a Hugging Face folder that the origin leaves out


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    """Weights to read, by their files and names.

    Attributes:
        source: Weights to read: a .safetensors, .pt, .pth, .bin or .ckpt file, a Hugging Face
            folder, or a folder that training has written. The config.json of a folder says which
            it is. With a TOML file as --layout, also a folder with shards and their index. With
            the name of a training program as --layout (fairseq, joeynmt, opennmt_py,
            annotated_transformer), a checkpoint as the program wrote it, beside its other files.
        layout: Table of the names and shapes of the source's tensors: the name of a layout, for
            example torch_nn, or a TOML file that holds one. A folder needs none: its config.json
            says what it is. Neither do the weights of torch_reference, which are the default.
        config: JSON file of the config's fields, for example {"preset": "torch_nn", "num_heads":
            8}, for a source that does not record them and a layout whose file does not hold them.
        strip_prefixes: Prefixes that are removed from every name of the source that begins with
            them, for example model.
        key: The entry of a checkpoint that holds the weights. Without it, model,
            model_state_dict, state_dict and ema are tried.
        drop: Names of tensors to leave out, for example criterion.weight "extra_head.*".
    """

    source: Path
    layout: str = "reference"
    config: Path | None = None
    strip_prefixes: tuple[str, ...] = ()
    key: str | None = None
    drop: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(Weights):
    """Read weights in one layout, write them in another, and print what became of each tensor.

    A folder of the same Hugging Face family gets the tokenizer and the other files of the source,
    also if the source is a model that training continued. What is not carried over is printed.

    Attributes:
        output: Weights to write: a file of one of these kinds; with the name of a Hugging Face
            family as --output-layout, a folder.
        adapter: Folder of PEFT whose adapter (LoRA) is merged into the weights.
        output_layout: Layout of the output; the same values as --layout.
        buffers: Weights as the program wrote them, whose buffers come home bit for bit, for example
            a table of sinusoids. Without it, buffers are as this library computes them.
        dtype: Floating-point type to convert to; without it, each tensor keeps its own.
        overwrite: Replace an existing output.
        max_shard_size: Most bytes of one weight file of a Hugging Face folder, for example 5GB;
            larger weights are split into shards.
        num_heads: Attention heads, for the checkpoint of a program that does not record them
            (annotated_transformer); without it, the number in its code.
        adapt: Make an encoder-decoder of a folder of Gemma 2 or of the text of Gemma 3, to be
            trained; with t5gemma or t5gemma2 as --output-layout.
    """

    output: Path
    adapter: Path | None = None
    output_layout: str = "reference"
    buffers: Path | None = None
    dtype: str | None = None
    overwrite: bool = False
    max_shard_size: str = MAX_SHARD_SIZE
    num_heads: int | None = None
    adapt: bool = False


def convert(arguments: Arguments) -> None:
    """Convert weights; print what became of each tensor."""
    output, output_layout = arguments.output, arguments.output_layout
    get_layout(arguments.layout)
    target = get_layout(output_layout)
    if arguments.buffers is not None and output_layout in FAMILIES:
        raise InputError(f"--buffers {arguments.buffers} is for a file; {output} will be a folder")
    buffers = arguments.buffers is None or _read_tensors(arguments.buffers, output_layout)
    if arguments.adapt:
        config, params = adapt(arguments.source, dtype=arguments.dtype)
        tokenizer = read_class(arguments.source, config, "GemmaTokenizer")
        model = SourceModel(config, params, tokenizer)
    else:
        model = read_source(arguments, arguments.dtype, arguments.num_heads)
    if model.report:
        print(model.report)
    if arguments.adapter is not None:
        adapter = read_adapter(arguments.adapter, model.config)
        model = model._replace(params=lora.merge(lora.attach(model.params, adapter)))
    if (described := described_config(output_layout)) is not None:
        check_config(model.config, described.explicit(), f"the config in {output_layout}")
    if family := FAMILIES.get(output_layout):
        _write_folder(model, family, arguments)
    else:
        tensors, report = to_tensors(
            model.params, model.config, target, buffers=buffers, copy=False
        )
        recorded = {CONFIG_KEY: json.dumps(model.config.to_dict())}
        metadata = recorded if output.suffix == ".safetensors" else None
        files.write(output, tensors, overwrite=arguments.overwrite, metadata=metadata)
        print(report)
    print(f"{output} written, and read back equal")


def _read_tensors(path: Path, layout: str) -> dict[str, Any]:
    """Return the tensors of a file of weights, or of the checkpoint of a training program."""
    if is_checkpoint(path, layout, None):
        return read_trainer(path, layout)[1].tensors
    return files.read_trained(path)


def _write_folder(model: SourceModel, family: Family, arguments: Arguments) -> None:
    """Write a folder of a family with as much of the source as the family can have."""
    left, origin, tokenizer = [*model.left], model.origin, model.tokenizer
    if origin is not None and origin.model_type != family.model_type:
        left += ["config.json", *origin.files]
        origin = None
    usual = family.tokenizer
    if tokenizer and (usual is None or written_config(tokenizer, model.config, usual) is None):
        left += tokenizer.contents
        tokenizer = None
    huggingface.to_huggingface(
        model.params,
        model.config,
        arguments.output,
        family=family.model_type,
        tokenizer=tokenizer,
        origin=origin,
        max_shard_size=arguments.max_shard_size,
        overwrite=arguments.overwrite,
    )
    if left:
        print(f"not carried over: {', '.join(left)}")


def read_source(
    weights: Weights, dtype: str | None = None, num_heads: int | None = None
) -> SourceModel:
    """Return the model in a weight file or folder; arguments as for `convert`."""
    source, layout, config_file = weights.source, weights.layout, weights.config
    alone, trained = holds_weights_alone(weights), is_checkpoint(source, layout, config_file)
    if not alone and (weights.key is not None or weights.drop):
        raise InputError(f"--key and --drop are for files of weights; {source} holds a whole model")
    if not trained and num_heads is not None:
        raise InputError(f"--num-heads {num_heads} is for the checkpoints of training programs")
    if layout in FAMILIES:
        model_type = huggingface.read_config(source).get("model_type")
        if model_type != layout:
            raise InputError(f"{source}: model_type={model_type!r} contradicts --layout {layout}")
    if trained or alone:
        tokenizer = None
        if trained:
            program, model = read_trainer(source, layout)
            config, table, tensors = program.config(model, num_heads), program.layout, model.tensors
            tokenizer = program.tokenizer(model, config)
        else:
            tensors = files.read_trained(source, key=weights.key, drop=weights.drop)
            config, table = file_config(source, config_file, layout), get_layout(layout)
        params, report = to_params(
            tensors,
            config,
            table,
            strip_prefixes=weights.strip_prefixes,
            dtype=dtype,
            consume=True,
        )
        return SourceModel(config, params, tokenizer, report)
    if huggingface.is_huggingface(source):
        return _read_huggingface(source, dtype)
    from jax_transformer.translation import model_folder

    model = model_folder.load(source)
    if dtype is not None:
        reference = get_layout("reference")
        tensors, _ = to_tensors(model.params, model.config, reference, copy=False)
        params, _ = to_params(tensors, model.config, reference, dtype=dtype)
        model = model._replace(params=params)
    origin = model_folder.read_origin(source)
    return SourceModel(model.config, model.params, model.tokenizer, origin=origin)


def holds_weights_alone(weights: Weights) -> bool:
    """Return whether the source is a file, or a folder's files, that only a layout describes."""
    if weights.source.is_dir() or is_marian(weights.source):
        return is_layout_file(weights.layout)
    return not is_checkpoint(weights.source, weights.layout, weights.config)


def is_checkpoint(source: Path, layout: str, config_file: Path | None) -> bool:
    """Return whether the source is a checkpoint of a training program, which has its settings."""
    # A file in a program's layout that `convert` wrote has them in its metadata or in --config.
    weights_alone = config_file is not None or source.suffix == ".safetensors"
    return layout in TRAINERS and not weights_alone and not source.is_dir()


def _read_huggingface(folder: Path, dtype: str | None) -> SourceModel:
    config, params = huggingface.from_huggingface(folder, dtype=dtype)
    origin, left = read_origin(folder)
    family = FAMILIES[origin.model_type]
    for note in notes(family, origin.config):
        print(note)
    names = tokenizer_names(folder, family.tokenizer) if family.tokenizer else ()
    present = [name for name in names if (folder / name).exists()]
    if family.tokenizer is None or len(present) < len(names):
        return SourceModel(config, params, origin=origin, left=[*left, *present])
    tokenizer = huggingface.load_tokenizer(folder)[1]
    return SourceModel(config, params, tokenizer, origin=origin, left=left)


def file_config(source: Path, config_file: Path | None, layout: str) -> TransformerConfig:
    """Return the config in the JSON file, else that of the layout's file, else the recorded one."""
    known: dict[str, TransformerConfig] = {}  # by what a message calls it, the first one counts
    if config_file is not None:
        known[f"the config in {config_file}"] = config_of(read_json(config_file), config_file)
    if (described := described_config(layout)) is not None:
        known[f"the config in {layout}"] = described
    metadata = {} if source.is_dir() else files.read_metadata(source)
    if (recorded := metadata.get(CONFIG_KEY)) is not None:
        known["the config saved with the weights"] = config_of(parse_json(recorded, source), source)
    if not known:
        raise InputError(f"{source}: records no config; name a JSON file of it by --config")
    config = next(iter(known.values()))
    for origin, other in known.items():
        check_config(config, other.explicit(), origin)
    return config


def described_config(layout: str) -> TransformerConfig | None:
    """Return the config in a layout's file; None where it has none or is no file."""
    return read_layout(layout).config if is_layout_file(layout) else None
