"""What is kept of a model's run, for each kind of module, and in a file."""

import subprocess
import sys

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.numpy import save_file
from torch import nn

from jax_transformer import InputError, parity

X = np.random.default_rng(0).normal(size=(3, 5, 4)).astype(np.float32)
NAMES = ["inner", "norm", "inner#2", ""]


class Torch(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x, *, scale):
        return self.inner(self.norm(self.inner(x))) * scale


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        inner = linen.Dense(4, name="inner")
        return inner(linen.LayerNorm(name="norm")(inner(x)))


class Nnx(nnx.Module):
    def __init__(self):
        self.inner = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.norm = nnx.LayerNorm(4, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.inner(self.norm(self.inner(x)))


def check_chain(record, output, bound=1e-6):
    """Check names, and that each part was given what the one before it computed."""
    assert list(record.blocks) == [*NAMES, "output"]
    first, norm, second, model, returned = record.blocks.values()
    assert np.array_equal(first.inputs[0], X)
    assert np.array_equal(norm.inputs[0], first.outputs[0])
    assert np.array_equal(second.inputs[0], norm.outputs[0])
    assert np.array_equal(model.outputs[0], returned.outputs[0])
    assert np.allclose(returned.outputs[0], output, rtol=0, atol=bound)
    assert sorted(weight.shape for weight in first.weights.values()) == [(4,), (4, 4)]


def test_a_torch_module_is_as_it_was_after_its_record():
    module, x = Torch().train(), torch.from_numpy(X)
    record = parity.record(module, lambda module: module(x, scale=2.0))
    check_chain(record, module(x, scale=2.0).detach().numpy())
    assert record.blocks["norm"].kind == "LayerNorm"
    assert module.training
    assert not any(part._forward_hooks for part in module.modules())


@pytest.mark.parametrize("compiled", [False, True])
def test_a_linen_module_also_inside_jit(compiled):
    params = Linen().init(jax.random.key(0), X)
    apply = jax.jit(Linen().apply) if compiled else Linen().apply
    check_chain(parity.record(Linen(), lambda _: apply(params, X)), Linen().apply(params, X))


def test_float64_inside_jit_whatever_the_thread_of_a_callback_has():
    with jax.enable_x64(True):
        given = jax.tree.map(jnp.float64, (Linen().init(jax.random.key(0), X), X))

        def call(_):
            program = jax.jit(Linen().apply).lower(*given).compile()
            with jax.enable_x64(False):
                return program(*given)

        check_chain(parity.record(Linen(), call), Linen().apply(*given), 1e-15)


def test_an_nnx_module_whose_class_is_as_it_was():
    module, call = Nnx(), Nnx.__call__
    check_chain(parity.record(module, lambda module: module(jnp.array(X))), module(jnp.array(X)))
    assert Nnx.__call__ is call


def test_an_equinox_module_of_one_vector_is_recorded_with_all_rows():
    equinox = pytest.importorskip("equinox")

    class Equinox(equinox.Module):
        inner: equinox.nn.Linear
        norm: equinox.nn.LayerNorm

        def __call__(self, x):
            return self.inner(self.norm(self.inner(x)))

    module = Equinox(equinox.nn.Linear(4, 4, key=jax.random.key(0)), equinox.nn.LayerNorm(4))
    rows = jax.vmap(jax.vmap(module))
    check_chain(parity.record(module, lambda _: rows(jnp.array(X))), rows(jnp.array(X)))


def test_a_function_names_its_own_values():
    record = parity.record(np.tanh, lambda f: {"hidden": f(X), "sums": [f(X).sum(-1), X[0]]})
    assert list(record.blocks) == ["hidden", "sums.0", "sums.1"]


def test_a_file_gives_the_record_back(tmp_path):
    module = Torch().to(torch.bfloat16)
    x = torch.from_numpy(X).to(torch.bfloat16)
    record = parity.record(module, lambda module: module(x, scale=2.0))
    record.save(tmp_path / "a.safetensors")
    again = parity.read_record(tmp_path / "a.safetensors")
    assert list(again.blocks) == list(record.blocks)
    assert again.blocks["norm"].kind == "LayerNorm"
    assert again.blocks["norm"].outputs[0].dtype.name == "bfloat16"
    before, after = (jax.tree.leaves(dict(one.blocks)) for one in (record, again))
    assert len(before) == len(after) > 10
    assert all(map(np.array_equal, before, after))
    with pytest.raises(InputError, match="exists"):
        record.save(tmp_path / "a.safetensors")


def test_any_file_of_arrays_is_read_in_the_order_of_its_numbers(tmp_path):
    names = ["step 10.loss", "step 9.loss", "step 1.loss"]
    save_file({name: np.ones(1) for name in names}, tmp_path / "losses.safetensors")
    record = parity.read_record(tmp_path / "losses.safetensors")
    assert list(record.blocks) == names[::-1]


def test_what_cannot_be_recorded_or_read_is_refused(tmp_path):
    with pytest.raises(InputError, match="a NoneType without arrays"):
        parity.record(None, lambda _: None)
    metadata = {"blocks": '[["inner", "Linear", 1, 0, []]]'}
    save_file({"a": np.ones(1)}, tmp_path / "a.safetensors", metadata)
    with pytest.raises(InputError, match="its list of blocks does not fit its arrays"):
        parity.read_record(tmp_path / "a.safetensors")
    save_file({"a": np.ones(1)}, tmp_path / "b.safetensors", {"blocks": "[]"})
    with pytest.raises(InputError, match="holds no arrays to compare"):
        parity.read_record(tmp_path / "b.safetensors")


IMPORT = """
import sys
sys.modules |= dict.fromkeys(["torch", "flax", "equinox"])  # as where they are not installed
import jax.numpy as jnp
from jax_transformer import parity
record = parity.record(jnp.tanh, lambda f: f(jnp.ones(3)))
print(parity.compare(record, record))
"""


@pytest.mark.exhaustive  # a process of its own
def test_no_framework_of_modules_is_imported():
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "a agrees with b"
