"""The layouts of four published implementations, by the names of their code."""

from __future__ import annotations

from jax_transformer.convert.layouts.torch_nn import linear, norm
from jax_transformer.convert.position_table import PositionTable
from jax_transformer.convert.table import Buffer, Layout, Row

PROJECTIONS = ("query", "key", "value", "output")


def shared_heads() -> Layout:
    """Return the layout of the post-norm blog model whose heads share their projections."""
    encoder, own_encoder = "encoder.layers.{i}", "encoder/layers_{i}"
    decoder, own_decoder = "decoder.layers.{i}", "decoder/layers_{i}"
    block = f"{decoder}.transformer_block"
    names = ("query_matrix", "key_matrix", "value_matrix", "out")
    rows = (
        Row("encoder.embedding_layer.embed.weight", "source_embedding/embedding"),
        *_attention(f"{encoder}.attention", f"{own_encoder}/self_attention", names),
        *norm(f"{encoder}.norm1", f"{own_encoder}/self_attention_residual/norm"),
        *linear(f"{encoder}.feed_forward.0", f"{own_encoder}/feed_forward/inner"),
        *linear(f"{encoder}.feed_forward.2", f"{own_encoder}/feed_forward/outer"),
        *norm(f"{encoder}.norm2", f"{own_encoder}/feed_forward_residual/norm"),
        Row("decoder.word_embedding.weight", "target_embedding/embedding"),
        *_attention(f"{decoder}.attention", f"{own_decoder}/self_attention", names),
        *norm(f"{decoder}.norm", f"{own_decoder}/self_attention_residual/norm"),
        *_attention(f"{block}.attention", f"{own_decoder}/cross_attention", names),
        *norm(f"{block}.norm1", f"{own_decoder}/cross_attention_residual/norm"),
        *linear(f"{block}.feed_forward.0", f"{own_decoder}/feed_forward/inner"),
        *linear(f"{block}.feed_forward.2", f"{own_decoder}/feed_forward/outer"),
        *norm(f"{block}.norm2", f"{own_decoder}/feed_forward_residual/norm"),
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

    Args:
        source_length: Rows of the source's position table; None for `config.max_length`.
        target_length: Rows of the target's.
        norm_names: The norm's names of its scale and its bias.
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
    """Return the layout of the pre-norm model whose decoder layers normalise the memory.

    Args:
        table_name: The name of the torch.nn.Embedding in its embedding module, which is not
            printed.
    """
    names, scale_bias = ("W_q", "W_k", "W_v", "W_o"), ("gamma", "beta")
    encoder, own_encoder = "encoder.layers.{i}", "encoder/layers_{i}"
    decoder, own_decoder = "decoder.layers.{i}", "decoder/layers_{i}"
    rows = (
        Row(f"src_embedding.{table_name}.weight", "source_embedding/embedding"),
        Row(f"tgt_embedding.{table_name}.weight", "target_embedding/embedding"),
        *_attention(f"{encoder}.self_attention", f"{own_encoder}/self_attention", names),
        *norm(f"{encoder}.norm1", f"{own_encoder}/self_attention_residual/norm", *scale_bias),
        *linear(f"{encoder}.feedforward.W_1", f"{own_encoder}/feed_forward/inner"),
        *linear(f"{encoder}.feedforward.W_2", f"{own_encoder}/feed_forward/outer"),
        *norm(f"{encoder}.norm2", f"{own_encoder}/feed_forward_residual/norm", *scale_bias),
        *_attention(f"{decoder}.self_attention", f"{own_decoder}/self_attention", names),
        *norm(f"{decoder}.norm1", f"{own_decoder}/self_attention_residual/norm", *scale_bias),
        *_attention(f"{decoder}.encoder_attention", f"{own_decoder}/cross_attention", names),
        *norm(f"{decoder}.norm2", f"{own_decoder}/cross_attention_residual/norm", *scale_bias),
        *norm(f"{decoder}.norm3", f"{own_decoder}/memory_norm", *scale_bias),
        *linear(f"{decoder}.feedforward.W_1", f"{own_decoder}/feed_forward/inner"),
        *linear(f"{decoder}.feedforward.W_2", f"{own_decoder}/feed_forward/outer"),
        *norm(f"{decoder}.norm4", f"{own_decoder}/feed_forward_residual/norm", *scale_bias),
        *linear("output_layer", "output_projection"),
    )
    buffers = (Buffer("positional_encoder", PositionTable(("length", "d_model"))),)
    return Layout("pre_norm_memory_norm", rows, buffers)


def pre_norm_log_softmax(
    source_length: int | None = None, target_length: int | None = None
) -> Layout:
    """Return the layout of the pre-norm model of encoder and decoder stacks.

    Args:
        source_length: Rows of the source's position table; None for `config.max_length`.
        target_length: Rows of the target's.
    """
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


def _attention(foreign: str, path: str, names: tuple[str, str, str, str]) -> list[Row]:
    pairs = zip(names, PROJECTIONS, strict=True)
    return [row for name, own in pairs for row in linear(f"{foreign}.{name}", f"{path}/{own}")]


def _residual_stacks(
    projections: tuple[str, str, str, str],
    feed_forward: tuple[str, str],
    norm_names: tuple[str, str],
) -> list[Row]:
    """Return the rows of two stacks whose residual connections hold the norms."""
    rows = []
    sublayers = {
        "encoder": ("self_attention", "feed_forward"),
        "decoder": ("self_attention", "cross_attention", "feed_forward"),
    }
    for stack, blocks in sublayers.items():
        layer, own = f"{stack}.layers.{{i}}", f"{stack}/layers_{{i}}"
        for index, block in enumerate(blocks):
            foreign, path = f"{layer}.{block}_block", f"{own}/{block}"
            if block == "feed_forward":
                rows += linear(f"{foreign}.{feed_forward[0]}", f"{path}/inner")
                rows += linear(f"{foreign}.{feed_forward[1]}", f"{path}/outer")
            else:
                rows += _attention(foreign, path, projections)
            residual = f"{layer}.residual_connections.{index}.norm"
            rows += norm(residual, f"{path}_residual/norm", *norm_names)
        rows += norm(f"{stack}.norm", f"{stack}/norm", *norm_names)
    return rows
