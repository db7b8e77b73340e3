"""Word-level distillation: the loss and the step are those of the reference in torch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from jax_transformer import convert, make_train_step
from jax_transformer.runtime.sharding import make_mesh
from jax_transformer.training.config import TrainingConfig
from jax_transformer.training.distillation import Teacher, distillation_loss
from jax_transformer.training.step import init_state, sharded_init_state, sharded_train_step
from tests.models import random_params, small_config
from tests.parity.measure import make_pair, random_batches
from tests.training.steps import run_step
from torch_reference import training

PAD = 3
# A student of one decoder layer beside a teacher of three, of another width.
STUDENT = small_config("vaswani2017", num_encoder_layers=1, num_decoder_layers=1)
WIDE = small_config("pre_norm", d_model=48, src_vocab_size=41)
SETTINGS = TrainingConfig(warmup_steps=2, clip_norm=1.0, num_microbatches=2)


def example(seed=0):
    generator = np.random.default_rng(seed)
    logits, teacher_logits = 5 * generator.standard_normal((2, 3, 7, 11))
    targets = generator.integers(0, 11, (3, 7)).astype(np.int32)
    targets[1, 4:] = PAD
    return logits, teacher_logits, targets


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_sum_count_and_gradient_are_torchs(x64, temperature):
    logits, teacher_logits, targets = example()
    theirs = torch.tensor(logits, requires_grad=True)
    others = torch.tensor(teacher_logits), torch.tensor(targets)
    expected, expected_count = training.distillation_loss(theirs, *others, PAD, temperature)
    expected.backward()

    differentiate = jax.value_and_grad(distillation_loss, has_aux=True)
    (total, count), gradient = differentiate(
        jnp.asarray(logits), teacher_logits, targets, PAD, temperature
    )
    assert abs(total - expected.item()) < 1e-13 * expected.item()
    assert int(count) == int(expected_count) == (targets != PAD).sum()
    np.testing.assert_allclose(gradient, theirs.grad, atol=1e-14)
    # And torch's own cross-entropy against probabilities, which the reference does not call.
    shares = (others[0] / temperature).softmax(-1)
    counted = others[1] != PAD
    own = torch.nn.functional.cross_entropy(
        theirs[counted] / temperature, shares[counted], reduction="sum"
    )
    assert abs(total - temperature**2 * own.item()) < 1e-13 * expected.item()


def test_words_that_the_teacher_never_says_add_nothing(x64):
    logits, teacher_logits, targets = example()
    banned = np.arange(11) % 4 == 3
    both = [np.where(banned, -np.inf, array) for array in (logits, teacher_logits)]
    kept = [array[..., ~banned] for array in (logits, teacher_logits)]
    differentiate = jax.value_and_grad(distillation_loss, has_aux=True)
    (total, _), gradient = differentiate(*both, targets, PAD)
    (expected, _), expected_gradient = differentiate(*kept, targets, PAD)
    np.testing.assert_allclose(total, expected, rtol=1e-14)
    np.testing.assert_allclose(gradient[..., ~banned], expected_gradient, atol=1e-14)
    assert not np.any(gradient[..., banned])
    theirs = training.distillation_loss(*map(torch.tensor, both), torch.tensor(targets), PAD)
    np.testing.assert_allclose(theirs[0], expected, rtol=1e-14)


@pytest.mark.exhaustive
def test_steps_are_those_of_torch_with_the_same_teacher(x64):
    pair, teaching = (
        make_pair(config, "float64", seed) for seed, config in enumerate((STUDENT, WIDE))
    )
    teacher = Teacher(teaching.params, WIDE, weight=0.7, temperature=2.0)
    optimizer = training.adam(pair.module, SETTINGS)
    state = init_state(STUDENT, SETTINGS, jax.tree.map(jnp.array, pair.params))
    for steps_made, batch in enumerate(random_batches(STUDENT, 3)):
        tensors = tuple(map(torch.from_numpy, batch[:3]))
        expected = training.train_step(
            pair.module, optimizer, steps_made, tensors, SETTINGS, teaching.module, 0.7, 2.0
        )
        state, metrics = run_step(STUDENT, SETTINGS)(state, batch, teacher)
        assert abs(metrics.loss - expected) < 1e-12
    after = convert.from_torch(pair.module.state_dict(), STUDENT)
    for (path, ours), theirs in zip(
        jax.tree.leaves_with_path(state.params), jax.tree.leaves(after), strict=True
    ):
        if "key" not in jax.tree_util.keystr(path):  # the noise of a gradient that is 0
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12, err_msg=str(path))


@pytest.mark.exhaustive
def test_a_student_that_is_its_teacher_has_nothing_to_learn():
    params = random_params(WIDE)
    (batch,) = random_batches(WIDE, 1)
    step = jax.jit(make_train_step(WIDE, optax.sgd(1.0)))

    def change(*teacher):
        after, _, _ = step(params, optax.sgd(1.0).init(params), batch, None, *teacher)
        pairs = zip(*map(jax.tree.leaves, (after, params)), strict=True)
        return max(float(np.abs(new - old).max()) for new, old in pairs)

    assert change(Teacher(params, WIDE, weight=1.0)) < 1e-6
    assert change(Teacher(random_params(WIDE, 1), WIDE, weight=1.0)) > 0.01
    assert change() > 0.01


@pytest.mark.exhaustive
def test_a_run_s_step_takes_the_teacher_as_an_argument():
    teacher, mesh = Teacher(random_params(WIDE, 5), WIDE), make_mesh()
    (batch,) = random_batches(STUDENT, 1)
    placed = jax.device_put(teacher, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    state = sharded_init_state(mesh, STUDENT, SETTINGS)
    _, expected = run_step(STUDENT, SETTINGS)(init_state(STUDENT, SETTINGS), batch)
    _, taught = sharded_train_step(mesh, STUDENT, SETTINGS, placed)(state, batch, placed)
    # The mean of both losses; the program has no copy of the teacher.
    alone = dataclasses.replace(placed, weight=1.0)
    state = sharded_init_state(mesh, STUDENT, SETTINGS)
    _, of_teacher = sharded_train_step(mesh, STUDENT, SETTINGS, alone)(state, batch, alone)
    assert taught.loss == pytest.approx(float(expected.loss + of_teacher.loss) / 2, rel=1e-5)
    assert taught.loss != of_teacher.loss
