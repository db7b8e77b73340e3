"""The decoder layer of `decoder_attention="self_over_memory"`, which one preset has.

Its causal self-attention runs over the encoder's output, not over the targets; the result becomes
the values of the second attention. Targets therefore never attend to each other, and sources and
targets have equal lengths. Letters in shapes: B batch, L length, D d_model, H heads.
"""

from jaxtyping import Bool, Float
from torch import Tensor

from torch_reference.layers import NO_CONTEXT, AttentionContext, DecoderLayer


class SelfOverMemoryLayer(DecoderLayer):
    """Self-attention over the memory, attention to the result and a feed-forward network."""

    def forward(
        self,
        x: Float[Tensor, "B L D"],
        memory: Float[Tensor, "B L D"],
        context: AttentionContext = NO_CONTEXT,
        src_mask: Bool[Tensor, "#B #H #L #L"] | None = None,
        cache: None = None,
    ) -> tuple[Float[Tensor, "B L D"], None]:
        """Return the layer's output; arguments as `DecoderLayer`, equal lengths and no cache.

        Of the context only the mask is read: targets do not attend to each other.
        """
        y = self.self_attention_residual.sublayer_input(memory)
        value = self.self_attention_residual(memory, self.self_attention(y, y, y, context.mask))
        y = self.cross_attention_residual.sublayer_input(value)
        x = self.cross_attention_residual(value, self.cross_attention(x, memory, y, src_mask))
        y = self.feed_forward_residual.sublayer_input(x)
        return self.feed_forward_residual(x, self.feed_forward(y)), None
