"""Marian's own folders: the options and the tensors of a model, and its files as Marian reads them.

The decoder starts from a zero vector there, and nothing is padded. So the model here has one more
id, of padding and BOS, behind those of the longer vocabulary: its rows are zeros, and its logit is
so small that it takes no probability.
"""

import functools
import glob
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from jax_transformer.config import TransformerConfig
from jax_transformer.config.declared import checked
from jax_transformer.convert.families.family import config_from_json
from jax_transformer.convert.families.marian import EOS, MARIAN_NPZ, MODEL_TYPE, SIZE
from jax_transformer.convert.generation_config import GENERATION_FILE
from jax_transformer.convert.table import expand
from jax_transformer.errors import InputError
from jax_transformer.storage import weights
from jax_transformer.storage.folder import CONFIG_FILE
from jax_transformer.storage.marian_files import DECODER, SPLITTERS, find_files
from jax_transformer.storage.reading import MAX_YAML, parse_json
from jax_transformer.storage.yaml_file import parse_yaml, to_yaml
from jax_transformer.tokenizers import Tokenizer
from jax_transformer.tokenizers.readers.marian import read_marian_vocabulary, written_vocabularies

WEIGHTS = "model.npz"
OPTIONS = "special:model.yml"  # an entry of the weights: the text of a YAML file
NEVER = -1000.0  # the logit of padding: exp(-1000) is 0
# Tensors with a row for each id, and the output's bias, with a column for each.
TABLES = ("Wemb", "encoder.Wemb", "decoder.Wemb", "decoder.ff_logit_out_Wt")
BIAS, OLD_OUTPUT = "decoder.ff_logit_out_b", "decoder.ff_logit_out_W"
# How Marian searches: where decoder.yml says nothing, and what a new decoder.yml says.
USUAL_SEARCH = {"beam-size": 12, "normalize": 0.0, "word-penalty": 0.0, "max-length-factor": 3.0}
NEW_SEARCH = {"beam-size": 6, "normalize": 1.0, "word-penalty": 0.0}
CONTROL_BYTES = [f"<0x{number:02X}>" for number in range(32)]  # never generated
# Keys in the place of a config.json that Marian has not.
OURS = ("model_type", "architectures", "dtype", SIZE, EOS)
_THEIRS = re.compile(r"^(encoder|decoder)_(?:l([0-9]{1,5})_)?")
_OURS = re.compile(r"^(encoder|decoder)\.(?:([0-9]+)\.)?")


def read_options(path: Path) -> dict[str, Any]:
    """Return the options in a model's weights, in the place of a config.json."""
    files = find_files(path)
    tensors = _read(files.weights, lambda name: name in (OPTIONS, OLD_OUTPUT, *TABLES))
    name = f"{files.weights}: {OPTIONS}"
    text = tensors.pop(OPTIONS, np.zeros(0)).tobytes().rstrip(b"\0")
    if not 0 < len(text) <= MAX_YAML:
        fault = f"is missing or has more than {MAX_YAML:,} bytes"
        raise InputError(f"{name} {fault}: the file is no model of Marian")
    values = parse_yaml(text.decode(errors="replace"), name)
    if not isinstance(values, dict) or any(isinstance(each, dict) for each in values.values()):
        raise InputError(f"{name} must hold options by their names; copy the model again")
    if values.get("transformer-decoder-autoreg") != "rnn":  # these are of another decoder
        values = {k: v for k, v in values.items() if k not in ("dec-cell", "layer-normalization")}
    if values.get("transformer-decoder-dim-ffn") == 0:
        del values["transformer-decoder-dim-ffn"]
    if values.get("tied-embeddings-all") is True:
        values |= {"tied-embeddings-src": True, "tied-embeddings": True}
    size = max((len(table) for table in tensors.values()), default=0)
    eos_id = read_marian_vocabulary(files.vocabularies[1], size).eos_id if files.vocabularies else 0
    return {"model_type": MODEL_TYPE, **values, SIZE: size + 1, EOS: eos_id}


def read_tensors(path: Path, reads: Callable[[str], bool]) -> dict[str, np.ndarray]:
    """Return the tensors of a model by the names in `families.marian`, padding included."""
    options = read_options(path)
    size, known = options[SIZE], 0
    tensors = _read(find_files(path).weights, lambda name: not name.startswith("special:"))
    for name in [name for name in TABLES if name in tensors]:
        known = len(tensors[name])  # in the end of the last table, which is of the target
        tensors[name] = np.pad(tensors[name], [(0, size - known), (0, 0)])
    bias = tensors.get(BIAS, np.zeros((1, known), np.float32))
    bias = bias.reshape(1, -1)[:, :size]
    missing = [(0, 0), (0, size - bias.shape[1])]
    tensors[BIAS] = np.pad(bias, missing, constant_values=NEVER)
    if options.get("transformer-no-projection") is True:  # the same as a product with an identity
        for row in expand(MARIAN_NPZ.layout, config_from_json(MARIAN_NPZ, options)):
            if row.foreign.endswith("_Wo"):
                tensors.setdefault(row.foreign, np.eye(*row.shape, dtype=bias.dtype))
            elif row.foreign.endswith("_bo"):
                tensors.setdefault(row.foreign, np.zeros(row.shape, bias.dtype))
    return {name: x for name, x in tensors.items() if reads(name)}


