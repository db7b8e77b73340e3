"""From the hidden states of a text to one vector: pure functions, and modules.json as their tree.

The modules are those of sentence-transformers 6.2 (Reimers and Gurevych 2019, "Sentence-BERT").
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jax_transformer.errors import InputError, shorten
from jax_transformer.storage import weights
from jax_transformer.storage.reading import parse_json, read_bytes, read_json

MODULES = "modules.json"
# Each with the key that switches it on in older files.
MODES = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "Identity": lambda x: x,
    "Tanh": jnp.tanh,
    "ReLU": jax.nn.relu,
    "GELU": lambda x: jax.nn.gelu(x, approximate=False),
    "SiLU": jax.nn.silu,
    "Sigmoid": jax.nn.sigmoid,
}
NORMALIZE = "normalize"  # stands for a layer
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")


class Dense(NamedTuple):
    """A layer behind the pooling: x W + b, its activation, and x again where it is residual."""

    params: dict[str, Float[Array | np.ndarray, "..."]]  # kernel [inputs, outputs]; bias [outputs]
    activation: str  # a key of `ACTIVATIONS`
    is_residual: bool = False


class SentenceModules(NamedTuple):
    """What a folder of sentence-transformers says beside its model.

    Attributes:
        modes: Names in `MODES`, whose vectors stand one behind the other.
        layers: What follows, in order.
        with_prompt: Whether the tokens of a prompt are pooled, too.
        prompts: Texts that may be put before a text, by name.
        default_prompt: The name of the usual one.
        max_length: Most tokens of a text, if the folder says it.
        lower_case: Whether texts are lower-cased.
    """

    modes: tuple[str, ...] = ("mean",)
    layers: tuple[Dense | str, ...] = ()
    with_prompt: bool = True
    prompts: Mapping[str, str] = {}
    default_prompt: str | None = None
    max_length: int | None = None
    lower_case: bool = False


def pool(
    hidden: Float[Array, "B S D"], mask: Bool[Array, "B S"], modes: tuple[str, ...]
) -> Float[Array, "B E"]:
    """Return the pooled hidden states of each text, E being D for each mode.

    Args:
        hidden: States after the encoder.
        mask: Which positions count: at least one of each text.
        modes: Names in `MODES`.
    """
    hidden, counted = hidden.astype(jnp.promote_types(hidden.dtype, jnp.float32)), mask[..., None]
    total = jnp.sum(jnp.where(counted, hidden, 0), axis=1)
    number = jnp.maximum(jnp.sum(mask, axis=1, keepdims=True), 1)
    positions = jnp.arange(1, mask.shape[1] + 1)
    weights = jnp.where(mask, positions, 0)[..., None]
    first, last = jnp.argmax(mask, axis=1), jnp.argmax(weights[..., 0], axis=1)
    vectors = {
        "cls": lambda: jnp.take_along_axis(hidden, first[:, None, None], axis=1)[:, 0],
        "max": lambda: jnp.max(jnp.where(counted, hidden, -jnp.inf), axis=1),
        "mean": lambda: total / number,
        "mean_sqrt_len_tokens": lambda: total / jnp.sqrt(number),
        "weightedmean": lambda: jnp.sum(hidden * weights, axis=1) / jnp.sum(weights, axis=1),
        "lasttoken": lambda: jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0],
    }
    return jnp.concatenate([vectors[mode]() for mode in modes], axis=-1)


def apply_layers(
    x: Float[Array, "B E"], layers: tuple[Dense | str, ...]
) -> Float[Array, "B outputs"]:
    """Return what the layers behind the pooling make of its vectors."""
    for layer in layers:
        if isinstance(layer, str):
            x = x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
            continue
        kernel, bias = layer.params["kernel"], layer.params.get("bias", 0)
        y = ACTIVATIONS[layer.activation](x @ kernel + bias)
        x = y + x if layer.is_residual else y
    return x


def read_modules(folder: Path) -> tuple[Path, SentenceModules]:
    """Return the folder of the model, and what a folder of sentence-transformers says beside it.

    Without modules.json it is the folder itself, and the mean of the hidden states.

    Raises:
        InputError: The modules are not a Transformer, one Pooling, then layers; or one has a
            setting that is not supported (names it).
    """
    if not (folder / MODULES).exists():
        return folder, SentenceModules()
    path, fault = folder / MODULES, "cannot be read"
    listed = parse_json(b'{"modules": %s}' % read_bytes(path, fault, 2**20), path)["modules"]
    kinds = [str(module["type"]).rpartition(".")[2] for module in listed]
    if kinds[:2] != ["Transformer", "Pooling"] or not {*kinds[2:]} <= {"Dense", "Normalize"}:
        raise InputError(
            f"{path}: has the modules {', '.join(kinds)}; only Transformer and Pooling are "
            "supported, and Dense and Normalize behind them"
        )
    model, pooling, *behind = (folder / module["path"] for module in listed)
    values = read_json(pooling / "config.json")
    old = [mode for mode, key in MODES.items() if values.get(key)]
    modes = values.get("pooling_mode", old or "mean")
    modes = (modes,) if isinstance(modes, str) else (*modes,)
    if strange := [mode for mode in modes if mode not in MODES]:
        raise InputError(f"{pooling}: pooling_mode={strange[0]!r} is none of {', '.join(MODES)}")
    layers = [
        _dense(path) if kind == "Dense" else NORMALIZE
        for kind, path in zip(kinds[2:], behind, strict=True)
    ]
    said = [
        read_json(path) if path.exists() else {}
        for path in (
            folder / "config_sentence_transformers.json",
            model / "sentence_bert_config.json",
            model / "tokenizer_config.json",
        )
    ]
    longest = said[1].get("max_seq_length") or said[2].get("model_max_length")
    return model, SentenceModules(
        modes=modes,
        layers=(*layers,),
        with_prompt=values.get("include_prompt", True),
        prompts=said[0].get("prompts") or {},
        default_prompt=said[0].get("default_prompt_name"),
        max_length=longest if isinstance(longest, int) and longest < 2**24 else None,
        lower_case=bool(said[1].get("do_lower_case")),
    )


def _dense(folder: Path) -> Dense:
    values = read_json(folder / "config.json")
    activation = str(values.get("activation_function", "Tanh")).rpartition(".")[2]
    names = [values.get(f"module_{end}_name") for end in ("input", "output")]
    if activation not in ACTIVATIONS or {*names} - {None, "sentence_embedding"}:
        raise InputError(
            f"{folder}: activation_function={shorten(activation)} of {names[0]} is not supported; "
            f"activations of sentence_embedding are {', '.join(ACTIVATIONS)}"
        )
    name = next((n for n in WEIGHT_FILES if (folder / n).exists()), WEIGHT_FILES[0])
    tensors = weights.read(folder / name)
    inputs, outputs = values.get("in_features"), values.get("out_features")
    shapes = {"linear.weight": (outputs, inputs)}
    shapes |= {"linear.bias": (outputs,)} if values.get("bias", True) else {}
    if {n: x.shape for n, x in tensors.items()} != shapes:
        raise InputError(f"{folder / name}: the tensors are not {shapes}; copy the folder again")
    params = {"kernel": np.asarray(tensors["linear.weight"], np.float32).T}
    if "linear.bias" in tensors:
        params["bias"] = np.asarray(tensors["linear.bias"], np.float32)
    return Dense(params, activation, bool(values.get("use_residual")))
