"""What is read from a torch.nn.Transformer, and what is refused: values, orders, orientations."""

import dataclasses
import functools
import itertools

import jax
import pytest
import torch
from torch import nn

from jax_transformer import InputError, apply, convert
from jax_transformer.convert import ConfigMismatch
from jax_transformer.convert.layouts import torch_nn
from jax_transformer.convert.transfer import FREE_FIELDS, check_config
from tests.convert.foreign import randomized
from tests.models import random_tokens, small_config
from tests.parity.ladder import error

SMALL = {"d_model": 12, "nhead": 2, "dim_feedforward": 7}
SMALL |= {"num_encoder_layers": 1, "num_decoder_layers": 1}
GELU_TANH = functools.partial(nn.functional.gelu, approximate="tanh")
SEEN = 1e-3  # a wrong weight must show at least this much in the output
ORDERS = [order for order in itertools.permutations(range(3)) if order != (0, 1, 2)]


@pytest.fixture(scope="module")
def probe():
    """Return a torch module's config, its state_dict, and how far off another state_dict is."""
    config = small_config("torch_nn", num_encoder_layers=1, num_decoder_layers=1)
    module = randomized(convert.torch_nn_module(config))
    src, tgt = random_tokens(config)
    hidden = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1])
    with torch.no_grad():
        theirs = module(torch.from_numpy(src), torch.from_numpy(tgt), tgt_mask=hidden)
    run = jax.jit(apply, static_argnums=1)

    def distance(state_dict):
        params = convert.from_torch(state_dict, config, "torch_nn")
        with jax.default_matmul_precision("highest"):
            return error(run(params, config, src, tgt), theirs)

    assert distance(module.state_dict()) <= 1e-5
    return config, module.state_dict(), distance


def test_each_transposed_square_weight_shows(probe):
    config, state_dict, distance = probe
    distances = []
    for name, tensor in state_dict.items():
        if tensor.dim() != 2 or "linear" in name:
            continue
        for block in range(len(tensor) // config.d_model):
            rows = slice(block * config.d_model, (block + 1) * config.d_model)
            wrong = tensor.clone()
            wrong[rows] = tensor[rows].T
            distances.append(distance(state_dict | {name: wrong}))
    assert len(distances) == 3 * 4
    assert min(distances) > SEEN


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_each_wrong_order_of_query_key_and_value_shows(probe, kind):
    _, state_dict, distance = probe
    for attention in ("encoder.layers.0.self_attn", "decoder.layers.0.multihead_attn"):
        name = f"{attention}.in_proj_{kind}"
        parts = state_dict[name].chunk(3)
        for order in ORDERS:
            wrong = torch.cat([parts[index] for index in order])
            assert distance(state_dict | {name: wrong}) > SEEN


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        ({"nhead": 3}, "num_heads", 3),
        ({"d_model": 14}, "d_model", 14),
        ({"dim_feedforward": 11}, "d_ff", 11),
        ({"num_encoder_layers": 2}, "num_encoder_layers", 2),
        ({"num_decoder_layers": 2}, "num_decoder_layers", 2),
        ({"dropout": 0.25}, "dropout", 0.25),
        ({"activation": "gelu"}, "activation", "gelu"),
        ({"activation": GELU_TANH}, "activation", "gelu_tanh"),
        ({"activation": nn.functional.silu}, "activation", "silu"),
        ({"layer_norm_eps": 1e-3}, "norm_epsilon", 1e-3),
        ({"norm_first": True}, "norm_placement", "pre"),
        ({"bias": False}, "norm_bias", False),
    ],
)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_every_argument_is_read_and_a_config_that_differs_is_refused(arguments, field, value):
    module = nn.Transformer(**SMALL | arguments)
    config = convert.torch_nn_config(module)
    assert getattr(config, field) == value
    other = convert.torch_nn_config(nn.Transformer(**SMALL))
    state_dict = module.state_dict()
    convert.from_torch(state_dict, config, "torch_nn", metadata=config.to_dict())
    if field not in FREE_FIELDS:
        with pytest.raises(ConfigMismatch, match=rf"{field}=.* \(saved: {value!r}\)"):
            convert.from_torch(state_dict, other, "torch_nn", metadata=config.to_dict())


def test_module_and_config_are_each_others_inverse():
    fields = ("qkv_bias", "attention_output_bias", "feed_forward_bias", "norm_bias")
    final_norms = itertools.cycle(itertools.product((True, False), repeat=2))
    for placement, decoder, activation, bias in itertools.product(
        ("pre", "post"), (None, "pre", "post"), ("relu", "gelu", "gelu_tanh", "silu"), (True, False)
    ):
        norms = next(final_norms)
        config = small_config(
            "torch_nn",
            final_norm=norms[0],
            decoder_final_norm=norms[1],
            norm_placement=placement,
            decoder_norm_placement=decoder,
            activation=activation,
            **dict.fromkeys(fields, bias),
        )
        module = convert.torch_nn_module(config)
        assert (module.encoder.norm is not None, module.decoder.norm is not None) == norms
        read = convert.torch_nn_config(module)
        assert read.decoder_final_norm == (None if norms[0] == norms[1] else norms[1])
        assert read.decoder_norm_placement == (None if decoder == placement else decoder)
        check_config(config, read.explicit() | {"src_vocab_size": 37, "tgt_vocab_size": 41})


