"""The layout of `torch_reference`: the same names, with torch's words for the leaves."""

from jax_transformer.convert.table import Layout, Row, transpose

LAYOUT = Layout(
    "reference",
    (
        Row("{table}.weight", "{table}/embedding"),
        Row(
            "{stack}.layers.{i}.{block}.{projection}.weight",
            "{stack}/layers_{i}/{block}/{projection}/kernel",
            transpose,
        ),
        Row("{stack}.layers.{i}.{block}.{norm}.weight", "{stack}/layers_{i}/{block}/{norm}/scale"),
        # One row for the biases of projections and of norms.
        Row("{stack}.layers.{i}.{block}.{part}.bias", "{stack}/layers_{i}/{block}/{part}/bias"),
        Row("{stack}.layers.{i}.memory_norm.weight", "{stack}/layers_{i}/memory_norm/scale"),
        Row("{stack}.layers.{i}.memory_norm.bias", "{stack}/layers_{i}/memory_norm/bias"),
        Row(
            "{stack}.layers.{i}.relative_attention_bias.weight",
            "{stack}/layers_{i}/relative_attention_bias/embedding",
        ),
        Row("{stack}.relative_attention_bias.weight", "{stack}/relative_attention_bias/embedding"),
        Row("{side}_embedding_norm.weight", "{side}_embedding_norm/scale"),
        Row("{side}_embedding_norm.bias", "{side}_embedding_norm/bias"),
        Row("{stack}.norm.weight", "{stack}/norm/scale"),
        Row("{stack}.norm.bias", "{stack}/norm/bias"),
        Row("output_projection.weight", "output_projection/kernel", transpose),
        Row("output_projection.bias", "output_projection/bias"),
        Row("source_convolution_{number}.weight", "source_convolution_{number}/kernel", transpose),
        Row("source_convolution_{number}.bias", "source_convolution_{number}/bias"),
        Row("head.{projection}.weight", "head/{projection}/kernel", transpose),
        Row("head.{projection}.bias", "head/{projection}/bias"),
    ),
)
