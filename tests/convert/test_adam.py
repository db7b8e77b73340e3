"""Adam's moments and its step count from torch to optax and back."""

import jax
import optax
import pytest
import torch

from jax_transformer import InputError, convert
from tests.convert.tools import assert_same_params
from tests.models import random_params, small_config

CONFIG = small_config("vaswani2017", num_encoder_layers=1, num_decoder_layers=1)  # tied tables
PARAMS = random_params(CONFIG)
LAYOUT = convert.get_layout("reference")
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.constant_schedule(1e-3)))


def trained(steps, kind=torch.optim.Adam, names=None, **options):
    """Return names and a torch optimizer after steps of random gradients on these parameters."""
    torch.manual_seed(steps)
    tensors = convert.to_torch(PARAMS, CONFIG, buffers=False)
    owners = {id(tensor): name for name, tensor in reversed(tensors.items())}
    names = names or list(owners.values())
    parameters = [torch.nn.Parameter(tensors[name]) for name in names]
    optimizer = kind(parameters, lr=1e-3, **options)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return names, optimizer


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_moments_and_steps_come_and_go_home_bit_for_bit(kind):
    names, optimizer = trained(3, kind)
    there, fresh = optimizer.state_dict(), OPTIMIZER.init(PARAMS)
    state = convert.adam_from_torch(there, names, fresh, CONFIG)
    assert jax.tree.structure(state) == jax.tree.structure(fresh)
    adam = optax.tree_utils.tree_get(state, "ScaleByAdamState")
    assert (int(adam.count), adam.count.dtype) == (3, "int32")
    for ours, theirs in ((adam.mu, "exp_avg"), (adam.nu, "exp_avg_sq")):
        moments = {name: there["state"][place][theirs] for place, name in enumerate(names)}
        assert_same_params(ours, convert.from_torch(moments, CONFIG, buffers=False))
    assert int(optax.tree_utils.tree_get(state, "ScaleByScheduleState").count) == 0

    _, other = trained(1, kind)
    other.load_state_dict(convert.adam_to_torch(state, names, other.state_dict(), CONFIG))
    for one, two in zip(other.state.values(), optimizer.state.values(), strict=True):
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)
    for parameter in other.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    other.step()
    assert {entry["step"].item() for entry in other.state.values()} == {4.0}


def test_states_that_do_not_belong_together_are_refused():
    names, optimizer = trained(1)
    there, fresh = optimizer.state_dict(), OPTIMIZER.init(PARAMS)
    uneven = optimizer.state_dict()
    uneven["state"] = {0: uneven["state"][0] | {"step": torch.tensor(9.0)}, 1: uneven["state"][1]}
    twice = optax.chain(optax.scale_by_adam(), optax.scale_by_adam()).init(PARAMS)
    wrong = {
        "its steps are []": (trained(0)[1].state_dict(), names, fresh),
        "its steps are [1, 9]": (uneven, names, fresh),
        "its steps are [1]": (trained(1, amsgrad=True)[1].state_dict(), names, fresh),
        f"names has 1 names; the optimizer {len(names)} parameters": (there, names[:1], fresh),
        "state has 0 states": (there, names, optax.sgd(1.0).init(PARAMS)),
        "state has 2 states": (there, names, twice),
        "params do not fit the config": (there, names, OPTIMIZER.init(PARAMS["encoder"])),
        "unexpected      x": (there, ["x", *names[1:]], fresh),
    }
    for message, arguments in wrong.items():
        with pytest.raises(InputError) as refused:
            convert.adam_from_torch(*arguments, CONFIG)
        assert message in str(refused.value)
    with pytest.raises(InputError, match="names: 'x' is no parameter of the layout 'reference'"):
        convert.adam_to_torch(fresh, ["x", *names[1:]], there, CONFIG)
