"""The folders of PEFT: adapter_config.json and adapter_model.safetensors, there and back.

Reading takes the targets from the tensors, whose names are those of the modules of the base model
in torch. Every setting of PEFT that changes the mathematics is honoured or refused by name.
"""

import contextlib
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from jax_transformer.config import LARGEST, TransformerConfig
from jax_transformer.config.declared import check_mapping, checked
from jax_transformer.convert.families import FAMILIES, get_family
from jax_transformer.convert.layouts.reference import LAYOUT
from jax_transformer.convert.table import Layout, expand, flatten, nest, transpose
from jax_transformer.errors import InputError, shorten
from jax_transformer.model.tree import LORA_LEAVES, Params, parameter_shapes
from jax_transformer.storage import weights as files
from jax_transformer.storage.folder import check_writable, staged
from jax_transformer.storage.reading import read_json
from jax_transformer.storage.writing import exists_already, json_bytes

SETTINGS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FACTOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
PLAIN = re.compile(r"[\w.]+")  # a key of a pattern that is no regular expression
Rank = Annotated[int, Meta(ge=1, le=LARGEST)]
USUAL = {"r": 8, "lora_alpha": 8, "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}}
# Settings that say which modules PEFT makes, which the tensors show, or how it trains them.
WITHOUT_EFFECT = {
    *("auto_mapping base_model_name_or_path ensure_weight_tying exclude_modules").split(),
    *("fan_in_fan_out inference_mode layers_pattern layers_to_transform lora_dropout").split(),
    *("megatron_core peft_version qalora_group_size revision target_modules task_type").split(),
}
# Every other setting must have one of these values. Other initializations change the base model.
NEUTRAL = {"peft_type": ("LORA",), "bias": ("none",)}
NEUTRAL |= {"init_lora_weights": (True, False, "gaussian", "eva", "orthogonal")}


def read_adapter(folder: str | os.PathLike[str], config: TransformerConfig) -> Params:
    """Return the adapter in a folder of PEFT, for `lora.attach`; bit for bit, as numpy arrays.

    Args:
        folder: Has adapter_config.json and adapter_model.safetensors.
        config: The shape of the base model. The names may be those of any family or layout that
            has this config: of Hugging Face, or of `torch_reference`.

    Raises:
        InputError: A file is missing or damaged; a setting is not supported, for example DoRA or
            `modules_to_save` (names it); or the adapter is of another base model.
    """
    folder = Path(folder)
    values = _settings(folder / SETTINGS)
    tensors = files.read(folder / WEIGHTS)
    found = {name: FACTOR.fullmatch(name) for name in tensors}
    if strange := [name for name, match in found.items() if match is None]:
        raise InputError(
            f"{folder / WEIGHTS}: {strange[0]} is no factor of LoRA; merge the adapter by PEFT's "
            "merge_and_unload, and read the merged model"
        )
    modules = {match[1]: name.rpartition(".lora_")[0] for name, match in found.items() if match}
    paths = _paths(config, modules, folder)
    kernels, leaves = parameter_shapes(config), {}
    for module, prefix in modules.items():
        factors = [tensors.get(f"{prefix}.lora_{factor}.weight") for factor in "AB"]
        rank = _by_module(values, "rank", "r", module)
        (inputs, outputs), path = kernels[f"{paths[module]}/kernel"], paths[module]
        wanted = [(rank, inputs), (outputs, rank)]
        shapes = [None if factor is None else factor.shape for factor in factors]
        if shapes != wanted:
            raise InputError(
                f"{folder}: the factors of {module} are {shapes}, but {wanted} is what rank {rank} "
                "needs in this model; use the adapter with the model that it was trained for"
            )
        alpha = _by_module(values, "alpha", "lora_alpha", module)
        scale = alpha / (rank**0.5 if values["use_rslora"] else rank)
        first, second = (factor.T for factor in factors)
        own = first, second, np.asarray(scale, first.dtype)
        leaves |= {f"{path}/{leaf}": x for leaf, x in zip(LORA_LEAVES, own, strict=True)}
    return nest(leaves)


def _settings(path: Path) -> dict[str, Any]:
    """Return the settings that decide ranks and scales; refuse any other that has an effect."""
    values = {"peft_type": None} | read_json(path)
    for name, value in values.items():
        if name in USUAL or name in WITHOUT_EFFECT or (name not in NEUTRAL and not value):
            continue
        if value not in NEUTRAL.get(name, ()):
            raise InputError(
                f"{path}: {name}={shorten(value)} is not supported; merge the adapter by PEFT's "
                "merge_and_unload, and read the merged model"
            )
    values = USUAL | {name: values[name] for name in USUAL if values.get(name) is not None}
    for name, kind in {"r": Rank, "lora_alpha": float, "use_rslora": bool}.items():
        checked(f"{path}: {name}", values[name], kind)
    for name, kind in {"rank_pattern": Rank, "alpha_pattern": float}.items():
        for key, value in check_mapping(values[name], f"{path}: {name} ").items():
            checked(f"{path}: {name}: {shorten(key)}", value, kind)
            if not PLAIN.fullmatch(key):
                raise InputError(
                    f"{path}: {name}: {shorten(key)} must be the end of a module's name, and no "
                    "other regular expression; merge the adapter by PEFT's merge_and_unload"
                )
    return values


def _by_module(values: Mapping[str, Any], pattern: str, usual: str, module: str) -> Any:
    """Return a module's value: of the first pattern that is the end of its name, or the usual."""
    for key, value in values[f"{pattern}_pattern"].items():
        if f".{module}".endswith(f".{key}"):
            return value
    return values[usual]


def _modules(layout: Layout, config: TransformerConfig) -> dict[str, str]:
    """Return the path of each product with a kernel by the name of its module in torch."""
    return {
        row.foreign.removesuffix(".weight"): row.paths[0].removesuffix("/kernel")
        for row in expand(layout, config)
        if row.operation == transpose and len(row.paths) == 1 and row.head is None
    }


def _paths(config: TransformerConfig, modules: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return the path of each of these modules, in the layout that has the most of their names."""
    best: dict[str, str] = {}
    for family in (None, *FAMILIES.values()):
        full_name = getattr(family, "full_name", None) or str  # of a module of the base class
        with contextlib.suppress(InputError):  # no model of the family has this config
            known = _modules(family.layout if family else LAYOUT, config)
            named = {name: full_name(f"{name}.weight").removesuffix(".weight") for name in modules}
            found = {name: known[full] for name, full in named.items() if full in known}
            best = max(best, found, key=len)
    if absent := [module for module in modules if module not in best]:
        raise InputError(
            f"{folder}: is not an adapter of this model, which has no product {absent[0]}; use the "
            "adapter with the model that it was trained for"
        )
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
        adapter: As `lora.init` or `lora.detach` returns it.
        config: The shape of the base model.
        family: Model type of the Hugging Face family whose names are written; None is those of
            `torch_reference`.
        base: Name or folder of the base model, which PEFT shows.
        dropout: The dropout that it was trained with, for who trains on.
        overwrite: Whether the files of an adapter that is there are replaced.

    Raises:
        InputError: The folder exists, or the adapter is not of this config or family.
    """
    folder, leaves = Path(folder), flatten(adapter)
    if os.path.lexists(folder) and not overwrite:
        raise exists_already(folder)
    check_writable(folder, (SETTINGS, WEIGHTS))
    layout = LAYOUT if family is None else get_family(family).layout
    names = {path: module for module, path in _modules(layout, config).items()}
    tensors, ranks, alphas = {}, {}, {}
    for path in dict.fromkeys(path.rpartition("/")[0] for path in leaves):
        if path not in names:
            raise InputError(f"the adapter of {path} has no name in layout {layout.name!r}")
        first, second, scale = (np.asarray(leaves[f"{path}/{leaf}"]) for leaf in LORA_LEAVES)
        module, rank = names[path], first.shape[1]
        tensors[f"base_model.model.{module}.lora_A.weight"] = first.T
        tensors[f"base_model.model.{module}.lora_B.weight"] = second.T
        ranks[module], alphas[module] = rank, (scale * rank).item()
    (rank, _), (alpha, _) = (Counter(x.values()).most_common(1)[0] for x in (ranks, alphas))
    settings = {
        "peft_type": "LORA",
        "task_type": None if family is None else "SEQ_2_SEQ_LM",
        "base_model_name_or_path": base,
        "target_modules": sorted(ranks),
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "rank_pattern": {module: own for module, own in ranks.items() if own != rank},
        "alpha_pattern": {module: own for module, own in alphas.items() if own != alpha},
        "lora_dropout": dropout,
        "use_rslora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    with staged(folder) as staging:
        (staging / SETTINGS).write_bytes(json_bytes(settings))
        files.write(staging / WEIGHTS, tensors, metadata={"format": "pt"})
