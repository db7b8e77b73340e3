"""Why a tensor has no place: its row in the layout names a parameter that the config lacks."""

from __future__ import annotations

import re
from collections.abc import Mapping

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.table import LAYER, Layout, Shape, is_possible, name_pattern

# The value of a field that gives a config the parameters whose path matches.
BIASES = {
    r"norm/bias$": "norm_bias=True",
    r"attention/(query|key|value)/bias$": "qkv_bias=True",
    r"attention/output/bias$": "attention_output_bias=True",
    r"feed_forward/\w+/bias$": "feed_forward_bias=True",
}
PARTS = {
    r"^encoder/norm/": "final_norm=True",
    r"^decoder/norm/": "decoder_final_norm=True",
    r"_embedding_norm/": "embedding_norm=True",
    r"/memory_norm/": "memory_norm=True",
    r"/feed_forward/gate/": "gated_feed_forward=True",
    r"/layers_\d+/relative_attention_bias/": "relative_attention_bias='per_layer'",
    r"/relative_attention_bias/": "positions='relative'",
    r"_positions/": "positions='learned'",
    r"^token_embedding/": "token_embeddings='shared'",
    r"^(source|target)_embedding/": "token_embeddings='separate'",
    r"^output_projection/kernel$": "output_projection='linear'",
    r"^output_projection/bias$": "output_bias=True",
}


def why_unexpected(
    name: str, layout: Layout, config: TransformerConfig, shapes: Mapping[str, Shape]
) -> str:
    """Return why a tensor that the layout has a row for has no place in the config.

    Args:
        name: Name of the foreign tensor.
        layout: The foreign names.
        config: The shape of the model.
        shapes: Shape of every parameter of the config, by path in the layout's scope.

    Returns:
        The parameter, and the field of the config that would give it; "" where no row has the
        name, or its row is for other configs.
    """
    inside = f"{layout.scope}/" if layout.scope else ""
    for row in layout.rows:
        if row.when is not None and getattr(config, row.when[0]) != row.when[1]:
            continue
        if match := name_pattern(row.foreign).fullmatch(name):
            for path in (path.format(**match.groupdict()) for path in row.paths):
                if path not in shapes and is_possible(f"{inside}{path}"):
                    return (
                        f"is {path}, which the config lacks{_remedy(inside, path, config, shapes)}"
                    )
    return ""


def _remedy(inside: str, path: str, config: TransformerConfig, shapes: Mapping[str, Shape]) -> str:
    """Return what the config would need, as "; final_norm=True has it"."""
    whole = f"{inside}{path}"
    stack = whole.partition("/")[0]
    if (layer := LAYER.search(whole)) and stack in ("encoder", "decoder"):
        field = f"num_{stack}_layers"
        if int(layer[1]) >= getattr(config, field):
            return f", with {field}={getattr(config, field)}"
    owner = path.rpartition("/")[0]
    has_owner = f"{owner}/kernel" in shapes or f"{owner}/scale" in shapes
    tables = BIASES | PARTS if has_owner else PARTS
    found = (needed for pattern, needed in tables.items() if re.search(pattern, whole))
    return f"; {needed} has it" if (needed := next(found, "")) else ""
