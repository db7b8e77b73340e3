"""Each program's models: the checkpoint is read, the logits agree, and the weights go home."""

import jax
import numpy as np
import pytest
import torch

from jax_transformer import apply, convert, porting
from tests.convert.foreign import randomized
from tests.convert.tools import LOGIT_BOUNDS, assert_same_params, same_bits
from tests.parity.ladder import error
from tests.porting.trainers.programs import CASES, PROGRAMS
from tests.tiers import tiered

UNRECORDED = {"annotated_transformer": {"num_heads": 4}}


def ragged_ids(config):
    """Return ids of a source [3, 13] and of a target [3, 11], padded at the end."""
    random = np.random.default_rng(0)
    sides = []
    for length, size in ((13, config.src_vocab_size), (11, config.tgt_vocab_size)):
        ids = random.integers(4, size, (3, length)).astype(np.int32)
        for row in (1, 2):
            ids[row, length - 3 * row :] = config.pad_id
        sides.append(ids)
    return sides


@pytest.fixture(params=tiered(["float64", "float32"], ["float64"]))
def dtype(request):
    jax.config.update("jax_enable_x64", request.param == "float64")
    with jax.default_matmul_precision("highest"):
        yield request.param
    jax.config.update("jax_enable_x64", False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_computes_what_its_program_computes(case, dtype, tmp_path):
    trainer, settings = CASES[case]
    module = randomized(PROGRAMS[trainer](**settings)).to(getattr(torch, dtype)).eval()
    given = UNRECORDED.get(trainer, {})
    config, params, _ = porting.from_trainer(module.save(tmp_path), **given)
    src, tgt = ragged_ids(config)
    with torch.no_grad():
        theirs = module(torch.from_numpy(src).long(), torch.from_numpy(tgt).long())
    ours = jax.jit(apply, static_argnums=1)(params, config, src, tgt)
    real = tgt != config.pad_id
    found = error(np.asarray(ours)[real], theirs.numpy()[real])
    print(f"\n{case}, {dtype}: {found:.1e}")
    assert found <= LOGIT_BOUNDS[dtype]

    home = convert.to_torch(params, config, porting.get_layout(trainer))
    module.load_state_dict(home, strict=True)
    for name, parameter in module.named_parameters():
        assert same_bits(home[name], parameter.detach()), name
    assert_same_params(convert.from_torch(home, config, porting.get_layout(trainer)), params)