def _read(path: Path, reads: Callable[[str], bool]) -> dict[str, np.ndarray]:
    """Return the arrays that are read, by the names of `families.marian`."""
    renamed = functools.partial(_THEIRS.sub, _with_dots)
    tensors = weights.read(path, reads=lambda name: reads(renamed(name)))
    tensors = {renamed(name): tensor for name, tensor in tensors.items()}
    if OLD_OUTPUT in tensors:  # which older versions of Marian write
        tensors["decoder.ff_logit_out_Wt"] = tensors.pop(OLD_OUTPUT).T
    return tensors


def generation_options(path: Path, config: TransformerConfig) -> dict[str, Any]:
    """Return how Marian searches with a folder's decoder.yml, as keyword arguments of `generate`.

    Unknown words and control characters are not generated, unless decoder.yml allows them.
    """
    files = find_files(path)
    values = USUAL_SEARCH | files.decoder
    name = str(files.decoder_path)
    if values["word-penalty"] != 0:
        raise InputError(f"{name}: word-penalty={values['word-penalty']!r:.40} must be 0")
    normalize = 1.0 if values["normalize"] is True else values["normalize"]  # without a number
    banned: list[int] = []
    if files.vocabularies:
        vocabulary = read_marian_vocabulary(files.vocabularies[1], config.pad_id)
        unknown = [] if values.get("allow-unk") is True else [vocabulary.unk_id]
        control = [] if values.get("allow-special") is True else CONTROL_BYTES
        banned = unknown + [vocabulary.ids[token] for token in control if token in vocabulary.ids]
    beams = checked(f"{name}: beam-size", values["beam-size"], Annotated[int, Meta(ge=1)])
    alpha = checked(f"{name}: normalize", normalize or 0.0, Annotated[float, Meta(ge=0, le=10)])
    factor = checked(
        f"{name}: max-length-factor", values["max-length-factor"], Annotated[float, Meta(gt=0)]
    )
    return {
        "beam_size": beams,
        "length_penalty": alpha,
        "length_normalization": "power",
        "early_stopping": "shrinking",
        "max_length_factor": factor,
        "banned_tokens": tuple(sorted(banned)),
    }


def names_read(path: Path) -> set[str]:
    """Return the names of a model's files that are not carried over, as those of its training."""
    files = find_files(path)
    model = files.weights.name
    beside = {each.name for each in files.weights.parent.glob(f"{glob.escape(model)}.*")}
    vocabularies = {each.name for each in files.vocabularies}
    return {model, *SPLITTERS, *vocabularies, *beside} - {f"{model}.{DECODER}"}


def written_files(
    tensors: Mapping[str, np.ndarray], contents: Mapping[str, bytes], tokenizer: Tokenizer | None
) -> tuple[dict[str, np.ndarray], dict[str, bytes]]:
    """Return the entries of model.npz and the content of the other files, as Marian reads them.

    Args:
        tensors: By the names of `families.marian`.
        contents: The options, as config.json, and the other files of the folder that the model
            comes from: the search of its decoder.yml stays.

    Raises:
        InputError: Marian has no tokenizer of this kind.
    """
    vocabularies, names, sizes = written_vocabularies(tokenizer)
    source_size, target_size = sizes
    written = {}
    for name, tensor in tensors.items():
        if name in TABLES:
            tensor = tensor[: source_size if name == "encoder.Wemb" else target_size]
        elif name == BIAS:
            tensor = tensor[:, :target_size]
        written[_OURS.sub(_with_underscores, name)] = np.asarray(tensor, np.float32)
    options = parse_json(contents[CONFIG_FILE], OPTIONS)
    options = {key: value for key, value in options.items() if key not in OURS}
    options["tied-embeddings-all"] = options["tied-embeddings-src"] and options["tied-embeddings"]
    options["dim-vocabs"] = sizes
    options.setdefault("transformer-guided-alignment-layer", "last")  # CTranslate2 reads it
    written[OPTIONS] = np.frombuffer(to_yaml(options).encode() + b"\0", np.int8)
    search = NEW_SEARCH
    for name in [name for name in contents if name.endswith(DECODER)]:
        search = parse_yaml(contents[name].decode(), name)
    paths = {"relative-paths": True, "models": [WEIGHTS], "vocabs": names}
    others = (CONFIG_FILE, GENERATION_FILE, DECODER)
    files = {name: x for name, x in contents.items() if not name.endswith(others)}
    decoder = to_yaml({**search, **paths}).encode()
    return written, {**files, **vocabularies, DECODER: decoder}


def _with_dots(found: re.Match[str]) -> str:
    return f"{found[1]}." if found[2] is None else f"{found[1]}.{int(found[2]) - 1}."


def _with_underscores(found: re.Match[str]) -> str:
    return f"{found[1]}_" if found[2] is None else f"{found[1]}_l{int(found[2]) + 1}_"
