"""A pure-functional Flax encoder-decoder Transformer whose weights travel to torch and back.

Every public name is imported at its first use: `import torch_reference`, which shares only the
configuration, needs neither jax nor flax.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers, which do not run `__getattr__`
    from jax_transformer.config import TransformerConfig as TransformerConfig
    from jax_transformer.decoding import Cache as Cache
    from jax_transformer.decoding import Hypotheses as Hypotheses
    from jax_transformer.decoding import cross_attention_weights as cross_attention_weights
    from jax_transformer.decoding import decode_step as decode_step
    from jax_transformer.decoding import generate as generate
    from jax_transformer.decoding import init_cache as init_cache
    from jax_transformer.decoding import score as score
    from jax_transformer.decoding import select_hypotheses as select_hypotheses
    from jax_transformer.errors import InputError as InputError
    from jax_transformer.model.transformer import Transformer as Transformer
    from jax_transformer.model.transformer import apply as apply
    from jax_transformer.model.transformer import decode as decode
    from jax_transformer.model.transformer import encode as encode
    from jax_transformer.model.transformer import init_params as init_params
    from jax_transformer.translation.model_folder import load as load

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
