"""How the parts of a model are observed while it runs, for each kind of modules.

A process needs only the framework of its model: none is imported before a model of it is given.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    from torch import nn

# Called with a part's name, the part, its own weights by name, its inputs and its output; returns
# the output.
Keep = Callable[[str, Any, Mapping[str, Any], Any, Any], Any]


def observed(model: Any, keep: Keep) -> AbstractContextManager[None]:
    """Return the context in which `keep` is called for each call of a part of the model.

    Names are paths of attributes with dots: "encoder.layers.0.norm"; the model itself is "". The
    model is afterwards as it was. Nothing is kept of what is no module.
    """
    if _is(model, "torch.nn"):
        return _observe_torch(model, keep)
    if _is(model, "flax.linen"):
        return _observe_linen(keep)
    for library in ("flax.nnx", "equinox"):
        if _is(model, library):
            return _observe_objects(model, sys.modules[library].Module, keep)
    return nullcontext()


def _is(model: Any, library: str) -> bool:
    module = sys.modules.get(library)
    return module is not None and isinstance(model, module.Module)


@contextmanager
def _observe_torch(model: nn.Module, keep: Keep) -> Iterator[None]:
    """Observe a torch module, in evaluation mode and without gradients, by hooks."""
    import torch

    def kept(name: str, part: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        keep(name, part, dict(part.named_parameters(recurse=False)), (args, kwargs), output)

    modes = {part: part.training for part in model.modules()}
    handles = [
        part.register_forward_hook(functools.partial(kept, name), with_kwargs=True)
        for name, part in model.named_modules()
    ]
    fast_path = torch.backends.mha.get_fastpath_enabled()  # it takes no part's own forward
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for handle in handles:
            handle.remove()
        for part, training in modes.items():
            part.training = training


def _observe_linen(keep: Keep) -> AbstractContextManager[None]:
    from flax import linen

    def kept(call: Callable, args: tuple, kwargs: dict[str, Any], context: Any) -> Any:
        output, part = call(*args, **kwargs), context.module
        if context.method_name != "__call__":
            return output
        params = part.variables.get("params", {})
        weights = {key: leaf for key, leaf in params.items() if not isinstance(leaf, Mapping)}
        return keep(".".join(part.path), part, weights, (args, kwargs), output)

    return linen.intercept_methods(kept)


@contextmanager
def _observe_objects(model: Any, base: type, keep: Keep) -> Iterator[None]:
    """Observe modules of NNX or Equinox: `__call__` of their classes is replaced meanwhile."""
    parts: dict[int, tuple[str, Any]] = {}  # by their identity: not all can be keys

    def walk(name: str, value: Any) -> None:
        if isinstance(value, base):
            if id(value) in parts:
                return
            parts[id(value)] = name, value
            value = vars(value)
        if isinstance(value, list | tuple):
            value = dict(enumerate(value))
        if isinstance(value, Mapping):
            for key, inner in value.items():
                walk(f"{name}.{key}".lstrip("."), inner)

    walk("", model)

    def observing(call: Callable) -> Callable:
        @functools.wraps(call)
        def kept(self: Any, *args: Any, **kwargs: Any) -> Any:
            output = call(self, *args, **kwargs)
            # A transformation copies modules: then only the class is known.
            name, _ = parts.get(id(self), (type(self).__name__, self))
            weights = {
                key: leaf
                for key, value in vars(self).items()
                if not key.startswith("_") and not isinstance(value, base | list | tuple | dict)
                for leaf in jax.tree.leaves(value)[:1]
            }
            return keep(name, self, weights, (args, kwargs), output)

        return kept

    lineages = [type(part).__mro__ for _, part in parts.values() if callable(part)]
    owners = {next(cls for cls in line if "__call__" in vars(cls)) for line in lineages}
    calls = {owner: vars(owner)["__call__"] for owner in owners}
    try:
        for owner, call in calls.items():
            owner.__call__ = observing(call)
        yield
    finally:
        for owner, call in calls.items():
            owner.__call__ = call
