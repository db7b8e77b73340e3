"""torch.nn.Transformer, whole, in parts and inside a module: names, bits, outputs, gradients."""

import copy
import dataclasses
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn

from jax_transformer import TransformerConfig, convert, decode, encode
from jax_transformer.convert.layouts import torch_nn
from jax_transformer.kernels.segments import causal_mask
from jax_transformer.model.layers import MultiHeadAttention
from tests.convert.foreign import randomized
from tests.convert.tools import (
    LOGIT_BOUNDS,
    assert_same_params,
    assert_same_tensors,
    gradient_error,
)
from tests.parity.ladder import check_errors, error, moved, widen
from tests.tiers import tiered_rows

GRADIENT_BOUND = 1e-10  # in float64
ADAM_BOUNDS = {"float64": 1e-9, "float32": 1e-5}
MASKS = (
    "none",
    "causal",
    "causal, float",
    "causal, with the hint",
    "source padding",
    "target padding",
    "random",
    "random, float, padding",
    "a mask for each head",
    "causal, padding everywhere",
)
BATCH = 3


@dataclasses.dataclass
class Site:
    """The masks of one attention, True = attend: `seen` [.., T, S] and `kept` [B, S], or None."""

    seen: np.ndarray | None = None
    kept: np.ndarray | None = None

    def ours(self, shape):
        mask = np.ones((1, 1, *shape), bool)
        if self.seen is not None:
            mask = mask & (self.seen if self.seen.ndim == 4 else self.seen[None, None])
        return mask if self.kept is None else mask & self.kept[:, None, None, :]

    def theirs(self, name, heads, floating, dtype):
        arguments = {}
        if self.seen is not None:
            seen = self.seen.reshape(-1, *self.seen.shape[2:]) if self.seen.ndim == 4 else self.seen
            arguments[f"{name}_mask"] = blocked(seen, floating, dtype)
        if self.kept is not None:
            arguments[f"{name}_key_padding_mask"] = blocked(self.kept, floating, dtype)
        return arguments


def blocked(mask, floating, dtype):
    """Return a mask as torch.nn.Transformer wants it: True or -inf where blocked."""
    if not floating:
        return torch.from_numpy(~mask)
    return torch.from_numpy(np.where(mask, 0, -np.inf).astype(dtype))


def draw_masks(kind, random, heads, source, target):
    """Return the sites src, tgt and memory; every query sees the first key at least."""

    def kept(length):
        lengths = random.integers(1, length, BATCH)
        lengths[0] = length
        return np.arange(length) < lengths[:, None]

    def seen(*shape):
        mask = random.random(shape) < 0.6
        mask[..., 0] = True
        return mask

    src, tgt, memory = Site(), Site(), Site()
    if "causal" in kind:
        tgt.seen = np.tril(np.ones((target, target), bool))
    if "random" in kind:
        src.seen, tgt.seen = seen(source, source), seen(target, target)
        memory.seen = seen(target, source)
    if "head" in kind:
        src.seen = seen(BATCH, heads, source, source)
        tgt.seen = seen(BATCH, heads, target, target)
        memory.seen = seen(BATCH, heads, target, source)
    if "padding" in kind and "target" not in kind:
        src.kept = memory.kept = kept(source)
    if "padding" in kind and "source" not in kind:
        tgt.kept = kept(target)
    return src, tgt, memory


def draw_configurations():
    """Yield twice every mask and choice of placement, activation and bias, in sizes of primes."""
    random = np.random.default_rng(20)
    options = itertools.cycle(itertools.product(("post", "pre"), ("relu", "gelu"), (True, False)))
    for number in range(20):
        placement, activation, bias = next(options)
        # Wide enough for norms that do not magnify rounding.
        heads, head_dim = random.choice([(1, 13), (2, 7), (2, 11), (3, 5), (3, 7), (5, 3)]).tolist()
        config = TransformerConfig.preset(
            "torch_nn",
            d_model=heads * head_dim,
            num_heads=heads,
            d_ff=int(random.choice([13, 17, 23])),
            num_encoder_layers=1 + (number % 7 == 0),
            num_decoder_layers=1 + (number % 6 == 0),
            norm_placement=placement,
            decoder_norm_placement=(None, "pre", "post")[number % 3],
            norm_epsilon=float(random.choice([1e-5, 1e-6, 1e-3])),
            activation=activation,
            dropout=0.0,
            **dict.fromkeys(
                ("qkv_bias", "attention_output_bias", "feed_forward_bias", "norm_bias"), bias
            ),
        )
        source, target = (int(length) for length in random.choice([3, 5, 7, 9, 11], 2))
        yield config, source, target, MASKS[number % len(MASKS)]


