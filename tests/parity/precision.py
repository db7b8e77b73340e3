"""What a device that rounds the inputs of its matrix products would compute, on any device."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

# Bits of the fraction that are left of a float32 input.
MANTISSA_BITS = {"tensorfloat32": 10, "bfloat16": 7}


def with_rounded_products(function: Callable[..., Any], precision: str) -> Callable[..., Any]:
    """Return the function with the inputs of all its matrix products rounded.

    GPUs round them to TensorFloat-32 by default, TPUs to bfloat16.
    """
    bits = MANTISSA_BITS[precision]

    def rounded(*arguments: Any) -> Any:
        traced, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
        leaves = _run(traced.jaxpr, traced.consts, jax.tree.leaves(arguments), bits)
        return jax.tree.unflatten(jax.tree.structure(shape), leaves)

    return rounded


def _run(jaxpr: Jaxpr, constants: list[Any], arguments: list[Any], bits: int) -> list[Any]:
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *arguments], strict=True))
    for equation in jaxpr.eqns:
        inputs = [v.val if isinstance(v, Literal) else values[v] for v in equation.invars]
        inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        if isinstance(inner, ClosedJaxpr):  # a function within, as jit has it
            outputs = _run(inner.jaxpr, inner.consts, inputs, bits)
        else:
            if equation.primitive.name == "dot_general":
                inputs = [jax.lax.reduce_precision(x, 8, bits) for x in inputs]
            outputs = equation.primitive.bind(*inputs, **equation.params)
            outputs = outputs if equation.primitive.multiple_results else [outputs]
        values |= zip(equation.outvars, outputs, strict=True)
    return [v.val if isinstance(v, Literal) else values[v] for v in jaxpr.outvars]
