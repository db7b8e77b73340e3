"""The layouts of four published implementations, by the names of their code."""

from __future__ import annotations

from jax_transformer.convert.layouts.torch_nn import (
    layer_rows,
    linear,
    norm,
    residual_layer_rows,
)
from jax_transformer.convert.position_table import PositionTable
from jax_transformer.convert.table import Buffer, Layout, Row


def shared_heads() -> Layout:
    """Return the layout of the post-norm blog model whose heads share their projections."""
    names = ("query_matrix", "key_matrix", "value_matrix", "out")
    feed_forward = ("feed_forward.0", "feed_forward.2", "norm2")
    inside_block = tuple(f"transformer_block.{name}" for name in feed_forward)
    encoder_attentions = {"self_attention": ("attention", "norm1")}
    decoder_attentions = {
        "self_attention": ("attention", "norm"),
        "cross_attention": ("transformer_block.attention", "transformer_block.norm1"),
    }
    rows = (
        Row("encoder.embedding_layer.embed.weight", "source_embedding/embedding"),
        *layer_rows("encoder.layers", "encoder", encoder_attentions, names, feed_forward),
        Row("decoder.word_embedding.weight", "target_embedding/embedding"),
        *layer_rows("decoder.layers", "decoder", decoder_attentions, names, inside_block),
        *linear("decoder.fc_out", "output_projection"),
    )
    buffers = (
        Buffer("encoder.positional_encoder.pe", PositionTable()),
        Buffer("decoder.position_embedding.pe", PositionTable()),
    )
    return Layout("shared_heads", rows, buffers)


def pre_norm(
    source_length: int | None = None,
    target_length: int | None = None,
    norm_names: tuple[str, str] = ("alpha", "bias"),
) -> Layout:
    """Return the layout of what `build_transformer` builds.

    The printed code lacks its blocks and its norm; their names here come from the implementation
    that it names as its source.
    """
    rows = (
        Row("source_embeddings.embedding.weight", "source_embedding/embedding"),
        Row("target_embeddings.embedding.weight", "target_embedding/embedding"),
        *_residual_stacks(
            ("w_q", "w_k", "w_v", "w_o"), ("linear_layer_1", "linear_layer_2"), norm_names
        ),
        *linear("projection_layer.projection", "output_projection"),
    )
    buffers = (
        # The code spells the name in this way.
        Buffer("source_pos.postitons", PositionTable(length=source_length)),
        Buffer("target_pos.postitons", PositionTable(length=target_length)),
    )
    return Layout("pre_norm", rows, buffers)


def pre_norm_memory_norm(table_name: str = "embedding") -> Layout:
    """Return the layout of the pre-norm model whose decoder layers normalise the memory."""
    names, leaves = ("W_q", "W_k", "W_v", "W_o"), ("gamma", "beta")
    own = {"self_attention": ("self_attention", "norm1")}
    both = own | {"cross_attention": ("encoder_attention", "norm2")}
    inner, outer = "feedforward.W_1", "feedforward.W_2"
    rows = (
        Row(f"src_embedding.{table_name}.weight", "source_embedding/embedding"),
        Row(f"tgt_embedding.{table_name}.weight", "target_embedding/embedding"),
        *layer_rows("encoder.layers", "encoder", own, names, (inner, outer, "norm2"), leaves),
        *layer_rows("decoder.layers", "decoder", both, names, (inner, outer, "norm4"), leaves),
        *norm("decoder.layers.{i}.norm3", "decoder/layers_{i}/memory_norm", *leaves),
        *linear("output_layer", "output_projection"),
    )
    buffers = (Buffer("positional_encoder", PositionTable(("length", "d_model"))),)
    return Layout("pre_norm_memory_norm", rows, buffers)


def pre_norm_log_softmax(
    source_length: int | None = None, target_length: int | None = None
) -> Layout:
    """Return the layout of the pre-norm model of encoder and decoder stacks."""
    rows = (
        Row("src_embed.embedding.weight", "source_embedding/embedding"),
        Row("tgt_embed.embedding.weight", "target_embedding/embedding"),
        *_residual_stacks(("W_q", "W_k", "W_v", "W_o"), ("linear1", "linear2"), ("gamma", "beta")),
        *linear("projection_layer.proj", "output_projection"),
    )
    buffers = (
        Buffer("src_pos.pe", PositionTable(length=source_length)),
        Buffer("tgt_pos.pe", PositionTable(length=target_length)),
    )
    return Layout("pre_norm_log_softmax", rows, buffers)


def _residual_stacks(
    projections: tuple[str, str, str, str],
    feed_forward: tuple[str, str],
    norm_names: tuple[str, str],
) -> list[Row]:
    self_attention = ("self_attention", "self_attention_block")
    cross_attention = ("cross_attention", "cross_attention_block")
    products = tuple(f"feed_forward_block.{name}" for name in feed_forward)
    norms = "residual_connections.{}.norm"
    others = (norms, projections, products, norm_names)
    return [
        *residual_layer_rows("encoder", [self_attention], *others),
        *residual_layer_rows("decoder", [self_attention, cross_attention], *others),
    ]
