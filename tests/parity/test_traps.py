"""Traps that are silent elsewhere: with one set, the comparison with torch must go red."""

import contextlib
import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from jax_transformer import TransformerConfig
from jax_transformer.kernels.softmax import soft_cap
from jax_transformer.model import functional
from jax_transformer.model.layers import MultiHeadAttention
from jax_transformer.model.norms import norm
from jax_transformer.training.config import TrainingConfig
from jax_transformer.training.objective import cross_entropy
from jax_transformer.training.optimizer import optimizer_by_name
from tests.models import OTHERS, random_params, small_config
from tests.parity import measure
from tests.parity.ladder import bound, check_float32, error
from tests.parity.precision import with_rounded_products
from tests.tiers import tiered_rows
from torch_reference.layers import MultiHeadAttention as TorchAttention


@pytest.fixture(scope="module")
def pair():
    with jax.default_matmul_precision("highest"):
        yield measure.make_pair(measure.trainable("pre_norm", num_decoder_layers=1), "float32")


@pytest.mark.exhaustive
def test_products_of_rounded_inputs(pair):
    (batch,) = measure.random_batches(pair.config, 1)

    def rounding(function):
        return jax.jit(with_rounded_products(function, "tensorfloat32"))  # the finest of devices

    exact, rounded = (measure.forward(pair, batch, one) for one in (jax.jit, rounding))
    print(f"logits {rounded:.1e} instead of {exact:.1e}")
    assert exact <= bound("logits", "float32") < rounded / 100
    exact, rounded = (measure.gradients(pair, batch, one) for one in (jax.jit, rounding))
    for objective in exact:
        assert measure.worst(exact[objective])[1] <= bound("gradient", "float32")
        assert measure.worst(rounded[objective])[1] > 100 * bound("gradient", "float32")
    right = measure.gradient_functions(pair, batch)["loss"]
    wrong, _ = measure.gradient_functions(pair, batch, rounding)["loss"]

    def ours(params):
        narrow = jax.tree.leaves(params)[0].dtype == jnp.float32
        return (wrong if narrow else right[0])(params)

    check_float32("exact", pair, *right, kind="gradient")
    with pytest.raises(AssertionError, match="more than rounding"):
        check_float32("rounded", pair, ours, right[1], kind="gradient")


SMALLEST = float(np.finfo(np.float32).min)
WRONG_MASKS = {
    "minus infinity": lambda scores, mask: jnp.where(mask, scores, -jnp.inf),
    "a large number": lambda scores, mask: jnp.where(mask, scores, -1e9),
    "a small number added": lambda scores, mask: scores + jnp.where(mask, 0, -1e4),
    "the smallest number added twice": lambda scores, mask: (
        scores + 2 * jnp.where(mask, 0, SMALLEST)
    ),
}


@pytest.mark.parametrize("wrong", [None, *WRONG_MASKS])
def test_queries_that_may_attend_to_nothing(wrong, monkeypatch):
    def weights(scores, mask, exponentials):
        assert exponentials == "wide"
        return jax.nn.softmax(WRONG_MASKS[wrong](scores, mask))

    config = small_config("torch_nn")
    params = random_params(config)["encoder"]["layers_0"]["self_attention"]
    if wrong:
        monkeypatch.setattr(functional, "masked_softmax", weights)
    random = np.random.default_rng(0)
    query, key, value = random.normal(size=(3, 4, 7, config.d_model)).astype(np.float32)
    mask = random.random((4, 1, 7, 7)) < 0.6
    mask[1, 0, 2] = mask[3] = False

    theirs = TorchAttention(config)
    for name, part in params.items():
        getattr(theirs, name).weight.data = torch.from_numpy(part["kernel"].T.copy())
        getattr(theirs, name).bias.data = torch.from_numpy(part["bias"])
    expected = theirs(*map(torch.from_numpy, (query, key, value, mask)))
    expected.sum().backward()

    attention = MultiHeadAttention(config)

    def attend(params, query, key, value):
        return attention.apply({"params": params}, query, key, value, jnp.asarray(mask))

    with jax.default_matmul_precision("highest"):
        actual, back = jax.vjp(attend, *jax.tree.map(jnp.asarray, (params, query, key, value)))
        gradient = back(jnp.ones_like(actual))[0]["value"]["kernel"]
    forward = error(actual, expected)
    backward = error(gradient, theirs.value.weight.grad.T)
    right = forward <= bound("block", "float32") and backward <= bound("gradient", "float32")
    assert right == (wrong is None), (forward, backward)


