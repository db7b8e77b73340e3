"""The folders of PEFT: adapter_config.json and adapter_model.safetensors, there and back.

The tensors have the names of the modules of the base model in torch: those that the settings name.
A setting of PEFT that changes the mathematics is honoured or refused.
"""

import contextlib
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from jax_transformer.adapters.lora import Alpha
from jax_transformer.config import LARGEST, TransformerConfig
from jax_transformer.config.declared import checked
from jax_transformer.convert.families import FAMILIES, get_family
from jax_transformer.convert.layouts.reference import LAYOUT
from jax_transformer.convert.table import BoundRow, Layout, expand, flatten, nest, transpose
from jax_transformer.errors import InputError, shorten
from jax_transformer.model.checks import check_adapter
from jax_transformer.model.tree import LORA_LEAVES, Params, parameter_shapes
from jax_transformer.storage import weights as files
from jax_transformer.storage.folder import check_writable, staged
from jax_transformer.storage.reading import errors_naming, read_json
from jax_transformer.storage.weights.arrays import FLOATS
from jax_transformer.storage.writing import exists_already, json_bytes

SETTINGS = "adapter_config.json"
WEIGHTS, OLD_WEIGHTS = "adapter_model.safetensors", "adapter_model.bin"  # before PEFT 0.7
INSIDE = "base_model.model."  # begins the name of each tensor
FACTOR = re.compile(r"(.+)\.lora_[AB]\.weight")
FACTORS = "{}.lora_A.weight", "{}.lora_B.weight"
Names = str | tuple[str, ...] | None  # of modules: a regular expression, or ends
READ = {"r": Annotated[int, Meta(ge=1, le=LARGEST)], "lora_alpha": Alpha, "use_rslora": bool}
READ |= dict.fromkeys(("target_modules", "exclude_modules", "layers_pattern"), Names)
READ |= {"layers_to_transform": int | tuple[int, ...] | None}
READ |= {"modules_to_save": tuple[str, ...] | None}
# Settings that say how PEFT makes or trains an adapter.
WITHOUT_EFFECT = (
    "auto_mapping base_model_name_or_path ensure_weight_tying eva_config fan_in_fan_out "
    "inference_mode lora_dropout megatron_core peft_version qalora_group_size revision task_type"
).split()
# Any other setting must be absent, empty or one of these. Some initializations change the base.
NEUTRAL = {"peft_type": ["LORA"], "bias": ["none"]}
NEUTRAL["init_lora_weights"] = [True, False, "gaussian", "eva", "orthogonal"]
MERGE = "LoRA is read, and what PEFT has merged into a model (merge_and_unload, not for prompts)"
OTHER_BASE = "use the adapter with the model that it was trained for"


def read_adapter(folder: str | os.PathLike[str], config: TransformerConfig) -> Params:
    """Return the adapter in a folder of PEFT, for `lora.attach`: numpy arrays, bit for bit.

    Args:
        folder: Has adapter_config.json, and adapter_model.safetensors or adapter_model.bin.
        config: The shape of the base model. The names may be those of any family of Hugging Face
            that has this config, or of `torch_reference`.

    Raises:
        InputError: A file is missing or damaged; a setting is not supported, for example DoRA
            (names it); the tensors are not those that the settings name, or of another base model.
    """
    folder = Path(folder)
    several = sorted(path.parent.name for path in folder.glob(f"*/{SETTINGS}"))
    if several and not (folder / SETTINGS).exists():
        raise InputError(f"{folder}: has several adapters; name one in it: {', '.join(several)}")
    settings = _settings(read_json(folder / SETTINGS), folder / SETTINGS)
    is_old = (folder / OLD_WEIGHTS).exists() and not (folder / WEIGHTS).exists()
    tensors = files.read(folder / (OLD_WEIGHTS if is_old else WEIGHTS))
    return _adapter(settings, tensors, config, folder)