def test_a_config_that_torch_has_no_module_for_is_refused():
    others = {"positions": "sinusoidal", "norm": "std_norm", "norm_bias": False}
    for field, value in (others | {"memory_norm": True, "head_projection": "shared"}).items():
        with pytest.raises(InputError, match=f"{field}={value!r}, but torch.nn.Transformer has"):
            convert.torch_nn_module(small_config("torch_nn", **{field: value}))


class OwnLayer(nn.TransformerEncoderLayer):
    """A subclass, whose forward could do anything."""


LAYER = "decoder.layers.1"


@pytest.mark.parametrize(
    ("part", "name", "value", "message"),
    [
        (f"{LAYER}.self_attn", "num_heads", 3, "self_attn: num_heads=3, but 2 elsewhere"),
        ("encoder.norm", "eps", 1e-3, r"norm_epsilon=1e-05, but 0.001 elsewhere"),
        (f"{LAYER}.dropout3", "p", 0.5, r"1.dropout3: dropout=0.5, but 0.1 elsewhere"),
        (LAYER, "activation", nn.functional.gelu, r"activation='gelu', but 'relu' elsewhere"),
        (LAYER, "activation", torch.tanh, r"activation=.*tanh.* must be relu, gelu or silu"),
        ("encoder.layers.0", "norm1", nn.RMSNorm(12), r"norm1: this RMSNorm has no counterpart"),
        (f"{LAYER}.self_attn", "add_zero_attn", True, "this MultiheadAttention has no counterpart"),
        ("encoder.layers", "0", OwnLayer(12, 2, 7), r"layers.0 is a OwnLayer, not a Transformer"),
    ],
)
def test_what_the_model_cannot_honour_is_refused(part, name, value, message):
    module = nn.Transformer(**SMALL | {"num_decoder_layers": 2, "batch_first": True})
    setattr(module.get_submodule(part), name, value)
    with pytest.raises(InputError, match=message):
        convert.torch_nn_config(module)


def test_an_activation_module_that_torch_drops_in_the_decoder_is_seen():
    """Copies of a torch.nn.TransformerDecoderLayer forget a module and use ReLU."""
    module = nn.Transformer(**SMALL, activation=nn.GELU(), batch_first=True)
    with pytest.raises(InputError, match="activation='relu', but 'gelu' elsewhere"):
        convert.torch_nn_config(module)


def test_activation_modules_are_read():
    modules = {
        "relu": nn.ReLU(),
        "silu": nn.SiLU(),
        "gelu": nn.GELU(),
        "gelu_tanh": nn.GELU("tanh"),
    }
    for name, activation in modules.items():
        layer = nn.TransformerEncoderLayer(12, 2, 7, activation=activation, batch_first=True)
        module = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        assert convert.torch_nn_config(module).activation == name


def test_a_module_that_holds_a_transformer_is_refused_with_the_part_to_pass():
    holder = nn.ModuleDict({"table": nn.Embedding(5, 12)})
    holder["body"] = nn.ModuleDict({"inner": nn.Transformer(**SMALL, batch_first=True)})
    with pytest.raises(InputError) as refused:
        convert.torch_nn_config(holder)
    assert str(refused.value) == (
        "ModuleDict is no torch.nn.Transformer or stack of one, but holds one: pass "
        "module.body.inner, and for its weights the layout "
        'torch_nn.transformer(prefix="body.inner.") of jax_transformer.convert.layouts'
    )
    # What the message says works.
    config = convert.torch_nn_config(holder["body"].inner)
    layout = torch_nn.transformer(prefix="body.inner.")
    tensors = {name: t for name, t in holder.state_dict().items() if name.startswith("body")}
    convert.from_torch(tensors, config, layout)
    for other in (nn.Linear(2, 3), "transformer"):
        with pytest.raises(InputError, match=f"{type(other).__name__} is no torch"):
            convert.torch_nn_config(other)
    stack = nn.ModuleDict({"enc": holder["body"].inner.encoder})
    with pytest.raises(InputError, match=r"but holds a stack: pass module\.enc$"):
        convert.torch_nn_config(stack)


def test_every_field_that_shapes_cannot_tell_is_compared():
    config = small_config("pre_norm")
    others = {
        "num_heads": 6,
        "norm_epsilon": 1e-3,
        "activation": "gelu",
        "norm_placement": "post",
        "norm": "layer_norm",
        "embedding_scale": "none",
        "positions": "sinusoidal_halves",
        "decoder_attention": "self_over_memory",
        "pad_id": 3,
        "bos_id": 5,
        "eos_id": 4,
    }
    for field, value in others.items():
        with pytest.raises(ConfigMismatch, match=f"{field}="):
            check_config(config, config.to_dict() | {field: value})
    check_config(config, config.to_dict())
    check_config(config, config.explicit())
    with pytest.raises(ConfigMismatch, match=r"decoder_final_norm=None \(saved: False\)"):
        check_config(config, config.to_dict() | {"decoder_final_norm": False})
    check_config(dataclasses.replace(config, dropout=0.5, max_length=99), config.to_dict())
    with pytest.raises(ConfigMismatch, match=r"num_heads=3 \(saved: 6\); norm_epsilon="):
        check_config(config, others)
    with pytest.raises(ConfigMismatch, match=r"rotary='no such field' \(saved: True\)"):
        check_config(config, {"rotary": True})
