"""The whole model in torch, named as in `jax_transformer.model.transformer`.

Letters in shapes: B batch, S source length, T target length, D d_model, M that of the
encoder, V target vocabulary.
"""

from collections.abc import Iterator
from typing import Literal

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from jax_transformer.config import Stack, TransformerConfig
from torch_reference import functional, masks
from torch_reference.layers import (
    DecoderLayer,
    Embedding,
    EncoderLayer,
    Norm,
    OutputProjection,
    PositionEmbedding,
    RelativeAttentionBias,
)
from torch_reference.merged_attention import MergedAttentionLayer
from torch_reference.self_over_memory import SelfOverMemoryLayer

Source = Int[Tensor, "B S"] | Float[Tensor, "B S D"]
Target = Int[Tensor, "B T"] | Float[Tensor, "B T D"]
SourceMask = Bool[Tensor, "#B #H _ #S"]
TargetMask = Bool[Tensor, "#B #H #T #T"]
DECODER_LAYERS: dict[str, type[DecoderLayer]] = {
    "self_then_cross": DecoderLayer,
    "self_over_memory": SelfOverMemoryLayer,
    "merged": MergedAttentionLayer,
}


def of_layers(
    config: TransformerConfig, stack: Stack, mask: Bool[Tensor, "#B #H #L #L"] | None, length: int
) -> Iterator[tuple[Bool[Tensor, "#B #H #L #L"] | None, Float[Tensor, "L C"] | None]]:
    """Yield the mask and the angles of each layer's self-attention.

    Args:
        mask: What all layers of the stack have in common.
        length: Number of positions.
    """
    for layer in range(getattr(config, f"num_{stack}_layers")):
        own, angles, window = mask, None, config.window_of(stack, layer)
        if window is not None:
            own = masks.band_mask(length, *window)
            own = own if mask is None else mask & own.to(mask.device)
        if config.positions == "rotary":
            theta, scaling = config.rotary_theta, config.rotary_scaling
            if window is not None and config.sliding_window_theta is not None:
                theta, scaling = config.sliding_window_theta, 1.0
            columns = config.rotated_columns
            angles = functional.rotary_angles(length, columns, theta, scaling)
        yield own, angles


