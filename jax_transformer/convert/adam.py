"""The state of torch's Adam as that of optax, and back: moments by the layout of the weights."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jax_transformer.config import TransformerConfig
from jax_transformer.convert.named_layouts import get_layout
from jax_transformer.convert.table import Layout
from jax_transformer.convert.transfer import jax_leaf, to_params, to_tensors
from jax_transformer.errors import InputError, naming_the_extra
from jax_transformer.model.checks import check_params
from jax_transformer.storage.weights.arrays import as_torch

ADAM = "ScaleByAdamState"  # optax's name for the moments and the step count


def adam_from_torch(
    torch_state: Mapping[str, Any],
    names: Sequence[str],
    state: PyTree,
    config: TransformerConfig,
    layout: str | os.PathLike | Layout = "reference",
) -> PyTree:
    """Return `state` with the moments and the step count of a torch.optim.Adam or AdamW.

    Args:
        torch_state: What `state_dict()` of the torch optimizer returns.
        names: Names of its parameters, in its order, for example of `module.named_parameters()`.
        state: A state of optax with one Adam, for example `optax.adam(1e-3).init(params)`. The
            learning rate and its schedule are not of Adam, and stay.
        config: The shape of the model.
        layout: The layout of the names, as in `get_layout`.

    Raises:
        InputError: Names and states do not belong together; the torch optimizer is an AMSGrad, or
            its parameters have made unequal numbers of steps, or none.
        ConversionError: The moments do not fit the config; its report lists every fault.
    """
    adam, places = _matched(state, names, torch_state)
    check_params(adam.mu, config)
    entries = {name: torch_state["state"].get(place) for name, place in places.items()}
    steps = {int(entry["step"]) for entry in entries.values() if entry}
    if len(steps) != 1 or any(group.get("amsgrad") for group in torch_state["param_groups"]):
        raise InputError(f"torch_state: an Adam at one step is read; its steps are {sorted(steps)}")
    layout = get_layout(layout)

    def moment(name: str) -> dict[str, Any]:
        tensors = {parameter: entry[name] for parameter, entry in entries.items() if entry}
        return to_params(tensors, config, layout, buffers=False, leaf=jax_leaf())[0]

    from optax.tree_utils import tree_set

    return tree_set(
        state,
        lambda path, _: getattr(path[-1], "tuple_name", "") == ADAM,
        count=jnp.full_like(adam.count, steps.pop()),
        mu=moment("exp_avg"),
        nu=moment("exp_avg_sq"),
    )


def adam_to_torch(
    state: PyTree,
    names: Sequence[str],
    torch_state: Mapping[str, Any],
    config: TransformerConfig,
    layout: str | os.PathLike | Layout = "reference",
) -> dict[str, Any]:
    """Return what `load_state_dict` of the torch optimizer takes: undoes `adam_from_torch`.

    `state`, `names`, `config` and `layout` are as there; the settings in `torch_state` stay.

    Raises:
        InputError: Names and states do not belong together.
        ConversionError: The moments do not fit the config; its report lists every fault.
    """
    (adam, places), layout = _matched(state, names, torch_state), get_layout(layout)
    mu, nu = (to_tensors(tree, config, layout, buffers=False)[0] for tree in (adam.mu, adam.nu))
    if unknown := [name for name in names if name not in mu]:
        raise InputError(f"names: {unknown[0]!r} is no parameter of the layout {layout.name!r}")
    entries = {  # torch counts in place: each parameter has a count of its own
        place: {
            "step": np.array(adam.count, np.float32),
            "exp_avg": mu[name],
            "exp_avg_sq": nu[name],
        }
        for name, place in places.items()
    }
    with naming_the_extra("convert.adam_to_torch"):
        return {**torch_state, "state": jax.tree.map(as_torch, entries)}


def _matched(
    state: PyTree, names: Sequence[str], torch_state: Mapping[str, Any]
) -> tuple[Any, dict[str, int]]:
    """Return the Adam in a state of optax, and where the torch optimizer has each name."""
    from optax.tree_utils import tree_get_all_with_path

    adams = [part for _, part in tree_get_all_with_path(state, ADAM)]
    if len(adams) != 1:
        raise InputError(f"state has {len(adams)} states of optax's Adam, and must have one")
    places = [place for group in torch_state["param_groups"] for place in group["params"]]
    if len(places) != len(names):
        raise InputError(f"names has {len(names)} names; the optimizer {len(places)} parameters")
    return adams[0], dict(zip(names, places, strict=True))