CONFIGURATIONS = list(draw_configurations())
DTYPES = ["float64"] * 10 + ["float32"] * 10  # every mask and every choice in both


@pytest.mark.parametrize(
    ("number", "dtype"),
    tiered_rows(
        enumerate(DTYPES), lambda number, _: number in (1, 10), lambda _, dtype: dtype == "float64"
    ),
    indirect=["dtype"],
)
def test_random_configurations_agree_in_both_directions(number, dtype):
    config, source, target, kind = CONFIGURATIONS[number]
    random = np.random.default_rng(number)
    src = random.normal(size=(BATCH, source, config.d_model)).astype(dtype)
    tgt = random.normal(size=(BATCH, target, config.d_model)).astype(dtype)
    sites = draw_masks(kind, random, config.num_heads, source, target)
    shapes = ((source, source), (target, target), (target, source))
    src_mask, tgt_mask, memory_mask = (
        site.ours(shape) for site, shape in zip(sites, shapes, strict=True)
    )
    valid = np.ones((BATCH, target), bool) if sites[1].kept is None else sites[1].kept
    weights = random.normal(size=tgt.shape).astype(dtype) * valid[..., None]
    masks = {}
    for name, site in zip(("src", "tgt", "memory"), sites, strict=True):
        masks |= site.theirs(name, config.num_heads, "float" in kind, dtype)
    if "hint" in kind:
        masks["tgt_is_causal"] = True

    def objective(params):
        vectors = (x.astype(jax.tree.leaves(params)[0].dtype) for x in (src, tgt))
        memory = encode(params, config, next(vectors), src_mask)
        hidden = decode(params, config, next(vectors), memory, tgt_mask, memory_mask)
        return (hidden * weights).sum(), hidden

    run = jax.jit(jax.grad(objective, has_aux=True))

    def call(module):
        kind = next(module.parameters()).dtype
        vectors = (torch.from_numpy(x).to(kind) for x in (src, tgt))
        typed = {
            name: mask.to(kind) if torch.is_tensor(mask) and mask.is_floating_point() else mask
            for name, mask in masks.items()
        }
        hidden = module(*vectors, **typed)
        if hidden.requires_grad:
            (hidden * torch.from_numpy(weights)).sum().backward()
        return hidden

    # From torch: a module in training mode, its output and its gradients.
    module = randomized(convert.torch_nn_module(config), number).to(getattr(torch, dtype))
    params = convert.from_torch(module.state_dict(), config, "torch_nn")
    gradients, ours = run(params)
    wide_module = copy.deepcopy(module).double()
    theirs = call(module).detach()
    forward = error(np.asarray(ours)[valid], theirs.numpy()[valid])
    named = {name: parameter.grad for name, parameter in module.named_parameters()}
    written = convert.to_torch(gradients, config, "torch_nn")
    backward = max(gradient_error(written[name], named[name]) for name in named)
    read = convert.from_torch(named, config, "torch_nn")
    assert_same_tensors(convert.to_torch(read, config, "torch_nn"), named)
    if dtype == "float32":
        call(wide_module)
        with jax.enable_x64(True):
            wide = widen(params)
            leaves = {name: leaf.grad for name, leaf in wide_module.named_parameters()}
            exact = run(wide)[0], convert.from_torch(leaves, config, "torch_nn")
            near = [run(numbers)[0] for numbers in moved(wide)]
        check_errors(f"configuration {number}", (gradients, read), exact, near, kind="gradient")
    else:
        assert backward <= GRADIENT_BOUND

    ours, theirs = after_adam(run, params, call, module)
    adam = error(np.asarray(ours)[valid], theirs.numpy()[valid])

    # To torch: the same numbers in other places, into a module in evaluation mode.
    params = jax.tree.map(lambda leaf: jnp.array(random.permuted(leaf)), params)
    module.eval().load_state_dict(convert.to_torch(params, config, "torch_nn"), strict=True)
    _, ours = run(params)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors")
        theirs = call(module)
    back = error(np.asarray(ours)[valid], theirs.numpy()[valid])
    print(
        f"{number:2} {dtype} {config.norm_placement}, {config.activation}, bias {config.qkv_bias}, "
        f"{source}x{target}, {kind}: train {forward:.1e}, gradients {backward:.1e}, 20 Adam steps "
        f"{adam:.1e}, eval {back:.1e}"
    )
    assert max(forward, back) <= LOGIT_BOUNDS[dtype]
    assert adam <= ADAM_BOUNDS[dtype]