# Of one model, what another one computes from the same parameters.
OTHER_VALUES = [
    ("pre_norm_decoder", wrong)
    for wrong in (
        {},
        {"attention_scale": "head_dim"},
        {"attention_scale": "none"},
        {"norm": "std_norm"},
        {"norm": "layer_norm"},
        {"norm_placement": "pre"},
        {"decoder_norm_placement": None},
    )
]
OTHER_VALUES += [
    ("windows", wrong)
    for wrong in (
        {},
        {"rotary_theta": 51.0},
        {"rotary_scaling": 1.0},
        {"rotary_fraction": 0.8},
        {"sliding_window": 3},
        {"sliding_window": 5},
        {"sliding_window_pattern": 3},
        {"sliding_window_theta": None},
        {"encoder_window": "split"},
        {"attention_softcap": None},
        {"logit_softcap": 2.1},
        {"attention_scale": 7.1},
        {"norm": "rms_norm"},
    )
]
OTHER_VALUES += [("merged", wrong) for wrong in ({}, {"encoder_window": "each_side"})]


@pytest.mark.parametrize(
    ("name", "wrong"), tiered_rows(OTHER_VALUES, lambda name, wrong: not wrong or name == "merged")
)
def test_a_value_that_one_side_takes_for_another(name, wrong, x64):
    check_logits(name, wrong, bool(wrong))


def check_logits(name, changed, faulty):
    """The logits of JAX with changed fields differ from those of torch, or not without a fault."""
    right = small_config(name, num_encoder_layers=2, num_decoder_layers=1)
    pair = measure.make_pair(right, "float64")
    (batch,) = measure.random_batches(right, 1)
    pair = pair._replace(config=dataclasses.replace(right, **changed))
    measured, allowed = measure.forward(pair, batch), bound("logits", "float64")
    assert measured > 100 * allowed if faulty else measured <= allowed


def _interleaved(x, rotation):
    """Rotate column 2c with column 2c + 1."""
    half = rotation[0].shape[1]
    pairs = [*range(0, 2 * half, 2), *range(1, 2 * half, 2), *range(2 * half, x.shape[-1])]
    turned = RIGHT_ROTATE(x[..., jnp.array(pairs)], rotation)
    return turned[..., jnp.argsort(jnp.array(pairs))]


def _cap_after_the_mask(scores, mask, _):
    """Hide a score by the lowest one that a cap leaves."""
    return jax.nn.softmax(jnp.where(mask, scores, -WINDOWS["attention_softcap"]))


def _cap_before_the_divisor(scores, softcap):
    divisor = WINDOWS["attention_scale"] ** 0.5
    return soft_cap(scores * divisor, softcap) / divisor


