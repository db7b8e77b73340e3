"""The same Transformer in plain torch.nn: the reference that the JAX model is proven against."""

try:
    from torch_reference.decoding import Hypotheses, generate
    from torch_reference.model import Decoder, Encoder, Transformer
    from torch_reference.model_folder import load
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        'torch_reference needs torch, which is not installed: pip install "jax-transformer[torch]"',
        name="torch",
    ) from None

__all__ = ["Decoder", "Encoder", "Hypotheses", "Transformer", "generate", "load"]
