"""The whole model in both frameworks, and the functional face."""

import functools

import jax
import numpy as np
import pytest

from jax_transformer import apply, decode, encode
from tests.compilation import AS_USERS_DO
from tests.models import small_config
from tests.parity.measure import make_case
from tests.parity.test_blocks import make_mask
from tests.tiers import MODELS, QUICK_MODELS, tiered

jit = functools.partial(jax.jit, static_argnums=1)
AS_USERS = ("shared_heads", "marian", "umt5", "pre_norm_decoder")  # of which CI compiles


@pytest.mark.exhaustive  # the quick tier compares the whole model
def test_encode(pair, ladder):
    ladder.check(
        pair,
        "encode",
        lambda params, src: jit(encode)(params, pair.config, src),
        lambda module, src: module.encode(src),
        pair.src,
    )


# As users compile, the test of each preset is exhaustive: it compiles for seven times as long.
@pytest.mark.parametrize("pair", QUICK_MODELS, indirect=True)
def test_logits(pair, ladder):
    check_logits(pair, ladder)


@pytest.mark.parametrize("pair", tiered(MODELS, [], AS_USERS), indirect=True)
def test_logits_as_users_compile(pair, ladder):
    check_logits(pair, ladder, AS_USERS_DO)


def check_logits(pair, ladder, options=None, masks=()):
    run = jit(apply, compiler_options=options)
    ladder.check(
        pair,
        "whole model",
        lambda params, *inputs: run(params, pair.config, *inputs),
        lambda module, *inputs: module(*inputs),
        *(pair.src, pair.tgt, *masks),
        kind="logits",
    )


def test_logits_under_masks_of_the_caller(pair, ladder):
    source_length = pair.config.positions_of(pair.src.shape[1])
    target_length = pair.tgt.shape[1]
    heads = pair.config.num_heads
    masks = (
        make_mask("padding", source_length, source_length, heads),
        make_mask("empty row", target_length, target_length, heads),
    )
    if pair.config.decoder_attention == "ssru_then_cross":  # of which all heads continue a state
        masks = masks[0], masks[1][:, :1]
    check_logits(pair, ladder, masks=masks)


@pytest.mark.exhaustive  # the quick tier compares the whole model
def test_decode_of_a_given_memory(pair, ladder):
    random = np.random.default_rng(6)
    shape = (*pair.src.shape[:2], pair.config.stack("encoder").d_model)
    memory = random.normal(size=shape).astype(jax.tree.leaves(pair.params)[0].dtype)
    ladder.check(
        pair,
        "decode",
        lambda params, *inputs: jit(decode)(params, pair.config, *inputs),
        lambda module, *inputs: module.decode(*inputs),
        *(pair.tgt, memory),
        kind="logits",
    )


@pytest.mark.parametrize("side", tiered(["encoder", "decoder"], []))
def test_a_final_norm_of_one_side_only(side, dtype, ladder):
    norms = {"final_norm": side == "encoder", "decoder_final_norm": side == "decoder"}
    pair = make_case("pre_norm", small_config("pre_norm", **norms), dtype)
    assert {stack: "norm" in pair.params[stack] for stack in ("encoder", "decoder")} == {
        "encoder": side == "encoder",
        "decoder": side == "decoder",
    }
    check_logits(pair, ladder)
