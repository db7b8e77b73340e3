"""The layout of `torch_reference`: the same names, with torch's words for the leaves."""

from jax_transformer.convert.layouts.torch_nn import linear, norm
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
        *norm("{stack}.layers.{i}.memory_norm", "{stack}/layers_{i}/memory_norm"),
        Row(
            "{stack}.layers.{i}.relative_attention_bias.weight",
            "{stack}/layers_{i}/relative_attention_bias/embedding",
        ),
        Row("{stack}.relative_attention_bias.weight", "{stack}/relative_attention_bias/embedding"),
        *norm("{side}_embedding_norm", "{side}_embedding_norm"),
        *norm("{stack}.norm", "{stack}/norm"),
        *linear("output_projection", "output_projection"),
        *linear("source_convolution_{number}", "source_convolution_{number}"),
        *linear("head.{projection}", "head/{projection}"),
    ),
)
