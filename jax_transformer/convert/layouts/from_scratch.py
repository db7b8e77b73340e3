"""The layouts of four published implementations, by the names of their code."""

from jax_transformer.convert.buffers import PositionTable
from jax_transformer.convert.layouts.torch_nn import layer_rows, linear, norm
from jax_transformer.convert.table import Buffer, Layout, Row
from jax_transformer.model.tree import STACKS


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
    tables = ("encoder.positional_encoder.pe", "decoder.position_embedding.pe")
    return Layout("shared_heads", rows, tuple(Buffer(name, PositionTable()) for name in tables))


def pre_norm() -> Layout:
    """Return the layout of what `build_transformer` builds, with the blocks of its named source."""
    return _residual_layout(
        "pre_norm",
        tables=("source_embeddings", "target_embeddings"),
        positions=("source_pos.postitons", "target_pos.postitons"),  # so the code spells the name
        projections=("w_q", "w_k", "w_v", "w_o"),
        feed_forward=("linear_layer_1", "linear_layer_2"),
        norm_leaves=("alpha", "bias"),
        head="projection_layer.projection",
    )


def pre_norm_memory_norm() -> Layout:
    """Return the layout of the pre-norm model whose decoder layers normalise the memory."""
    names, leaves = ("W_q", "W_k", "W_v", "W_o"), ("gamma", "beta")
    encoder_attentions = {"self_attention": ("self_attention", "norm1")}
    attentions = encoder_attentions | {"cross_attention": ("encoder_attention", "norm2")}
    inner, outer = "feedforward.W_1", "feedforward.W_2"
    ends = (inner, outer, "norm2"), (inner, outer, "norm4")
    rows = (
        Row("src_embedding.embedding.weight", "source_embedding/embedding"),
        Row("tgt_embedding.embedding.weight", "target_embedding/embedding"),
        *layer_rows("encoder.layers", "encoder", encoder_attentions, names, ends[0], leaves),
        *layer_rows("decoder.layers", "decoder", attentions, names, ends[1], leaves),
        *norm("decoder.layers.{i}.norm3", "decoder/layers_{i}/memory_norm", leaves),
        *linear("output_layer", "output_projection"),
    )
    buffers = (Buffer("positional_encoder", PositionTable(("length", "d_model"))),)
    return Layout("pre_norm_memory_norm", rows, buffers)


def pre_norm_log_softmax() -> Layout:
    """Return the layout of the pre-norm model of encoder and decoder stacks."""
    return _residual_layout(
        "pre_norm_log_softmax",
        tables=("src_embed", "tgt_embed"),
        positions=("src_pos.pe", "tgt_pos.pe"),
        projections=("W_q", "W_k", "W_v", "W_o"),
        feed_forward=("linear1", "linear2"),
        norm_leaves=("gamma", "beta"),
        head="projection_layer.proj",
    )


def _residual_layout(
    name: str,
    tables: tuple[str, str],
    positions: tuple[str, str],
    projections: tuple[str, str, str, str],
    feed_forward: tuple[str, str],
    norm_leaves: tuple[str, str],
    head: str,
) -> Layout:
    rows = [
        Row(f"{tables[0]}.embedding.weight", "source_embedding/embedding"),
        Row(f"{tables[1]}.embedding.weight", "target_embedding/embedding"),
    ]
    numbered = "residual_connections.{}.norm".format
    inner, outer = (f"feed_forward_block.{product}" for product in feed_forward)
    attentions = {"self_attention": ("self_attention_block", numbered(0))}
    for stack in STACKS:
        ends = inner, outer, numbered(len(attentions))
        rows += layer_rows(f"{stack}.layers", stack, attentions, projections, ends, norm_leaves)
        rows += norm(f"{stack}.norm", f"{stack}/norm", norm_leaves)
        attentions["cross_attention"] = ("cross_attention_block", numbered(1))
    rows += linear(head, "output_projection")
    return Layout(name, tuple(rows), tuple(Buffer(table, PositionTable()) for table in positions))
