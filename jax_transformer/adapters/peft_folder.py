"""The folders of PEFT: adapter_config.json and adapter_model.safetensors, there and back.

Which products an adapter changes is read from its tensors, whose names are those of the modules of
the base model in torch. A setting of PEFT that changes the mathematics is honoured or refused.
"""

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from jax_transformer.config import LARGEST, TransformerConfig
from jax_transformer.config.declared import checked
from jax_transformer.convert.families import FAMILIES, get_family
from jax_transformer.convert.layouts.reference import LAYOUT
from jax_transformer.convert.table import Layout, expand, flatten, nest, transpose
from jax_transformer.errors import InputError, shorten
from jax_transformer.model.tree import LORA_LEAVES, Params, parameter_shapes
from jax_transformer.storage import weights as files
from jax_transformer.storage.folder import check_writable, staged
from jax_transformer.storage.reading import read_json
from jax_transformer.storage.weights.arrays import FLOATS
from jax_transformer.storage.writing import exists_already, json_bytes

SETTINGS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FACTOR = re.compile(r"base_model\.model\.(.+)\.lora_[AB]\.weight")
NAMES = "base_model.model.{}.lora_A.weight", "base_model.model.{}.lora_B.weight"
READ = {"r": Annotated[int, Meta(ge=1, le=LARGEST)], "lora_alpha": float, "use_rslora": bool}
# Settings that say which modules PEFT makes, which the tensors show, or how it trains them.
WITHOUT_EFFECT = (
    "auto_mapping base_model_name_or_path ensure_weight_tying exclude_modules fan_in_fan_out "
    "inference_mode layers_pattern layers_to_transform lora_dropout megatron_core peft_version "
    "qalora_group_size revision target_modules task_type"
).split()
# Any other setting must be absent, empty or one of these. Some initializations change the base.
NEUTRAL = {"peft_type": ["LORA"], "bias": ["none"]}
NEUTRAL["init_lora_weights"] = [True, False, "gaussian", "eva", "orthogonal"]
MERGE = "merge the adapter by PEFT's merge_and_unload, and read the merged model"
OTHER_BASE = "use the adapter with the model that it was trained for"


def read_adapter(folder: str | os.PathLike[str], config: TransformerConfig) -> Params:
    """Return the adapter in a folder of PEFT, for `lora.attach`: numpy arrays, bit for bit.

    Args:
        folder: Has adapter_config.json and adapter_model.safetensors.
        config: The shape of the base model. The names may be those of any family of Hugging Face
            that has this config, or of `torch_reference`.

    Raises:
        InputError: A file is missing or damaged; a setting is not supported, for example DoRA or
            `modules_to_save` (names it); or the adapter is of another base model.
    """
    folder = Path(folder)
    settings, tensors = _read_settings(folder / SETTINGS), files.read(folder / WEIGHTS)
    matches = {name: FACTOR.fullmatch(name) for name in tensors}
    if strange := [name for name, match in matches.items() if match is None]:
        raise InputError(f"{folder / WEIGHTS}: {strange[0]} is no factor of LoRA; {MERGE}")
    rank, kernels, leaves = settings["r"], parameter_shapes(config), {}
    scale = settings["lora_alpha"] / (rank**0.5 if settings["use_rslora"] else rank)
    modules = dict.fromkeys(match[1] for match in matches.values())
    for module, path in _paths(config, modules, folder).items():
        factors = [tensors.get(name.format(module)) for name in NAMES]
        inputs, outputs = kernels[f"{path}/kernel"]
        wanted, shapes = [(rank, inputs), (outputs, rank)], [np.shape(x) for x in factors]
        if shapes != wanted:
            raise InputError(
                f"{folder}: the factors of {module} are {shapes}, but {wanted} is what r={rank} "
                f"needs in this model; {OTHER_BASE}"
            )
        if not all(x.dtype.name in FLOATS and np.isfinite(x).all() for x in factors):
            raise InputError(f"{folder}: the factors of {module} must hold finite numbers")
        adapter_leaves = *(factor.T for factor in factors), np.asarray(scale, factors[0].dtype)
        leaves |= {f"{path}/{leaf}": x for leaf, x in zip(LORA_LEAVES, adapter_leaves, strict=True)}
    return nest(leaves)


