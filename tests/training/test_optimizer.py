"""The schedule of section 5.3 against its formula; Adam, decay and clipping against torch's."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax.traverse_util import flatten_dict, unflatten_dict

from jax_transformer import TransformerConfig
from jax_transformer.model.tree import decayed, parameter_shapes
from jax_transformer.training.config import TrainingConfig
from jax_transformer.training.optimizer import (
    SPIKE_WINDOW,
    clip_by_global_norm,
    learning_rate_schedule,
    optimizer_by_name,
    with_guard,
)
from tests.models import small_config

CONFIG = TransformerConfig(d_model=8, num_heads=1)


def rates(at, **settings):
    """Return the learning rates at steps counted from 1."""
    config = TransformerConfig(d_model=512, num_heads=1)
    schedule = learning_rate_schedule(config, TrainingConfig(**settings))
    return [float(schedule(step - 1)) for step in at]


def test_the_learning_rate_of_noam_is_the_papers():
    steps = [1, 2, 399, 400, 401, 100_000]
    expected = [0.5 * 512**-0.5 * min(step**-0.5, step * 400**-1.5) for step in steps]
    found = rates(steps, schedule="noam", warmup_steps=400, learning_rate_factor=0.5)
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.25, 0.75, 1, 1, 1, 1, 1]),
        ("inverse_square_root", [0.25, 0.75, 1, 0.8**0.5, 0.5**0.5, 1 / 3**0.5, 0.2]),
        ("t5", [1, 1, 1, 0.8**0.5, 0.5**0.5, 1 / 3**0.5, 0.2]),
        ("cosine", [0.25, 0.75, 1, (1 + np.cos(np.pi / 8)) / 2, 0.5, 0, 0]),
    ],
)
def test_every_other_schedule_begins_at_its_peak(schedule, expected):
    settings = {"schedule": schedule, "learning_rate": 0.02, "warmup_steps": 4, "steps": 12}
    found = rates([1, 3, 4, 5, 8, 12, 100], **settings)
    assert found == pytest.approx([0.02 * share for share in expected], rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("schedule", ["constant", "inverse_square_root", "noam"])
def test_a_cooldown_leaves_the_steps_before_it_and_ends_at_zero(schedule):
    settings = {"schedule": schedule, "warmup_steps": 2, "steps": 12}
    at = [1, 5, 8, 9, 10, 12, 13, 100]
    without, found = rates(at, **settings), rates(at, **settings, cooldown_steps=4)
    shares = [1, 1, 1, 1, 3 / 4, 1 / 4, 0, 0]
    expected = [rate * share for rate, share in zip(without, shares, strict=True)]
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-12)


def drawn_tree(seed):
    random = np.random.default_rng(seed)
    shapes = {"token_embedding": {"embedding": (9, 4)}, "output_projection": {"kernel": (4, 9)}}
    layer = {"feed_forward": {"inner": {"kernel": (4, 6)}}}
    shapes["encoder"] = {"norm": {"scale": (4,)}, "layers_0": layer}
    draw = lambda shape: jnp.asarray(random.standard_normal(shape))  # noqa: E731
    return jax.tree.map(draw, shapes, is_leaf=lambda shape: isinstance(shape, tuple))


def moved_by(optimizer, steps, **extra):
    params = drawn_tree(0)
    state = optimizer.init(params)
    for step in range(1, steps + 1):
        updates, state = optimizer.update(drawn_tree(step), state, params, **extra)
        params = optax.apply_updates(params, updates)
    return params, state


def test_adafactor_is_that_of_optax(x64):
    named = {"schedule": "t5", "learning_rate": 0.02, "warmup_steps": 2, "optimizer": "adafactor"}
    ours = moved_by(optimizer_by_name(CONFIG, TrainingConfig(**named)), 5)[0]
    rate = lambda made: 0.02 * jnp.minimum(1, jnp.sqrt(2 / (jnp.asarray(made, float) + 1)))  # noqa: E731
    theirs = moved_by(optax.adafactor(rate), 5)[0]
    assert jax.tree.all(jax.tree.map(lambda a, b: np.allclose(a, b, 1e-12, 0), ours, theirs))


def test_muon_makes_updates_of_kernels_orthogonal_and_leaves_tables_to_adam(x64):
    named = {"schedule": "constant", "learning_rate": 0.1, "warmup_steps": 1, "optimizer": "muon"}
    optimizer = optimizer_by_name(CONFIG, TrainingConfig(**named))
    params = drawn_tree(0)
    updates, _ = optimizer.update(drawn_tree(1), optimizer.init(params), params)
    kernel = updates["encoder"]["layers_0"]["feed_forward"]["inner"]["kernel"]
    values = np.linalg.svd(kernel, compute_uv=False) / (0.1 * (6 / 4) ** 0.5)  # of 4 by 6
    assert 0.5 < values.min() <= values.max() < 1.3
    for name in (("token_embedding", "embedding"), ("output_projection", "kernel")):
        first_of_nadam = 0.1 * (0.9 * 0.1 / (1 - 0.9**2) + 1)
        np.testing.assert_allclose(np.abs(updates[name[0]][name[1]]), first_of_nadam, rtol=1e-4)


@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_a_rejected_step_changes_no_state_of_another_optimizer(name):
    optimizer = with_guard(optimizer_by_name(CONFIG, TrainingConfig(optimizer=name)))
    before = moved_by(optimizer, 2, value=jnp.array(1.0))
    params, state = before
    bad = jax.tree.map(lambda leaf: leaf * jnp.nan, drawn_tree(3))
    updates, after = optimizer.update(bad, state, params, value=jnp.array(jnp.nan))
    assert jax.tree.all(jax.tree.map(np.array_equal, after.inner, state.inner))
    assert jax.tree.all(jax.tree.map(lambda leaf: not leaf.any(), updates))


@pytest.mark.parametrize(("clip_norm", "decay"), [(None, 0.0), (0.5, 0.25)])
def test_updates_are_those_of_torchs_adam(x64, clip_norm, decay):
    """The gradient is clipped before; a kernel decays by the learning rate, a bias does not."""
    settings = {"warmup_steps": 3, "learning_rate_factor": 0.7, "adam_epsilon": 1e-4}
    settings |= {"adam_beta1": 0.8, "adam_beta2": 0.95}
    settings = TrainingConfig(**settings, clip_norm=clip_norm, weight_decay=decay)
    optimizer = optimizer_by_name(CONFIG, settings)
    random = np.random.default_rng(0)
    sizes = [1e-4, 10, 1e-3, 1, 0.1, 3, 1e-2]  # some of which are clipped
    start = [random.standard_normal(shape) for shape in (5, (5, 1))]

    def tree(bias, kernel):
        return {"output_projection": {"bias": bias, "kernel": kernel}}

    theirs = [torch.nn.Parameter(torch.tensor(leaf)) for leaf in start]
    decays = zip(theirs, (0, decay), strict=True)
    groups = [{"params": [leaf], "weight_decay": its_decay} for leaf, its_decay in decays]
    reference = torch.optim.AdamW(groups, lr=1.0, betas=(0.8, 0.95), eps=1e-4)
    params, update = tree(*start), jax.jit(optimizer.update)
    state = optimizer.init(params)
    for step, size in enumerate(sizes, start=1):
        gradients = [size * random.standard_normal(leaf.shape) for leaf in start]
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = torch.tensor(gradient)
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(theirs, clip_norm)
        for group in reference.param_groups:
            group["lr"] = 0.7 * 8**-0.5 * min(step**-0.5, step * 3**-1.5)
        reference.step()
        updates, state = update(tree(*gradients), state, params)
        params = optax.apply_updates(params, updates)
    for ours, parameter in zip(jax.tree.leaves(params), theirs, strict=True):
        np.testing.assert_allclose(ours, parameter.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("norm", [0, 1e-12, 0.999999, 1, 1.000001, 1e6, 1e18])
def test_clipping_is_torchs(norm):
    direction = np.random.default_rng(0).standard_normal(15).astype(np.float32)
    gradient = np.float32(norm) * direction / np.linalg.norm(direction)
    theirs = [torch.nn.Parameter(torch.zeros(6)), torch.nn.Parameter(torch.zeros(9))]
    theirs[0].grad, theirs[1].grad = torch.from_numpy(gradient.copy()).split([6, 9])
    torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    ours = {"kernel": jnp.asarray(gradient[:6]), "bias": jnp.asarray(gradient[6:])}
    ours, _ = clip_by_global_norm(1.0).update(ours, clip_by_global_norm(1.0).init(ours))
    for one, other in zip((ours["kernel"], ours["bias"]), theirs, strict=True):
        np.testing.assert_allclose(one, other.grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", TransformerConfig.presets())
def test_tables_decay_as_kernels_do_and_nothing_else(name):
    shapes = parameter_shapes(small_config(name))
    tree = unflatten_dict(dict.fromkeys(shapes, 0), sep="/")
    found = flatten_dict(decayed(tree), sep="/")
    assert found == {path: len(shape) == 2 for path, shape in shapes.items()}


NOT_FINITE = {
    "NaN loss": (np.nan, 1.0),
    "NaN gradient": (1.0, np.nan),
    "infinite gradient": (1.0, np.inf),
    "infinite square": (1.0, 1e30),
}


def bits(tree):
    return [leaf.tobytes() for leaf in jax.tree.leaves(jax.device_get(tree))]


def guarded_run(losses_and_gradients):
    """Return what a guarded Adam has made of a parameter, and which steps changed nothing."""
    settings = TrainingConfig(warmup_steps=400, clip_norm=1.0)
    optimizer = with_guard(optimizer_by_name(CONFIG, settings), 5.0)
    params = {"kernel": jnp.array([0.0, -0.0, 1.0], jnp.float32)}
    state, kept = optimizer.init(params), []
    update = jax.jit(optimizer.update)
    for loss, gradient in losses_and_gradients:
        gradients = {"kernel": jnp.array([0.1, 0.1, gradient], jnp.float32)}
        updates, new_state = update(gradients, state, params, value=jnp.float32(loss))
        new = optax.apply_updates(params, updates)
        kept.append(bits((new, new_state.inner)) == bits((params, state.inner)))
        assert kept[-1] == bool(~new_state.finite | new_state.spike)
        params, state = new, new_state
    return jax.device_get(params["kernel"]), kept, state


@pytest.mark.parametrize("bad", NOT_FINITE)
def test_a_step_that_is_not_finite_changes_no_bit_and_the_next_one_is_made(bad):
    good, evil = [(2.0, 0.5), (1.0, -0.3), (3.0, 0.2)], NOT_FINITE[bad]
    expected, kept, clean = guarded_run(good)
    assert not any(kept)
    mixed = [evil, good[0], *[evil] * 3, good[1], *[evil] * 11, good[2]]
    found, kept, state = guarded_run(mixed)
    assert kept == [step is evil for step in mixed]
    assert found.tobytes() == expected.tobytes()
    # A loss that is not finite is none of the recent ones.
    np.testing.assert_array_equal(state.recent_losses, clean.recent_losses)


def test_a_spike_is_left_out_and_a_shift_accepted():
    good, high = (1.0, 0.1), (50.0, 0.1)
    early = guarded_run([good, high, good])[1]  # nothing to measure by yet
    assert not any(early)
    once = guarded_run([*[good] * SPIKE_WINDOW, high, good, good])[1]
    assert [number for number, is_kept in enumerate(once) if is_kept] == [SPIKE_WINDOW]
    shifted = guarded_run([*[good] * SPIKE_WINDOW, *[high] * SPIKE_WINDOW])[1]
    assert sum(shifted) == SPIKE_WINDOW // 2  # then the median has moved
    assert not any(shifted[-SPIKE_WINDOW // 2 :])
