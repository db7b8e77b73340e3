"""The same Transformer in plain torch.nn: the reference that the JAX model is proven against."""

from torch_reference.decoding import Hypotheses, generate
from torch_reference.model import Decoder, Encoder, Transformer

__all__ = ["Decoder", "Encoder", "Hypotheses", "Transformer", "generate"]
