"""How the parts of a model are observed while it runs, for each kind of modules.

A process needs only the framework of its model: none is imported before a model of it is given.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    from flax import linen
    from torch import nn

# Called with a part's name, the part, its own weights by name, its inputs and its output, once it
# has run; returns the output.
Keep = Callable[[str, Any, Mapping[str, Any], Any, Any], Any]


def observed(model: Any, keep: Keep) -> AbstractContextManager[None]:
    """Return the context in which `keep` is called for each call of a part of the model.

    Names are paths of attributes with dots: "encoder.layers.0.norm"; the model itself is "". The
    model is afterwards as it was. Nothing is kept of what is no module.
    """
    known = (observe for name, observe in OBSERVERS.items() if _is(model, name))
    return next(known, lambda *_: nullcontext())(model, keep)


def _is(model: Any, library: str) -> bool:
    module = sys.modules.get(library)
    return module is not None and isinstance(model, module.Module)


@contextmanager
def observe_torch(model: nn.Module, keep: Keep) -> Iterator[None]:
    """Observe a torch module, in evaluation mode and without gradients, by hooks."""
    import torch

    def hook(name: str) -> Callable:
        def kept(part: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            keep(name, part, dict(part.named_parameters(recurse=False)), (args, kwargs), output)

        return kept

    modes = {part: part.training for part in model.modules()}
    handles = [
        part.register_forward_hook(hook(name), with_kwargs=True)
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


def _observe_linen(_: linen.Module, keep: Keep) -> AbstractContextManager[None]:
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
def _observe_objects(model: Any, keep: Keep) -> Iterator[None]:
    """Observe modules of NNX or Equinox: `__call__` of their classes is replaced meanwhile."""
    base = next(sys.modules[name].Module for name in ("flax.nnx", "equinox") if _is(model, name))
    names: dict[int, str] = {}
    parts: list[Any] = []

    def walk(name: str, value: Any) -> None:
        items: Iterable = ()
        if isinstance(value, base) and id(value) not in names:
            names[id(value)] = name
            parts.append(value)
            items = vars(value).items()
        elif isinstance(value, Mapping | list | tuple):
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, inner in items:
            walk(f"{name}.{key}".lstrip("."), inner)

    walk("", model)

    def weights(part: Any) -> dict[str, Any]:
        return {
            name: leaf
            for name, value in vars(part).items()
            if not name.startswith("_") and not isinstance(value, base | list | tuple | dict)
            for leaf in jax.tree.leaves(value)[:1]
        }

    def observing(call: Callable) -> Callable:
        @functools.wraps(call)
        def kept(self: Any, *args: Any, **kwargs: Any) -> Any:
            output = call(self, *args, **kwargs)
            name = names.get(id(self), type(self).__name__)  # a transformation copies modules
            return keep(name, self, weights(self), (args, kwargs), output)

        return kept

    classes = {
        next(cls for cls in type(part).__mro__ if "__call__" in vars(cls))
        for part in parts
        if callable(part)
    }
    calls = {cls: vars(cls)["__call__"] for cls in classes}
    try:
        for cls, call in calls.items():
            cls.__call__ = observing(call)
        yield
    finally:
        for cls, call in calls.items():
            cls.__call__ = call


OBSERVERS: dict[str, Callable[[Any, Keep], AbstractContextManager[None]]] = {
    "torch.nn": observe_torch,
    "flax.linen": _observe_linen,
    "flax.nnx": _observe_objects,
    "equinox": _observe_objects,
}
