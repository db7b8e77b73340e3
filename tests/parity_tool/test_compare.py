"""Which values belong together, what differs first, and what would explain it."""

import re

import numpy as np
import pytest
import torch
from flax import linen
from torch import nn

from jax_transformer import InputError, parity

RANDOM = np.random.default_rng(0)


class Torch(nn.Module):
    """A network of D = 6; `epsilon` and `activation` are what a port may get wrong."""

    def __init__(self, epsilon=1e-5, approximate="none"):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(6, eps=epsilon), nn.Linear(6, 6)
        self.act, self.outer = nn.GELU(approximate), nn.Linear(6, 6)

    def forward(self, x):
        return x + self.outer(self.act(self.inner(self.norm(x))))


def recorded(module, change=lambda state: state, dtype=torch.float64):
    torch.manual_seed(0)
    shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
    state = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    module.load_state_dict(change(state))
    x = torch.from_numpy(np.random.default_rng(1).normal(size=(3, 5, 6))).to(dtype)
    return parity.record(module.to(dtype), lambda module: module(x))


def transposed(name):
    return lambda state: state | {name: state[name].T}


def first(a, b, **options):
    """Return the names of the first pair that differs, and the comparison; also of two trees."""
    a, b = (x if isinstance(x, parity.Record) else parity.record_arrays(x) for x in (a, b))
    comparison = parity.compare(a, b, **options)
    pair = comparison.first_differing
    return pair and (pair.a, pair.b), comparison


def test_equal_programs_agree():
    agreed, comparison = first(recorded(Torch()), recorded(Torch()))
    assert agreed is None
    assert {pair.paired for pair in comparison.blocks} == {"value", "name"}
    assert str(comparison).splitlines()[-1] == "a agrees with b"


@pytest.mark.parametrize(
    ("module", "change", "block", "words"),
    [
        (Torch(epsilon=1e-6), dict, "norm", "a has a layer norm of epsilon 1e-06"),
        (Torch(approximate="tanh"), dict, "act", "a has gelu by tanh"),
        (Torch(), transposed("outer.weight"), "outer", "a has a product with the transposed"),
        (Torch(), lambda s: s | {"inner.bias": 0 * s["inner.bias"]}, "inner", "a bias"),
    ],
)
def test_a_planted_difference_is_found_and_explained(module, change, block, words):
    found, comparison = first(recorded(module, change), recorded(Torch()))
    assert found == (block, block)
    assert "<-- first to differ" in str(comparison)
    assert any(words in text for text in comparison.explanations), comparison.explanations


def test_a_difference_between_two_parts_is_of_the_block_around_them():
    class Inline(Torch):
        def forward(self, x):
            y = nn.functional.gelu(self.inner(self.norm(x)), approximate=self.act.approximate)
            return x + self.outer(y)

    found, comparison = first(recorded(Inline(approximate="tanh")), recorded(Inline()))
    assert found == ("", "")
    assert comparison.explanations == (
        "the difference arises in b after inner and before outer, by 3.4e-05",
        "b has gelu by erf, and a has gelu by tanh",
    )


@pytest.mark.parametrize(
    ("dtype", "epsilon", "bound"), [(np.float64, 2.0**-52, 64), (np.float16, 2.0**-10, 8)]
)
def test_the_bound_is_a_number_of_roundings(dtype, epsilon, bound):
    x = RANDOM.normal(size=(4, 6)) / 8
    x[0, 0], y = 1, x.copy()
    for roundings, expected in ((0.9 * bound, None), (1.1 * bound, ("a", "a"))):
        y[0, 0] = 1 - roundings * epsilon
        assert first({"a": y.astype(dtype)}, {"a": x.astype(dtype)})[0] == expected


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_in_one_program_alone_is_a_difference(number):
    x = RANDOM.normal(size=(4, 6))
    x[1, 2] = number
    y = x.copy()
    assert first({"a": y}, {"a": x})[0] is None
    for finite in (0.5, np.nan_to_num(number)):
        y[1, 2] = finite
        assert first({"a": y}, {"a": x})[0] == first({"a": x}, {"a": y})[0] == ("a", "a")


