"""Why a tensor has no place: its row in the layout names a parameter that the config lacks."""

from __future__ import annotations

from collections.abc import Mapping

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.table import Layout, name_pattern
from jax_transformer.model.parameters import LAYER, Shape, find_parameter, lacking


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
                if path not in shapes and find_parameter(f"{inside}{path}"):
                    return f"is {path}, which the config lacks{_remedy(f'{inside}{path}', config)}"
    return ""


def _remedy(path: str, config: TransformerConfig) -> str:
    """Return what the config would need, for example "; final_norm=True has it"."""
    parameter = find_parameter(path)
    layer = LAYER.search(path)
    if layer and int(layer[1]) >= (count := parameter.count(config)):
        return f", with num_{path.partition('/')[0]}_layers={count}"
    needs = [f"{field}={value!r}" for field, value in lacking(parameter, config).items()]
    return f"; {needs[0]} has it" if needs else ""
