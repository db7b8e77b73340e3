"""Adapters: LoRA as a small tree beside the tree of parameters, and the folders of PEFT."""

from jax_transformer.adapters import lora
from jax_transformer.adapters.peft_folder import read_adapter, write_adapter

__all__ = ["lora", "read_adapter", "write_adapter"]
