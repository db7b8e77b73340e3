"""A pure-functional Flax encoder-decoder Transformer whose weights travel to torch and back.

Every public name is imported at its first use: `import torch_reference`, which shares only the
configuration, needs neither jax nor flax.
"""

import importlib
from typing import Any

_MODULE_OF = {
    "Cache": "decoding",
    "Hypotheses": "decoding",
    "InputError": "errors",
    "Transformer": "model.transformer",
    "TransformerConfig": "config",
    "apply": "model.transformer",
    "cross_attention_weights": "decoding",
    "decode": "model.transformer",
    "decode_step": "decoding",
    "encode": "model.transformer",
    "generate": "decoding",
    "init_cache": "decoding",
    "init_params": "model.transformer",
    "load": "translation.model_folder",
    "score": "decoding",
    "select_hypotheses": "decoding",
}
__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