def _other_groups(x, key_heads):
    """Give query head h the head h % G of the keys."""
    batch, heads, queries, width = x.shape
    x = x.reshape(batch, heads // key_heads, key_heads, queries, width).swapaxes(1, 2)
    return RIGHT_GROUPS(x.reshape(batch, heads, queries, width), key_heads)


WINDOWS = OTHERS["windows"]
RIGHT_ROTATE, RIGHT_GROUPS = functional.rotate, functional.join_queries
WRONG_FUNCTIONS = [
    ("rotate", _interleaved),
    ("rotate", lambda x, rotation: x),
    ("masked_softmax", _cap_after_the_mask),
    ("soft_cap", _cap_before_the_divisor),
    ("join_queries", _other_groups),
]


@pytest.mark.parametrize(("name", "wrong"), WRONG_FUNCTIONS)
def test_another_order_of_rotations_caps_and_groups(name, wrong, x64, monkeypatch):
    monkeypatch.setattr(functional, name, wrong)
    check_logits("windows", {}, faulty=True)


def _flax_epsilon(x, scale, bias, epsilon):
    return _right(x, scale, bias, 1e-6)


def _fast_variance(x, scale, bias, epsilon):
    mean = jnp.mean(x, -1, keepdims=True)
    variance = jnp.mean(x**2, -1, keepdims=True) - mean**2
    return (x - mean) / jnp.sqrt(variance + epsilon) * scale + bias


def _unbiased_variance(x, scale, bias, epsilon):
    centred = x - jnp.mean(x, -1, keepdims=True)
    variance = jnp.sum(centred**2, -1, keepdims=True) / (x.shape[-1] - 1)
    return centred / jnp.sqrt(variance + epsilon) * scale + bias


def _right(x, scale, bias, epsilon):
    return norm(x, scale, bias, epsilon, "layer_norm")


@pytest.mark.parametrize("computed", [_right, _flax_epsilon, _fast_variance, _unbiased_variance])
def test_norms_at_every_scale(computed, x64):
    random = np.random.default_rng(0)
    rows, (scale, bias) = random.normal(size=(5, 43)), random.normal(size=(2, 43))
    errors = []
    for x in (1e-3 * rows, rows, 1e3 * rows, 1e4 + rows):
        ours = computed(*map(jnp.asarray, (x, scale, bias)), epsilon=1e-5)
        theirs = torch.nn.functional.layer_norm(
            *(torch.from_numpy(x), (43,)), *map(torch.from_numpy, (scale, bias)), eps=1e-5
        )
        errors.append(error(ours, theirs))
    print(f"at scale 1e-3, 1, 1e3 and mean 1e4: {', '.join(f'{e:.0e}' for e in errors)}")
    assert (max(errors) <= 1e-11) == (computed is _right)


def _rounded_rows(x, scale, bias, epsilon):
    rounded = x.astype(jnp.bfloat16).astype(x.dtype) if x.dtype == jnp.float32 else x
    return _right(rounded, scale, bias, epsilon)


def _narrow_sum(x, scale, bias, epsilon):
    narrow = jnp.float16 if x.dtype == jnp.float32 else x.dtype
    centred = x - jnp.mean(x, -1, keepdims=True)
    variance = jnp.mean(centred**2, -1, keepdims=True, dtype=narrow).astype(x.dtype)
    return centred / jnp.sqrt(variance + epsilon) * scale + bias


def _narrow_epsilon(x, scale, bias, epsilon):
    return _right(x, scale, bias, 1e-6 if x.dtype == jnp.float32 else epsilon)


@pytest.mark.parametrize(
    ("fault", "mean", "both", "seen"),
    [
        (_right, 0, False, None),
        (_right, 100, False, None),
        (_flax_epsilon, 0, False, "in float64"),
        (_fast_variance, 100, False, "in float64"),
        (_narrow_epsilon, 0, False, "more than rounding"),
        # In both frameworks, so that they agree in float64.
        *((_right, mean, True, None) for mean in (0, 100)),
        (_fast_variance, 100, True, "more than rounding"),
        *((_rounded_rows, 0, both, "more than rounding") for both in (False, True)),
        *((_narrow_sum, 0, both, "more than rounding") for both in (False, True)),
    ],
)
def test_what_float32_loses_is_more_than_rounding(fault, mean, both, seen):
    random = np.random.default_rng(0)
    x = (mean + random.normal(size=(50, 43))).astype(np.float32)
    weight, bias = random.normal(size=(2, 43)).astype(np.float32)
    params = {"weight": weight, "bias": bias}
    module = torch.nn.LayerNorm(43)
    module.load_state_dict({name: torch.from_numpy(leaf) for name, leaf in params.items()})

    def ours(params, x):
        return fault(*map(jnp.asarray, (x, params["weight"], params["bias"])), 1e-5)

    def faulty(module, x):
        leaves = {name: leaf.detach().numpy() for name, leaf in module.named_parameters()}
        return ours(leaves, x.numpy())

    theirs = faulty if both else torch.nn.Module.__call__
    pair = SimpleNamespace(params=params, module=module)
    with pytest.raises(AssertionError, match=seen) if seen else contextlib.nullcontext():
        check_float32(fault.__name__, pair, ours, theirs, x)


def _mean_of_means(logits, targets, pad_id, smoothing):
    parts = [
        cross_entropy(logits[i : i + 1], targets[i : i + 1], pad_id, smoothing)
        for i in range(len(logits))
    ]
    return np.mean([total / count for total, count in parts])


def _padding_counted(logits, targets, pad_id, smoothing):
    return cross_entropy(logits, targets, pad_id, smoothing)[0] / targets.size


def _smoothing_of_padding(logits, targets, pad_id, smoothing):
    total, count = cross_entropy(logits, targets, pad_id, 0.0)
    log_probabilities = jax.nn.log_softmax(logits)
    return ((1 - smoothing) * total - smoothing * log_probabilities.mean(-1).sum()) / count


def _last_class_for_minus_one(logits, targets, pad_id, smoothing):
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(
        logits, np.where(targets == pad_id, -1, targets)
    )
    return losses.mean()


def _smoothing_of_the_others(logits, targets, pad_id, smoothing):
    vocabulary = logits.shape[-1]
    return _right_loss(logits, targets, pad_id, smoothing * vocabulary / (vocabulary - 1))


def _right_loss(logits, targets, pad_id, smoothing):
    total, count = cross_entropy(logits, targets, pad_id, smoothing)
    return total / count


@pytest.mark.parametrize(
    "loss",
    [
        _right_loss,
        _mean_of_means,
        _padding_counted,
        _smoothing_of_padding,
        _last_class_for_minus_one,
        _smoothing_of_the_others,
    ],
)
def test_normalization_of_the_loss(loss, x64):
    random = np.random.default_rng(0)
    logits, targets = random.normal(size=(4, 7, 11)), random.integers(1, 11, (4, 7))
    targets[-1, 1:] = 0  # nearly all the padding is on one shard
    expected = torch.nn.functional.cross_entropy(
        torch.from_numpy(logits).flatten(0, 1),
        torch.from_numpy(targets).flatten(),
        ignore_index=0,
        label_smoothing=0.1,
    )
    actual = float(loss(logits, targets.astype(np.int32), 0, 0.1))
    print(f"{loss.__name__}: {actual:.4f} instead of {expected:.4f}")
    assert (abs(actual - expected) < 1e-13) == (loss is _right_loss)


SETTINGS = TrainingConfig(warmup_steps=1, learning_rate_factor=0.03, weight_decay=0.01)
MOMENTS = {"b1": 0.9, "b2": 0.98, "eps": 1e-9}


def _rate(steps_made):
    return 0.03 * 42**-0.5 * (steps_made + 1) ** -0.5


def _matrices(params):
    return jax.tree.map(lambda leaf: leaf.ndim == 2, params)


WRONG_OPTIMIZERS = {
    "optax's weight decay": optax.adamw(_rate, **MOMENTS, mask=_matrices),
    "optax's betas": optax.adamw(_rate, eps=1e-9, weight_decay=0.01, mask=_matrices),
    "optax's epsilon": optax.adamw(_rate, b1=0.9, b2=0.98, weight_decay=0.01, mask=_matrices),
    "decay of biases and norms": optax.adamw(_rate, **MOMENTS, weight_decay=0.01),
    "decay inside the moments": optax.chain(
        optax.add_decayed_weights(0.01, _matrices), optax.adam(_rate, **MOMENTS)
    ),
    "schedule one step late": optax.adamw(
        lambda steps: _rate(jnp.maximum(steps - 1, 0)), **MOMENTS, weight_decay=0.01, mask=_matrices
    ),
}


@pytest.mark.parametrize("wrong", [None, *WRONG_OPTIMIZERS])
def test_a_hundred_steps_from_equal_gradients(wrong, x64):
    config = TransformerConfig(d_model=42, num_heads=3)
    optimizer = WRONG_OPTIMIZERS[wrong] if wrong else optimizer_by_name(config, SETTINGS)
    random = np.random.default_rng(0)
    part = "output_projection"
    params = {part: {"kernel": random.normal(size=(5, 7)), "bias": random.normal(size=7)}}
    gradients = [
        jax.tree.map(lambda x: random.normal(0, 1e-7, x.shape), params) for _ in range(100)
    ]

    theirs = {name: torch.nn.Parameter(torch.tensor(leaf)) for name, leaf in params[part].items()}
    reference = torch.optim.AdamW(
        [
            {"params": [theirs["kernel"]], "weight_decay": 0.01},
            {"params": [theirs["bias"]], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.98),
        eps=1e-9,
    )
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for steps_made, gradient in enumerate(gradients):
        for name, parameter in theirs.items():
            parameter.grad = torch.from_numpy(gradient[part][name])
        for group in reference.param_groups:
            group["lr"] = _rate(steps_made)
        reference.step()
        updates, state = update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    measured = max(error(params[part][name], theirs[name]) for name in theirs)
    print(f"{wrong or 'ours'}: {measured:.0e}")
    assert measured <= 1e-13 if wrong is None else measured > 1e-4
