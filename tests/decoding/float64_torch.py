"""The search of transformers in float64, so that no near-tie decides."""

import torch


class Float64Torch:
    """The module torch with another float32: transformers rounds logits to it."""

    float32 = float = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)