class Encoder(nn.Module):
    """The stack of encoder layers, with a final norm where the config has one."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_encoder_layers))
        if config.has_shared_relative_bias:
            self.relative_attention_bias = RelativeAttentionBias(config, bidirectional=True)
        self.norm = Norm(config) if config.final_norm else nn.Identity()
        self.dropout = nn.Dropout(config.dropout if config.final_dropout else 0.0)

    def forward(
        self, x: Float[Tensor, "B S D"], src_mask: Bool[Tensor, "#B #H #S #S"] | None = None
    ) -> Float[Tensor, "B S D"]:
        """Return the memory of embedded sources."""
        x, position_bias = functional.clear_unattended(x, src_mask), None
        if self.config.has_shared_relative_bias:
            position_bias = self.relative_attention_bias(x.shape[1], x.shape[1])
        own = of_layers(self.config, "encoder", src_mask, x.shape[1])
        for layer, (mask, angles) in zip(self.layers, own, strict=True):
            x = layer(x, mask, position_bias, angles)
        return self.dropout(self.norm(x))


class Decoder(nn.Module):
    """The stack of decoder layers, with a final norm where the config has one."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        layer = DECODER_LAYERS[config.decoder_attention]
        self.layers = nn.ModuleList(layer(config) for _ in range(config.num_decoder_layers))
        if config.has_shared_relative_bias:
            self.relative_attention_bias = RelativeAttentionBias(config, bidirectional=False)
        self.norm = Norm(config) if config.decoder_has_final_norm else nn.Identity()
        self.dropout = nn.Dropout(config.dropout if config.final_dropout else 0.0)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        memory: Float[Tensor, "B S M"],
        tgt_mask: Bool[Tensor, "#B #H #T #T"] | None = None,
        src_mask: Bool[Tensor, "#B #H #T #S"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """Return the hidden states of embedded targets."""
        x, position_bias = functional.clear_unattended(x, tgt_mask), None
        memory = functional.clear_unattended(memory, src_mask)
        if self.config.has_shared_relative_bias:
            position_bias = self.relative_attention_bias(x.shape[1], x.shape[1])
        own = of_layers(self.config, "decoder", tgt_mask, x.shape[1])
        for layer, (mask, angles) in zip(self.layers, own, strict=True):
            x = layer(x, memory, mask, src_mask, position_bias, angles)
        return self.dropout(self.norm(x))


class Transformer(nn.Module):
    """Embeddings, encoder, decoder and output projection (figure 1).

    Dropout follows `train()` and `eval()`. Parameters are drawn as torch draws them; weights of
    the JAX model come through `jax_transformer.convert.to_torch`.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config, of_encoder = config, config.stack("encoder")
        if config.token_embeddings == "shared":
            self.token_embedding = Embedding(config, config.src_vocab_size)
        elif config.token_embeddings == "separate":
            self.source_embedding = Embedding(of_encoder, config.src_vocab_size)
        if config.positions == "learned":
            self.source_positions = PositionEmbedding(of_encoder)
        if config.embedding_norm:
            self.source_embedding_norm = Norm(of_encoder)
        source_rate = config.dropout if config.embedding_dropout == "both" else 0.0
        self.source_dropout = nn.Dropout(source_rate)
        self.encoder = Encoder(of_encoder)
        if config.num_decoder_layers:
            self._add_target_side()

    def _add_target_side(self) -> None:
        """Declare what an encoder alone has not."""
        config = self.config
        if config.token_embeddings == "separate":
            self.target_embedding = Embedding(config, config.tgt_vocab_size)
        if config.positions == "learned":
            self.target_positions = PositionEmbedding(config)
        if config.embedding_norm:
            self.target_embedding_norm = Norm(config)
        target_rate = config.dropout if config.embedding_dropout != "none" else 0.0
        self.target_dropout = nn.Dropout(target_rate)
        self.decoder = Decoder(config)
        if config.output_projection != "none":
            self.output_projection = OutputProjection(config)

    def encode(self, src: Source, src_mask: SourceMask | None = None) -> Float[Tensor, "B S D"]:
        """Return the memory of the sources [B, S, D]; arguments as `jax_transformer.encode`."""
        if src_mask is None:
            src_mask = masks.source_mask(src, self.config)
        x = self.add_positions(self.embed(src, "source"), "source")
        x = self._norm_embeddings(x, "source", src_mask)
        return self.encoder(self.source_dropout(x), src_mask)

    def decode(
        self,
        tgt: Target,
        memory: Float[Tensor, "B S M"],
        tgt_mask: TargetMask | None = None,
        src_mask: SourceMask | None = None,
    ) -> Float[Tensor, "B T V"]:
        """Return the logits of each target position's successor [B, T, V].

        Arguments and result as `jax_transformer.decode`.
        """
        if tgt_mask is None:
            tgt_mask = masks.target_mask(tgt, self.config)
        x = self.add_positions(self.embed(tgt, "target"), "target")
        x = self._norm_embeddings(x, "target", tgt_mask)
        return self.project(self.decoder(self.target_dropout(x), memory, tgt_mask, src_mask))

    def forward(
        self,
        src: Source,
        tgt: Target,
        src_mask: SourceMask | None = None,
        tgt_mask: TargetMask | None = None,
    ) -> Float[Tensor, "B T V"]:
        """Return the logits [B, T, V]; masks as in `encode` and `decode`, one for the source."""
        if src_mask is None:
            src_mask = masks.source_mask(src, self.config)
        return self.decode(tgt, self.encode(src, src_mask), tgt_mask, src_mask)

    def embed(self, tokens: Source, side: Literal["source", "target"]) -> Float[Tensor, "B S D"]:
        """Return the tokens' vectors [B, S, D], without positions."""
        table = self._table(side)
        return tokens if table is None else table(tokens)

    def project(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T V"]:
        """Return the logits of hidden states, or these where there is no output projection."""
        if self.config.output_projection == "none":
            return x
        if self.config.output_scale == "inverse_sqrt_d_model":
            x = x * self.config.d_model**-0.5
        table = self._table("target")
        logits = self.output_projection(x, table.weight if table else None)
        return functional.soft_cap(logits, self.config.logit_softcap)

    def add_positions(
        self, x: Float[Tensor, "B L D"], side: Literal["source", "target"]
    ) -> Float[Tensor, "B L D"]:
        """Return vectors plus the first L rows of the position table, a side's own if learned."""
        config = self.config
        if not config.has_position_table:
            return x
        if config.positions == "learned":
            learned = self.source_positions if side == "source" else self.target_positions
            return x + learned(x.shape[1])
        sizes = x.shape[1], x.shape[2]
        kind = config.positions, config.position_offset, config.position_rounding
        table = functional.sinusoidal_positions(*sizes, *kind)
        return x + table.to(x)

    def _norm_embeddings(
        self,
        x: Float[Tensor, "B L D"],
        side: Literal["source", "target"],
        mask: Bool[Tensor, "#B #H _ #L"] | None,
    ) -> Float[Tensor, "B L D"]:
        """Return what enters a stack: `x`, normed where the config says so."""
        if not self.config.embedding_norm:
            return x
        norm = self.source_embedding_norm if side == "source" else self.target_embedding_norm
        return norm(functional.clear_unattended(x, mask))

    def _table(self, side: Literal["source", "target"]) -> Embedding | None:
        if self.config.token_embeddings == "none":
            return None
        if self.config.token_embeddings == "shared":
            return self.token_embedding
        return self.source_embedding if side == "source" else self.target_embedding
