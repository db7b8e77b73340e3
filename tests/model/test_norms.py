"""The two forms of the norms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_transformer.model.norms import norm
from tests.parity.measure import error
from tests.tiers import tiered

ROWS, LENGTH, WIDTH = 3, 5, 14


def draw(dtype):
    random = np.random.default_rng(0)
    x = random.normal(2, 3, (ROWS, LENGTH, WIDTH))
    x[1, 2] = 0.0  # a constant row, where the deviation is 0
    return [
        jnp.asarray(array, dtype)
        for array in (
            x,
            random.normal(size=WIDTH),
            random.normal(size=WIDTH),
            random.normal(size=x.shape),
        )
    ]


def call(kind, form):
    if kind in ("rms_norm", "layer_norm without bias"):
        kind = kind.removesuffix(" without bias")
        return lambda x, scale, bias: norm(x, scale, None, 1e-6, kind, form)
    return lambda x, scale, bias: norm(x, scale, bias, 1e-6, kind, form)


KINDS = ["layer_norm", "layer_norm without bias", "unbiased_layer_norm"]
KINDS += ["std_norm", "biased_std_norm", "rms_norm"]


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [("float64", 1e-12), pytest.param("float32", 2e-6, marks=pytest.mark.exhaustive)],
)
@pytest.mark.parametrize("kind", tiered(KINDS, ["layer_norm", "unbiased_layer_norm"]))
def test_the_fused_form_has_the_outputs_and_gradients_of_the_shifted_form(kind, dtype, bound):
    with jax.enable_x64(dtype == "float64"):
        x, scale, bias, cotangent = draw(dtype)
        outputs = {}
        for form in ("shifted", "fused"):
            y, transpose = jax.vjp(call(kind, form), x, scale, bias)
            outputs[form] = (y, *transpose(cotangent))
        for name, fused, shifted in zip(
            ("output", "x", "scale", "bias"), outputs["fused"], outputs["shifted"], strict=True
        ):
            assert fused.dtype == shifted.dtype == dtype
            if "std_norm" in kind and name == "x":
                # The constant row's gradient is the cotangent over epsilon, 1e6: beside it the
                # others would not count.
                constant = (1, 2)
                assert error(fused[constant], shifted[constant]) < bound
                fused, shifted = fused.at[constant].set(0), shifted.at[constant].set(0)
            assert error(np.asarray(fused), np.asarray(shifted)) < bound, name


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_the_fused_form_keeps_half_precision_and_computes_in_float32(kind):
    x, scale, bias, cotangent = draw("bfloat16")
    y, transpose = jax.vjp(call(kind, "fused"), x, scale, bias)
    wide = [jnp.asarray(array, jnp.float32) for array in (x, scale, bias, cotangent)]
    expected, widely = jax.vjp(call(kind, "fused"), *wide[:3])
    for found, exact in zip((y, *transpose(cotangent)), (expected, *widely(wide[3])), strict=True):
        assert found.dtype == jnp.bfloat16
        assert error(np.float32(found), np.float32(exact)) < 2**-8  # one rounding, of the result