def test_a_small_difference_does_not_hide_a_larger_one_behind_it():
    ours = recorded(Torch(approximate="tanh"), lambda s: s | {"norm.bias": s["norm.bias"] + 1e-6})
    found, comparison = first(ours, recorded(Torch()))
    assert found == ("act", "act")
    assert re.fullmatch(r"norm differs earlier, but far less: by \d\.\de-07", comparison.notes[0])


def test_values_are_found_under_other_names_and_in_other_arrangements():
    x = RANDOM.normal(size=(3, 5, 8))
    heads = x.reshape(3, 5, 2, 4)
    ways = {"transposed": x.swapaxes(1, 2), "sequence": x.swapaxes(0, 1)}
    ways |= {"heads": heads.swapaxes(1, 2), "split": heads, "rows": x.reshape(15, 8)}
    for way in ways.values():
        for a, b in ((x, way), (way, x)):
            found, comparison = first({"a": a}, {"b": b})
            assert found is None
            assert comparison.blocks[0].paired == "value"
    shuffled = RANDOM.permutation(x.ravel()).reshape(x.shape)
    assert first({"a": shuffled}, {"b": x})[0]


def test_the_first_step_at_which_two_loss_curves_part():
    losses = {f"step {i}": np.exp(-i) for i in range(12)}
    other = losses | {"step 7": losses["step 7"] * (1 + 1e-9)}
    assert first(other, losses)[0] == ("step 7", "step 7")


def test_gradients_are_paired_by_value_though_their_names_and_axes_differ():
    kernels = {name: RANDOM.normal(size=(4, 6)) for name in ("query", "value", "output")}
    a = {f"layers_0/{name}/kernel": kernel for name, kernel in kernels.items()}
    b = {f"0.{name}.weight": kernel.T for name, kernel in kernels.items()}
    a["key_bias"], b["key_bias"] = 1e-17 * RANDOM.normal(size=6), np.zeros(6)  # 0 in theory
    assert first(a, b)[0] is None
    b["0.value.weight"] = 2 * b["0.value.weight"]
    assert first(a, b)[0] == ("layers_0.value.kernel", "0.value.weight")


def test_dtypes_side_by_side_and_the_bound_of_the_coarser_one():
    exact, rounded = recorded(Torch()), recorded(Torch(), dtype=torch.float32)
    agreed, comparison = first(rounded, exact)
    assert agreed is None  # within some roundings to float32
    assert "other dtypes, first norm: float32 in a and float64 in b" in comparison.notes[0]
    assert first(rounded, exact, bound=1e-3)[0] is not None
    half = recorded(Torch(), dtype=torch.bfloat16)
    assert max(p.error for p in first(half, exact)[1].blocks) > 1e-3


def test_a_block_that_only_one_program_has():
    class Longer(Torch):
        def __init__(self):
            super().__init__()
            self.last = nn.LayerNorm(6)

        def forward(self, x):
            return self.last(super().forward(x))

    shorter, longer = recorded(Torch()), recorded(Longer())
    assert first(longer, shorter)[0] == ("last", None)
    found, comparison = first(shorter, longer)
    assert found == (None, "last")
    assert comparison.explanations[0] == "only b has this"


def test_a_value_that_only_one_program_returns_is_a_difference():
    x, y = RANDOM.normal(size=(2, 4, 6))
    short, long = {"x": x}, {"x": x, "bias": y}
    assert first(short, long)[0] == (None, "bias")
    assert first(long, short)[0] == ("bias", None)
    assert first(short, {"x": x, "again": x.T})[0] is None  # nothing new


def test_records_of_other_sizes_are_refused():
    with pytest.raises(InputError, match=r"what a returned has other sizes than b's: \[3\] and"):
        first({"logits": np.ones(3)}, {"logits": np.ones(4)})


def test_rows_of_nan_do_not_count():
    def masked(x):
        return np.where(np.arange(5)[:, None] < 4, x, np.nan)

    a, b = (
        parity.Record(
            {
                name: block._replace(outputs=tuple(map(masked, block.outputs)))
                for name, block in recorded(Torch(approximate=way)).blocks.items()
            }
        )
        for way in ("tanh", "none")
    )
    assert first(b, b)[0] is None
    assert first(a, b)[0] == ("act", "act")