def after_adam(run, params, call, module):
    """Return what both models compute after 20 steps of Adam from the same weights.

    Outputs are compared and not weights: the bias of a key has no gradient in theory, and Adam
    turns its rounding noise into steps, which change no output.
    """
    optimizer = optax.adam(1e-3, b1=0.9, b2=0.98, eps=1e-8, eps_root=0.0)
    theirs = torch.optim.Adam(module.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-8)

    @jax.jit
    def update(gradients, state, params):
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for _ in range(20):
        params, state = update(run(params)[0], state, params)
        theirs.zero_grad()
        call(module)
        theirs.step()
    return run(params)[1], call(module).detach()


@pytest.mark.parametrize("final_norm", [True, False])
def test_an_encoder_alone(final_norm):
    layer = nn.TransformerEncoderLayer(14, 2, 17, dropout=0.0, batch_first=True)
    norm = nn.LayerNorm(14) if final_norm else None
    module = randomized(nn.TransformerEncoder(layer, 3, norm, enable_nested_tensor=False))
    config = convert.torch_nn_config(module)
    assert (config.num_encoder_layers, config.final_norm) == (3, final_norm)
    params = convert.from_torch(module.state_dict(), config, "torch_nn_encoder")
    assert set(params) == {"layers_0", "layers_1", "layers_2"} | ({"norm"} if final_norm else set())
    src = np.random.default_rng(0).normal(size=(2, 5, 14)).astype(np.float32)
    with jax.default_matmul_precision("highest"):
        ours = jax.jit(encode, static_argnums=1)({"encoder": params}, config, src)
    assert error(ours, module(torch.from_numpy(src))) <= LOGIT_BOUNDS["float32"]
    back = convert.to_torch(params, config, torch_nn.part("encoder"))
    assert_same_tensors(back, module.state_dict())


def test_a_decoder_alone():
    layer = nn.TransformerDecoderLayer(14, 2, 17, 0.0, "gelu", batch_first=True, norm_first=True)
    module = randomized(nn.TransformerDecoder(layer, 2))
    config = convert.torch_nn_config(module)
    params = convert.from_torch(module.state_dict(), config, "torch_nn_decoder")
    random = np.random.default_rng(0)
    tgt, memory = (random.normal(size=(2, n, 14)).astype(np.float32) for n in (5, 7))
    with jax.default_matmul_precision("highest"):
        ours = jax.jit(decode, static_argnums=1)({"decoder": params}, config, tgt, memory)
    hidden = ~torch.from_numpy(np.array(causal_mask(5)))[0, 0]
    theirs = module(torch.from_numpy(tgt), torch.from_numpy(memory), tgt_mask=hidden)
    assert error(ours, theirs) <= LOGIT_BOUNDS["float32"]
    assert_same_tensors(convert.to_torch(params, config, "torch_nn_decoder"), module.state_dict())


@pytest.mark.parametrize("bias", [True, False])
def test_an_attention_alone(bias):
    module = randomized(nn.MultiheadAttention(14, 2, bias=bias, batch_first=True))
    config = TransformerConfig.preset(
        "torch_nn", d_model=14, num_heads=2, qkv_bias=bias, attention_output_bias=bias
    )
    params = convert.from_torch(module.state_dict(), config, "torch_nn_attention")
    assert set(params) == {"query", "key", "value", "output"}
    random = np.random.default_rng(0)
    query, key, value = (random.normal(size=(2, n, 14)).astype(np.float32) for n in (5, 7, 7))
    with jax.default_matmul_precision("highest"):
        inputs = map(jnp.array, (query, key, value))
        ours = MultiHeadAttention(config).apply({"params": params}, *inputs)
    theirs, _ = module(*map(torch.from_numpy, (query, key, value)))
    assert error(ours, theirs) <= LOGIT_BOUNDS["float32"]
    assert_same_tensors(convert.to_torch(params, config, "torch_nn_attention"), module.state_dict())
    cross = torch_nn.attention("decoder/layers_0/cross_attention")
    assert_same_params(convert.from_torch(module.state_dict(), config, cross), params)
