"""The whole model in both frameworks, and the functional face."""

import functools

import jax
import numpy as np
import pytest
import torch

from jax_transformer import apply, decode, encode
from tests.compilation import AS_USERS_DO
from tests.models import random_tokens, small_config
from tests.parity.measure import make_pair
from tests.parity.test_blocks import make_mask, to_torch
from tests.tiers import QUICK_PRESETS, tiered

jit = functools.partial(jax.jit, static_argnums=1)


@pytest.mark.exhaustive  # the quick tier compares the whole model
def test_encode(pair, ladder):
    actual = jit(encode)(pair.params, pair.config, pair.src)
    ladder.check(pair.preset, "encode", actual, pair.module.encode(torch.from_numpy(pair.src)))


def test_logits(pair, ladder):
    check_logits(pair, ladder, None)


@pytest.mark.exhaustive  # it compiles for seven times as long, so not for every preset
@pytest.mark.parametrize("pair", QUICK_PRESETS, indirect=True)
def test_logits_as_users_compile(pair, ladder):
    check_logits(pair, ladder, AS_USERS_DO)


def check_logits(pair, ladder, options):
    run = jit(apply, compiler_options=options)
    actual = run(pair.params, pair.config, pair.src, pair.tgt)
    expected = pair.module(torch.from_numpy(pair.src), torch.from_numpy(pair.tgt))
    ladder.check(pair.preset, "whole model", actual, expected, kind="logits")


def test_logits_under_masks_of_the_caller(pair, ladder):
    source_length, target_length = pair.src.shape[1], pair.tgt.shape[1]
    heads = pair.config.num_heads
    masks = (
        make_mask("padding", source_length, source_length, heads),
        make_mask("empty row", target_length, target_length, heads),
    )
    actual = jit(apply)(pair.params, pair.config, pair.src, pair.tgt, *masks)
    expected = pair.module(*map(to_torch, (pair.src, pair.tgt, *masks)))
    ladder.check(pair.preset, "whole model", actual, expected, kind="logits")


@pytest.mark.exhaustive  # the quick tier compares the whole model
def test_decode_of_a_given_memory(pair, ladder):
    random = np.random.default_rng(6)
    shape = (*pair.src.shape[:2], pair.config.d_model)
    memory = random.normal(size=shape).astype(jax.tree.leaves(pair.params)[0].dtype)
    actual = jit(decode)(pair.params, pair.config, pair.tgt, memory)
    expected = pair.module.decode(torch.from_numpy(pair.tgt), torch.from_numpy(memory))
    ladder.check(pair.preset, "decode", actual, expected, kind="logits")


@pytest.mark.parametrize("side", tiered(["encoder", "decoder"], ["decoder"]))
def test_a_final_norm_of_one_side_only(side, dtype, ladder):
    norms = {"final_norm": side == "encoder", "decoder_final_norm": side == "decoder"}
    config = small_config("pre_norm", **norms)
    _, params, module = make_pair(config, dtype)
    assert {stack: "norm" in params[stack] for stack in ("encoder", "decoder")} == {
        "encoder": side == "encoder",
        "decoder": side == "decoder",
    }
    src, tgt = random_tokens(config)
    memory = jit(encode)(params, config, src)
    ladder.check("pre_norm", "encode", memory, module.encode(torch.from_numpy(src)))
    actual = jit(apply)(params, config, src, tgt)
    expected = module(torch.from_numpy(src), torch.from_numpy(tgt))
    ladder.check("pre_norm", "whole model", actual, expected, kind="logits")
