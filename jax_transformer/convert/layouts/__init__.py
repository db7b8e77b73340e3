"""Names and shapes of other programs; a new layout is a file in this folder and a line here."""

from jax_transformer.convert.layouts import from_scratch, reference, torch_nn
from jax_transformer.convert.table import Layout

LAYOUTS: dict[str, Layout] = {
    "reference": reference.LAYOUT,
    "torch_nn": torch_nn.transformer(),
    "torch_nn_encoder": torch_nn.part("encoder"),
    "torch_nn_decoder": torch_nn.part("decoder"),
    "torch_nn_attention": torch_nn.attention(),
    "shared_heads": from_scratch.shared_heads(),
    "pre_norm": from_scratch.pre_norm(),
    "pre_norm_memory_norm": from_scratch.pre_norm_memory_norm(),
    "pre_norm_log_softmax": from_scratch.pre_norm_log_softmax(),
}
