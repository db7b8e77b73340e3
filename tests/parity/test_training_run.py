"""Three hundred steps on the embedded task: the same loss at every step, the same translations."""

import jax
import numpy as np
import pytest

from jax_transformer.training.config import TrainingConfig
from tests.models import one_layer
from tests.parity.training_run import run

MODERN = {"d_ff": 44, "num_kv_heads": 1}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("preset", "fields"), [("vaswani2017", {}), ("modern", MODERN)])
def test_loss_at_every_step_and_translations_at_the_end(preset, fields, x64):
    sizes = {"vocab_size": 60, "d_model": 32, "num_heads": 2, "d_ff": 64, "max_length": 64}
    config = one_layer(preset, **sizes | fields, dropout=0.0)
    settings = TrainingConfig(
        steps=300, warmup_steps=60, learning_rate_factor=0.25, max_tokens=400, bucket_count=1
    )
    result = run(config, settings, held_out=40, jit=jax.jit)
    ours, theirs = result.trained.our_losses, result.trained.their_losses
    difference = np.abs(ours - theirs).max()
    print(f"loss {ours[0]:.2f} to {ours[-1]:.2f}, the curves at most {difference:.1e} apart")
    assert difference <= 1e-12
    assert ours[-1] < ours[0] / 2
    assert result.our_translations == result.their_translations
    assert len(set(result.our_translations)) > 20
