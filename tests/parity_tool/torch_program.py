"""A small encoder-decoder in torch, of which the copies in JAX are ports."""

import torch
from torch import nn

from tests.porting.models import Mixer, RotaryMixer, Translator, other

WIDE, WORDS, DEPTH = 36, 31, 2
PAD = 0


def turned(z):
    """Return heads [B, H, L, d] with each pair of neighbours rotated by its position."""
    angle = torch.arange(z.shape[2], dtype=z.dtype)[:, None] * 0.5 ** torch.arange(z.shape[3] // 2)
    z = torch.view_as_complex(z.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(z * torch.polar(torch.ones_like(angle), angle)).flatten(-2)


class Program(Translator):
    """Pre-norm layers and one table for both sides; the activation is no module."""

    wide, vocabularies, pad, depth = WIDE, (WORDS, WORDS), PAD, (DEPTH, DEPTH)
    before, activation = (True, True), staticmethod(lambda: nn.functional.gelu)

    def __init__(self, rotary=False):
        self.mixer = other(RotaryMixer, turn=staticmethod(turned)) if rotary else Mixer
        super().__init__()
        self.words_out = self.words_in
