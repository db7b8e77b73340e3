"""The layouts of four published implementations, by the names of their code."""

from __future__ import annotations

from jax_transformer.convert.layouts.torch_nn import layer_rows, linear, norm
from jax_transformer.convert.position_table import PositionTable
from jax_transformer.convert.table import Buffer, Layout, Row

ATTENTIONS = {
    "encoder": ("self_attention",),
    "decoder": ("self_attention", "cross_attention"),
}


def shared_heads() -> Layout:
    """Return the layout of the post-norm blog model whose heads share their projections."""
    names = ("query_matrix", "key_matrix", "value_matrix", "out")
    layers = "encoder.layers.{i}", "encoder/layers_{i}"
    own_attention = {"self_attention": ("attention", "norm1")}
    feed_forward = ("feed_forward.0", "feed_forward.2", "norm2")
    decoder_attentions = {
        "self_attention": ("attention", "norm"),
        "cross_attention": ("transformer_block.attention", "transformer_block.norm1"),
    }
    inside_block = tuple(f"transformer_block.{name}" for name in feed_forward)
    rows = (
        Row("encoder.embedding_layer.embed.weight", "source_embedding/embedding"),
        *layer_rows(*layers, own_attention, names, feed_forward),
        Row("decoder.word_embedding.weight", "target_embedding/embedding"),
        *layer_rows(
            "decoder.layers.{i}", "decoder/layers_{i}", decoder_attentions, names, inside_block
        ),
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
    names, scale_bias = ("W_q", "W_k", "W_v", "W_o"), ("gamma", "beta")
    own = {"self_attention": ("self_attention", "norm1")}
    both = {**own, "cross_attention": ("encoder_attention", "norm2")}
    rows = (
        Row(f"src_embedding.{table_name}.weight", "source_embedding/embedding"),
        Row(f"tgt_embedding.{table_name}.weight", "target_embedding/embedding"),
        *(
            row
            for stack, attentions, last in (("encoder", own, "norm2"), ("decoder", both, "norm4"))
            for row in layer_rows(
                f"{stack}.layers.{{i}}",
                f"{stack}/layers_{{i}}",
                attentions,
                names,
                ("feedforward.W_1", "feedforward.W_2", last),
                scale_bias,
            )
        ),
        *norm("decoder.layers.{i}.norm3", "decoder/layers_{i}/memory_norm", *scale_bias),
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
    """Return the rows of two stacks whose residual connections hold the norms."""
    rows = []
    for stack, blocks in ATTENTIONS.items():
        norms = [f"residual_connections.{index}.norm" for index in range(len(blocks) + 1)]
        rows += layer_rows(
            f"{stack}.layers.{{i}}",
            f"{stack}/layers_{{i}}",
            {block: (f"{block}_block", name) for block, name in zip(blocks, norms, strict=False)},
            projections,
            (*(f"feed_forward_block.{name}" for name in feed_forward), norms[-1]),
            norm_names,
        )
        rows += norm(f"{stack}.norm", f"{stack}/norm", *norm_names)
    return rows