def _settings(values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the settings in `READ`; refuse any other that has an effect."""
    values = {"peft_type": None, "use_rslora": False, **values}
    for name, value in values.items():
        allowed = NEUTRAL.get(name, [] if value else [value])
        if name not in READ and name not in WITHOUT_EFFECT and value not in allowed:
            raise InputError(f"{path}: {name}={shorten(value)} is not supported; {MERGE}")
    return {
        name: checked(f"{path}: {name}", values.get(name), declared)
        for name, declared in READ.items()
    }


def _adapter(
    settings: dict[str, Any], given: dict[str, np.ndarray], config: TransformerConfig, folder: Path
) -> Params:
    """Return the adapter of settings and of tensors, after a check that they belong together."""
    tensors = {
        name.replace(INSIDE, "").replace(".modules_to_save", ""): tensor
        for name, tensor in given.items()
    }
    for name, tensor in tensors.items():
        if not (tensor.dtype.name in FLOATS and np.isfinite(tensor).all()):
            raise InputError(f"{folder}: {name} must hold finite numbers")
    modules = dict.fromkeys(match[1] for match in map(FACTOR.fullmatch, tensors) if match)
    whole = {name: tensor for name, tensor in tensors.items() if not FACTOR.fullmatch(name)}
    rows = _spelled_rows(config, [*(f"{module}.weight" for module in modules), *whole])
    products = {_module(name): row for name, row in rows.items() if row.operation == transpose}
    if strange := modules.keys() - products | whole.keys() - rows:
        fault = f"has {min(strange)}, which is no product or parameter of this model"
        raise InputError(f"{folder}: {fault}; {OTHER_BASE}; {MERGE}")
    if not modules:
        raise InputError(f"{folder}: has no factor of LoRA; train and save the adapter again")
    saved = _check_named(settings, rows, modules.keys(), {*map(_module, whole)}, folder)
    rank = settings["r"]
    scale = np.asarray(settings["lora_alpha"] / rank ** (0.5 if settings["use_rslora"] else 1))
    leaves: dict[str, np.ndarray] = {}
    for module in modules:
        first, second = (tensors.get(name.format(module)) for name in FACTORS)
        (outputs, inputs), path = products[module].shape, products[module].paths[0]
        wanted, shapes = [(rank, inputs), (outputs, rank)], [np.shape(first), np.shape(second)]
        if shapes != wanted:
            fault = f"the factors of {module} are {shapes}, but r={rank} needs {wanted} here"
            raise InputError(f"{folder}: {fault}; {OTHER_BASE}")
        for leaf, array in zip(LORA_LEAVES, (first.T, second.T, scale), strict=True):
            leaves[path.removesuffix("kernel") + leaf] = array
    return nest(leaves | _whole_parameters(whole, rows, saved, folder))


def _check_named(
    settings: Mapping[str, Any],
    rows: Mapping[str, BoundRow],
    factored: Collection[str],
    whole: Collection[str],
    folder: Path,
) -> set[str]:
    """Refuse tensors of other modules than the settings name; return those of modules_to_save.

    Args:
        rows: The row of each tensor of the base model.
        factored: The modules with factors.
        whole: The modules with whole parameters.
    """
    ends = settings["modules_to_save"] or ()
    saved = {
        module for module in map(_module, rows) if any(f"{end}." in f"{module}." for end in ends)
    }
    with errors_naming(folder / SETTINGS, "has a damaged regular expression", re.error):
        targets = {
            _module(name)
            for name, row in rows.items()
            if row.operation == transpose and _is_target(settings, _module(name), row)
        }
    if not settings["target_modules"]:  # PEFT has chosen them by the type of the model
        targets = {*factored}
    if wrong := (targets - saved) ^ factored | saved - whole:
        fault = f"target_modules and modules_to_save do not name the tensors: {min(wrong)} differs"
        raise InputError(f"{folder}: {fault}; save the adapter again")
    return saved


def _whole_parameters(
    tensors: Mapping[str, np.ndarray],
    rows: Mapping[str, BoundRow],
    saved: Collection[str],
    folder: Path,
) -> dict[str, np.ndarray]:
    """Return the whole parameters of an adapter by their paths."""
    leaves = {}
    for name, tensor in tensors.items():
        row = rows[name]
        # PEFT trains a copy of a shared table for each of its names; no block reads "shared".
        copies = [
            other
            for other in rows
            if rows[other].paths == row.paths and not other.endswith("shared.weight")
            if other in tensors or _module(name) in saved
        ] or [name]
        first = tensors.get(copies[0])
        if not all(copy in tensors and np.array_equal(tensors[copy], first) for copy in copies):
            raise InputError(
                f"{folder}: {', '.join(copies)} must be equal: this model has one table"
            )
        if tensor.shape != row.shape:
            raise InputError(f"{folder}: {name} is {tensor.shape}, not {row.shape}; {OTHER_BASE}")
        leaves[row.paths[0]] = row.operation.to_parameter(first, row.shapes[0])
    return leaves


def _module(tensor: str) -> str:
    return tensor.rpartition(".")[0]


def _is_target(settings: Mapping[str, Any], module: str, row: BoundRow) -> bool:
    """Return whether PEFT adapts a module, as `check_target_module_exists` of its tuners."""
    targets, layers = settings["target_modules"], settings["layers_to_transform"]
    patterns = [
        names if isinstance(names, str) else rf"(.*\.)?({'|'.join(map(re.escape, names or ()))})"
        for names in (targets, settings["exclude_modules"])
    ]
    named, excluded = (re.fullmatch(pattern, module) is not None for pattern in patterns)
    if isinstance(targets, str) and targets.lower() == "all-linear":
        named = row.paths[0] != "output_projection/kernel"
    if not named or isinstance(targets, str) or layers in (None, ()):
        return named and not excluded
    pattern = "|".join(np.atleast_1d(settings["layers_pattern"] or "[^.]*"))
    found = re.match(rf"(?:^|.*?\.)(?:{pattern})\.(\d+)\.", module)
    return found is not None and int(found[1]) in np.atleast_1d(layers) and not excluded


def _rows(layout: Layout, config: TransformerConfig) -> dict[str, BoundRow]:
    """Return the rows of the tensors that are one parameter each."""
    rows = expand(layout, config)
    return {row.foreign: row for row in rows if len(row.paths) == 1 and row.head is None}


def _spelled_rows(config: TransformerConfig, names: Collection[str]) -> dict[str, BoundRow]:
    """Return the rows of the layout that has the most of these names, in their spelling."""
    best: dict[str, BoundRow] = {}
    outer = "" if any(name.startswith("model.") for name in names) else "model."
    for family in (None, *FAMILIES.values()):
        full_name = getattr(family, "full_name", str)  # of a tensor of the base class
        with contextlib.suppress(InputError):  # no model of the family has this config
            rows = _rows(family.layout if family else LAYOUT, config)
            given = {full_name(name): name for name in names}
            found = {given.get(name, name.removeprefix(outer)): row for name, row in rows.items()}
            best = max(best, found, key=lambda rows: len(rows.keys() & {*names}))
    return best


def write_adapter(
    folder: str | os.PathLike[str],
    adapter: Params,
    config: TransformerConfig,
    *,
    family: str | None = None,
    base: str | None = None,
    dropout: float = 0.0,
    overwrite: bool = False,
) -> None:
    """Write an adapter as a folder that `PeftModel.from_pretrained` loads; all files or none.

    Args:
        folder: The folder.
        adapter: As `lora.init`, `lora.detach` or `read_adapter` returns it.
        config: The shape of the base model.
        family: Model type of the Hugging Face family whose names are written; None is those of
            `torch_reference`.
        base: Folder of the base model or its name on the hub, by which PEFT's Auto classes find it.
        dropout: The dropout that it was trained with, for who trains on.
        overwrite: Whether the files of an adapter that is there are replaced.

    Raises:
        InputError: The folder exists; the adapter is not of this config or family, or none that
            `read_adapter` reads; or its products differ in their ranks or scales.
    """
    folder, leaves = Path(folder), flatten(adapter)
    if os.path.lexists(folder) and not overwrite:
        raise exists_already(folder)
    check_writable(folder)
    check_adapter({path: np.shape(leaf) for path, leaf in leaves.items()}, parameter_shapes(config))
    layout = LAYOUT if family is None else get_family(family).layout
    tensors, targets, saved, kinds = {}, [], set(), set()
    for name, row in _rows(layout, config).items():
        path, module = row.paths[0], _module(name)
        own = [path.removesuffix("kernel") + leaf for leaf in LORA_LEAVES]
        if path in leaves and module:
            tensors[INSIDE + name] = row.operation.to_foreign(np.asarray(leaves[path]), row.shape)
            saved.add(module)
        if own[0] in leaves:
            *factors, scale = (np.asarray(leaves[leaf]) for leaf in own)
            for factor, array in zip(FACTORS, factors, strict=True):
                tensors[INSIDE + factor.format(module)] = array.T
            targets.append(module)
            kinds.add((rank := len(factors[1]), float(f"{(scale * rank).item():.15g}")))
    if len(kinds) != 1:
        raise InputError(f"an adapter must have one rank and one alpha, not {sorted(kinds)}")
    ((rank, alpha),) = kinds
    settings = {"peft_type": "LORA", "task_type": None if family is None else "SEQ_2_SEQ_LM"}
    settings |= {"base_model_name_or_path": base}
    settings |= {"r": rank, "lora_alpha": int(alpha) if alpha.is_integer() else alpha}
    settings |= {"target_modules": sorted(targets), "modules_to_save": sorted(saved) or None}
    settings |= {"lora_dropout": dropout, "bias": "none", "inference_mode": True}
    read = _adapter(_settings(settings, folder / SETTINGS), tensors, config, folder)
    if absent := leaves.keys() - flatten(read).keys():
        raise InputError(f"the adapter of {min(absent)} has no name in layout {layout.name!r}")
    with staged(folder) as staging:
        (staging / SETTINGS).write_bytes(json_bytes(settings))
        files.write(staging / WEIGHTS, tensors, metadata={"format": "pt"})