def test_a_function_beside_a_module_is_found_where_it_differs_and_not_at_what_it_does_not_name():
    class Dropped(Torch):
        def __init__(self):
            super().__init__()
            self.words, self.drop = nn.Embedding(9, 6), nn.Dropout()

        def forward(self, ids):
            return self.drop(super().forward(self.drop(self.words(ids) * 2)))

    module, ids = Dropped().double(), np.arange(8).reshape(2, 4)
    expected = parity.record(module, lambda module: module(torch.from_numpy(ids)))
    w = {name: tensor.numpy() for name, tensor in module.state_dict().items()}

    def function(bias=1.0, dropped=1.0):
        x = w["words.weight"][ids] * 2
        y = x - x.mean(-1, keepdims=True)
        y = y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-5) * w["norm.weight"] + w["norm.bias"]
        up = y @ w["inner.weight"].T + bias * w["inner.bias"]
        act = nn.functional.gelu(torch.from_numpy(up)).numpy()
        down = act @ w["outer.weight"].T + w["outer.bias"]
        values = {"x": x, "y": y, "up": up, "act": act, "down": down, "scores": y @ y.mT}
        return parity.record_arrays(values | {"sum": x + down, "z": (x + down) * dropped})

    assert parity.compare(function(), expected).agrees
    assert parity.compare(expected, function()).agrees
    found, comparison = first(function(bias=0.0), expected)
    assert found == ("up", "inner")
    words = "b has a product with the kernel, and a has a product with the kernel without bias"
    assert words in comparison.explanations
    found, comparison = first(expected, function(dropped=RANDOM.binomial(1, 0.5, (2, 4, 6)) * 2.0))
    assert found == (None, "z")  # the module drops nothing
    assert comparison.explanations == ("only b has this",)


class LinenAttention(linen.Module):
    """Linen's attention behind a norm, with a fault."""

    fault: str | None

    @linen.compact
    def __call__(self, x, mask):
        scale = {"scale": 8**0.5, "scale by 1.001": 1.001}.get(self.fault, 1.0)

        def attend(query, key, value, mask=None):  # Linen passes what the signature names
            return linen.dot_product_attention(scale * query, key, value, mask=mask)

        y = linen.LayerNorm(epsilon=1e-3 if self.fault == "epsilon" else 1e-5)(x)
        attention = linen.MultiHeadDotProductAttention(4, attention_fn=attend)
        return x + attention(y, y, mask=None if self.fault == "mask" else mask)


class TorchAttention(nn.Module):
    """The same by torch's class, which calls no parts; query, key and value are one weight."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x, padding):
        y = self.norm(x)
        options = {"need_weights": False, "key_padding_mask": padding}
        return x + self.attention(y, y, y, **options)[0]


ATTENTION = ("MultiHeadDotProductAttention_0", "attention")


@pytest.mark.parametrize(
    ("fault", "block"),
    [(None, None), ("epsilon", ("LayerNorm_0", "norm"))]
    + [(fault, ATTENTION) for fault in ("scale", "scale by 1.001", "mask", "order")],
)
def test_an_attention_of_parts_is_paired_with_one_that_has_none(fault, block, x64):
    torch.manual_seed(0)
    theirs = TorchAttention().double()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    x, padding = np.random.default_rng(0).normal(size=(2, 7, 32)), np.zeros((2, 7), bool)
    padding[1, 5:] = True
    state = {name: value.numpy() for name, value in theirs.state_dict().items()}
    parts = [np.split(state[f"attention.in_proj_{leaf}"], 3) for leaf in ("weight", "bias")]
    heads = {
        name: {"kernel": kernel.T.reshape(32, 4, 8), "bias": bias.reshape(4, 8)}
        for name, kernel, bias in zip(("query", "key", "value"), *parts, strict=True)
    }
    if fault == "order":
        heads["query"] = {name: leaf[..., ::-1, :] for name, leaf in heads["query"].items()}
    heads["out"] = {
        "kernel": state["attention.out_proj.weight"].T.reshape(4, 8, 32),
        "bias": state["attention.out_proj.bias"],
    }
    norm = {"scale": state["norm.weight"], "bias": state["norm.bias"]}
    params = {"LayerNorm_0": norm, "MultiHeadDotProductAttention_0": heads}
    a = parity.record(
        LinenAttention(fault),
        lambda module: module.apply({"params": params}, x, ~padding[:, None, None]),
    )
    b = parity.record(theirs, lambda module: module(*map(torch.from_numpy, (x, padding))))
    found, comparison = first(a, b)
    assert found == block, comparison