def _read_settings(path: Path) -> dict[str, Any]:
    """Return the settings in `READ`; refuse any other that has an effect."""
    values = {"peft_type": None, "use_rslora": False} | read_json(path)
    for name, value in values.items():
        allowed = NEUTRAL.get(name, [] if value else [value])
        if name not in READ and name not in WITHOUT_EFFECT and value not in allowed:
            raise InputError(f"{path}: {name}={shorten(value)} is not supported; {MERGE}")
    return {n: checked(f"{path}: {n}", values.get(n), declared) for n, declared in READ.items()}


def _modules(layout: Layout, config: TransformerConfig) -> dict[str, str]:
    """Return the path of each product with a kernel by the name of its module in torch."""
    return {
        row.foreign.removesuffix(".weight"): row.paths[0].removesuffix("/kernel")
        for row in expand(layout, config)
        if row.operation == transpose and len(row.paths) == 1 and row.head is None
    }


def _paths(config: TransformerConfig, modules: Iterable[str], folder: Path) -> dict[str, str]:
    """Return the path of each of these modules, in the layout that has the most of their names."""
    best: dict[str, str] = {}
    for family in (None, *FAMILIES.values()):
        full_name = getattr(family, "full_name", str)  # of a module of the base class
        with contextlib.suppress(InputError):  # no model of the family has this config
            known = _modules(family.layout if family else LAYOUT, config)
            named = {name: full_name(f"{name}.weight").removesuffix(".weight") for name in modules}
            found = {name: known[full] for name, full in named.items() if full in known}
            best = max(best, found, key=len)
    if absent := [module for module in modules if module not in best]:
        raise InputError(
            f"{folder}: is not an adapter of this model, which has no product {absent[0]}; "
            f"{OTHER_BASE}"
        )
    return best


def write_adapter(
    folder: str | os.PathLike[str],
    adapter: Params,
    config: TransformerConfig,
    *,
    family: str | None = None,
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
        dropout: The dropout that it was trained with, for who trains on.
        overwrite: Whether the files of an adapter that is there are replaced.

    Raises:
        InputError: The folder exists; the adapter is not of this config or family; or its products
            differ in their ranks or scales.
    """
    folder, leaves = Path(folder), flatten(adapter)
    if os.path.lexists(folder) and not overwrite:
        raise exists_already(folder)
    check_writable(folder, (SETTINGS, WEIGHTS))
    layout = LAYOUT if family is None else get_family(family).layout
    names = {path: module for module, path in _modules(layout, config).items()}
    tensors, targets, kinds = {}, [], set()
    for path in dict.fromkeys(path.rpartition("/")[0] for path in leaves):
        if path not in names:
            raise InputError(f"the adapter of {path} has no name in layout {layout.name!r}")
        *factors, scale = (np.asarray(leaves[f"{path}/{leaf}"]) for leaf in LORA_LEAVES)
        tensors |= {n.format(names[path]): x.T for n, x in zip(NAMES, factors, strict=True)}
        targets.append(names[path])
        kinds.add((rank := factors[0].shape[1], (scale * rank).item()))
    if len(kinds) != 1:
        raise InputError(f"an adapter must have one rank and one alpha, not {sorted(kinds)}")
    ((rank, alpha),) = kinds
    settings = {"peft_type": "LORA", "task_type": None if family is None else "SEQ_2_SEQ_LM"}
    settings |= {"r": rank, "lora_alpha": int(alpha) if alpha == int(alpha) else alpha}
    settings |= {"target_modules": sorted(targets), "lora_dropout": dropout, "bias": "none"}
    with staged(folder) as staging:
        (staging / SETTINGS).write_bytes(json_bytes(settings | {"inference_mode": True}))
        files.write(staging / WEIGHTS, tensors, metadata={"format": "pt"})
