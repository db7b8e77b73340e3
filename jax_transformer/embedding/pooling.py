"""From the hidden states of a text to one vector: pure functions, and modules.json as their tree.

The modules are those of sentence-transformers 6.2 (Reimers and Gurevych 2019, "Sentence-BERT").
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jaxtyping import Array, Bool, Float

from jax_transformer.errors import InputError, shorten
from jax_transformer.storage import weights
from jax_transformer.storage.reading import parse_json, read_bytes, read_json

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


class _Module(msgspec.Struct):
    type: str
    path: str = ""


class _Pooling(msgspec.Struct):
    pooling_mode: str | tuple[str, ...] | None = None
    include_prompt: bool = True


class _Dense(msgspec.Struct):
    in_features: int
    out_features: int
    bias: bool = True
    activation_function: str = "Tanh"
    module_input_name: str | None = None
    module_output_name: str | None = None
    use_residual: bool = False


class _Said(msgspec.Struct):
    """What three files of a folder say: of prompts, and of the length and case of texts."""

    prompts: dict[str, str] | None = None
    default_prompt_name: str | None = None
    max_seq_length: int | None = None
    model_max_length: float | None = None
    do_lower_case: bool = False


def read_modules(folder: Path) -> tuple[Path, SentenceModules]:
    """Return the folder of the model, and what a folder of sentence-transformers says beside it.

    Without modules.json it is the folder itself, and the mean of the hidden states.

    Raises:
        InputError: The modules are not a Transformer, one Pooling, then layers; or one has a
            setting that is not supported (names it).
    """
    path = folder / "modules.json"
    if not path.exists():
        return folder, SentenceModules()
    content = b'{"modules": %s}' % read_bytes(path, "cannot be read", 2**20)
    listed = _checked(parse_json(content, path)["modules"], list[_Module], path)
    kinds = [module.type.rpartition(".")[2] for module in listed]
    if kinds[:2] != ["Transformer", "Pooling"] or not {*kinds[2:]} <= {"Dense", "Normalize"}:
        raise InputError(
            f"{path}: has the modules {shorten(kinds)}; only Transformer and Pooling are "
            "supported, and Dense and Normalize behind them"
        )
    places = [Path(module.path) for module in listed]
    if outside := [place for place in places if place.is_absolute() or ".." in place.parts]:
        raise InputError(f"{path}: the path {shorten(str(outside[0]))} is outside of the folder")
    model, pooling, *behind = (folder / place for place in places)
    values = read_json(pooling / "config.json")
    pooled = _checked(values, _Pooling, pooling)
    modes = pooled.pooling_mode or tuple(m for m, key in MODES.items() if values.get(key)) or "mean"
    modes = (modes,) if isinstance(modes, str) else modes
    if strange := [mode for mode in modes if mode not in MODES]:
        raise InputError(
            f"{pooling}: pooling_mode={shorten(strange[0])} is none of {', '.join(MODES)}"
        )
    files = (
        model / "tokenizer_config.json",
        model / "sentence_bert_config.json",
        folder / "config_sentence_transformers.json",
    )
    told: dict[str, Any] = {}
    for file in files:
        told |= read_json(file) if file.exists() else {}
    said = _checked(told, _Said, folder)
    longest = said.max_seq_length or said.model_max_length
    return model, SentenceModules(
        modes=modes,
        layers=tuple(
            _dense(place) if kind == "Dense" else NORMALIZE
            for kind, place in zip(kinds[2:], behind, strict=True)
        ),
        with_prompt=pooled.include_prompt,
        prompts=said.prompts or {},
        default_prompt=said.default_prompt_name,
        max_length=int(longest) if longest and longest < 2**24 else None,
        lower_case=said.do_lower_case,
    )


def _checked(values: Any, kind: Any, path: Path) -> Any:
    """Return values as a type; refuse others, by the name of the file or folder."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise InputError(f"{path}: is damaged ({error}); copy the folder again") from error


def _dense(folder: Path) -> Dense:
    said = _checked(read_json(folder / "config.json"), _Dense, folder)
    activation = said.activation_function.rpartition(".")[2]
    read_and_written = {said.module_input_name, said.module_output_name}
    if activation not in ACTIVATIONS or not read_and_written <= {None, "sentence_embedding"}:
        raise InputError(
            f"{folder}: activation_function={shorten(activation)} of {said.module_input_name} is "
            f"not supported; of sentence_embedding it may be {', '.join(ACTIVATIONS)}"
        )
    name = next((n for n in WEIGHT_FILES if (folder / n).exists()), WEIGHT_FILES[0])
    tensors = weights.read(folder / name)
    shapes = {"linear.weight": (said.out_features, said.in_features)}
    shapes |= {"linear.bias": (said.out_features,)} if said.bias else {}
    if {name: tensor.shape for name, tensor in tensors.items()} != shapes:
        raise InputError(f"{folder / name}: the tensors are not {shapes}; copy the folder again")
    params = {"kernel": np.asarray(tensors["linear.weight"], np.float32).T}
    if said.bias:
        params["bias"] = np.asarray(tensors["linear.bias"], np.float32)
    return Dense(params, activation, said.use_residual)
