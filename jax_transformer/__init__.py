"""A pure-functional Flax encoder-decoder Transformer whose weights travel to torch and back.

Every public name is imported at its first use: `import torch_reference`, which shares only the
configuration, needs neither jax nor flax.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_transformer.config import TransformerConfig
    from jax_transformer.decoding import (
        Cache,
        Hypotheses,
        cross_attention_weights,
        decode_step,
        generate,
        init_cache,
        score,
        select_hypotheses,
    )
    from jax_transformer.errors import InputError
    from jax_transformer.model.transformer import Transformer, apply, decode, encode, init_params
    from jax_transformer.translation.model_folder import load

__all__ = [
    "Cache",
    "Hypotheses",
    "InputError",
    "Transformer",
    "TransformerConfig",
    "apply",
    "cross_attention_weights",
    "decode",
    "decode_step",
    "encode",
    "generate",
    "init_cache",
    "init_params",
    "load",
    "score",
    "select_hypotheses",
]

_MODULES = {
    "config": ("TransformerConfig",),
    "decoding": (
        "Cache",
        "Hypotheses",
        "cross_attention_weights",
        "decode_step",
        "generate",
        "init_cache",
        "score",
        "select_hypotheses",
    ),
    "errors": ("InputError",),
    "model.transformer": ("Transformer", "apply", "decode", "encode", "init_params"),
    "translation.model_folder": ("load",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
