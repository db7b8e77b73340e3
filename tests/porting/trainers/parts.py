"""Parts of the programs' models: position tables, modules of named parts, attention, residuals."""

import torch
from torch import nn

from tests.convert.foreign import attend, merge, split
from tests.porting.foreign_models import masks


def interleaved(length, width):
    rate = 10000.0 ** -(torch.arange(0, width, 2).double() / width)
    angle = torch.arange(length).double()[:, None] * rate
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)


def halves(length, width):
    rate = 10000.0 ** -(torch.arange(width // 2).double() / (width // 2 - 1))
    angle = torch.arange(length).double()[:, None] * rate
    return torch.cat([angle.sin(), angle.cos()], 1)


class Part(nn.Module):
    """A module of named parts."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, torch.Tensor):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)


class Attention(Part):
    """Attention whose projections have the given names: of query, key, value and output."""

    def __init__(self, width, heads, names, bias=True):
        super().__init__()
        self.heads, self.names = heads, names
        for name in names:
            setattr(self, name, nn.Linear(width, width, bias))

    def projections(self):
        return [getattr(self, name) for name in self.names]

    def forward(self, x, memory, mask):
        query, key, value, output = self.projections()
        heads = (split(part, self.heads) for part in (query(x), key(memory), value(memory)))
        return output(merge(attend(*heads, mask)))


class Numbered(Attention):
    """Attention whose projections are a list."""

    def __init__(self, width, heads):
        super().__init__(width, heads, ())
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def projections(self):
        return self.linears


class Model(nn.Module):
    """What the four have in common: residual connections before or after a norm.

    Subclasses have `embed(stack, ids)`, `head(x)` and `sublayers(layer)`: self-attention, attention
    to the memory and the feed-forward network, each after its norm.
    """

    pad, pre = 1, True

    def layers(self, stack):
        return getattr(self, stack).layers

    def final(self, stack):
        return getattr(getattr(self, stack), "layer_norm", None)

    def run(self, stack, ids, mask, memory=None, memory_mask=None):
        x = self.embed(stack, ids)
        for layer in self.layers(stack):
            (norm, attend), *cross, (last_norm, feed_forward) = self.sublayers(layer)
            steps = [(norm, lambda y, f=attend: f(y, y, mask))]
            steps += [(norm, lambda y, f=f: f(y, memory, memory_mask)) for norm, f in cross]
            for norm, function in (*steps, (last_norm, feed_forward)):
                x = x + function(norm(x)) if self.pre else norm(x + function(x))
        return x if self.final(stack) is None else self.final(stack)(x)

    def forward(self, src, tgt):
        src_mask, tgt_mask = masks(src, tgt, self.pad)
        memory = self.run("encoder", src, src_mask)
        return self.head(self.run("decoder", tgt, tgt_mask, memory, src_mask))
