"""The layouts of torch.nn.Transformer and of its parts."""

from jax_transformer.convert.table import Layout, Row, transpose


def transformer(
    prefix: str = "",
    *,
    source_embedding: str | tuple[str, ...] = (),
    target_embedding: str | tuple[str, ...] = (),
    token_embedding: str | tuple[str, ...] = (),
    output_projection: str = "",
) -> Layout:
    """Return the layout of torch.nn.Transformer, bare or inside a module.

    Args:
        prefix: What stands before its names inside a module, as "transformer.".
        source_embedding: Name of the table of source tokens, as "source_embedding.weight".
        target_embedding: Name of the table of target tokens. Several names are tied copies: a
            tied output projection is another name of this table.
        token_embedding: Names of a table that source and target share.
        output_projection: Module of an output projection with a matrix of its own, or with the
            bias that stands beside a tied one, as "generator".
    """
    tables = {
        "source_embedding": source_embedding,
        "target_embedding": target_embedding,
        "token_embedding": token_embedding,
    }
    rows = [
        Row(name, f"{table}/embedding")
        for table, names in tables.items()
        for name in ((names,) if isinstance(names, str) else names)
    ]
    if output_projection:
        rows += linear(output_projection, "output_projection")
    encoder_rows = _encoder(f"{prefix}encoder.", "encoder/")
    decoder_rows = _decoder(f"{prefix}decoder.", "decoder/")
    return Layout("torch_nn", (*rows, *encoder_rows, *decoder_rows))


def encoder() -> Layout:
    """Return the layout of torch.nn.TransformerEncoder: the parameters under "encoder"."""
    return Layout("torch_nn_encoder", tuple(_encoder("", "")), scope="encoder")


def decoder() -> Layout:
    """Return the layout of torch.nn.TransformerDecoder: the parameters under "decoder"."""
    return Layout("torch_nn_decoder", tuple(_decoder("", "")), scope="decoder")


def attention(scope: str = "encoder/layers_0/self_attention") -> Layout:
    """Return the layout of torch.nn.MultiheadAttention: the parameters of one attention.

    Args:
        scope: Path of the attention in the model; all have the same shapes.
    """
    return Layout("torch_nn_attention", tuple(_attention("", "")), scope=scope)


def linear(foreign: str, path: str) -> list[Row]:
    """Return the rows of a torch.nn.Linear called `foreign` for the projection at `path`."""
    return [
        Row(f"{foreign}.weight", f"{path}/kernel", transpose),
        Row(f"{foreign}.bias", f"{path}/bias"),
    ]


def norm(foreign: str, path: str, scale: str = "weight", bias: str = "bias") -> list[Row]:
    """Return the rows of a norm called `foreign` for the norm at `path`.

    Args:
        foreign: The foreign module.
        path: The norm's path.
        scale: The foreign module's name for the scale.
        bias: The foreign module's name for the bias.
    """
    return [Row(f"{foreign}.{scale}", f"{path}/scale"), Row(f"{foreign}.{bias}", f"{path}/bias")]


def _attention(foreign: str, path: str) -> list[Row]:
    projections = ("query", "key", "value")
    return [
        Row(f"{foreign}in_proj_weight", tuple(f"{path}{p}/kernel" for p in projections), transpose),
        Row(f"{foreign}in_proj_bias", tuple(f"{path}{p}/bias" for p in projections)),
        *linear(f"{foreign}out_proj", f"{path}output"),
    ]


def _encoder(foreign: str, path: str) -> list[Row]:
    layer, own = f"{foreign}layers.{{i}}", f"{path}layers_{{i}}"
    return [
        *_attention(f"{layer}.self_attn.", f"{own}/self_attention/"),
        *norm(f"{layer}.norm1", f"{own}/self_attention_residual/norm"),
        *linear(f"{layer}.linear1", f"{own}/feed_forward/inner"),
        *linear(f"{layer}.linear2", f"{own}/feed_forward/outer"),
        *norm(f"{layer}.norm2", f"{own}/feed_forward_residual/norm"),
        *norm(f"{foreign}norm", f"{path}norm"),
    ]


def _decoder(foreign: str, path: str) -> list[Row]:
    layer, own = f"{foreign}layers.{{i}}", f"{path}layers_{{i}}"
    return [
        *_attention(f"{layer}.self_attn.", f"{own}/self_attention/"),
        *norm(f"{layer}.norm1", f"{own}/self_attention_residual/norm"),
        *_attention(f"{layer}.multihead_attn.", f"{own}/cross_attention/"),
        *norm(f"{layer}.norm2", f"{own}/cross_attention_residual/norm"),
        *linear(f"{layer}.linear1", f"{own}/feed_forward/inner"),
        *linear(f"{layer}.linear2", f"{own}/feed_forward/outer"),
        *norm(f"{layer}.norm3", f"{own}/feed_forward_residual/norm"),
        *norm(f"{foreign}norm", f"{path}norm"),
    ]
