"""Adapters: LoRA as a small tree beside the tree of parameters, and the folders of PEFT."""

from typing import TYPE_CHECKING, Any

from jax_transformer.adapters import lora

if TYPE_CHECKING:  # what __getattr__ gives
    from jax_transformer.adapters.peft_folder import read_adapter as read_adapter
    from jax_transformer.adapters.peft_folder import write_adapter as write_adapter

__all__ = ["lora", "read_adapter", "write_adapter"]


def __getattr__(name: str) -> Any:
    """Import the folders of PEFT, and with them the families, where they are first named."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from jax_transformer.adapters import peft_folder

    return getattr(peft_folder, name)
