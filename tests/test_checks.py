"""No id outside the vocabulary reaches a device, and what it costs to make sure."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_transformer import InputError, apply, decode, encode, generate
from jax_transformer.checks import check_ids
from jax_transformer.data.batches import Batch, make_batch
from jax_transformer.data.encoded import EncodedCorpus
from jax_transformer.data.plan import plan_epoch
from jax_transformer.decoding import score
from jax_transformer.training.config import TrainingConfig
from jax_transformer.training.step import evaluation_step
from tests.models import random_params, random_tokens, small_config

CONFIG = small_config("vaswani2017")  # 41 ids
BAD_IDS = {
    "first beyond": np.int64(41),
    "negative": np.int64(-1),
    "wraps to negative in int32": np.int64(2**31),
    "wraps to 1 in int32": np.int64(2**32 + 1),
    "-1 stored as uint16": np.array(-1).astype(np.uint16).astype(np.int64)[()],
}


def batch_of(side, ids):
    """Return the batch of one pair, of which one side holds these ids."""
    fine = np.array([1, 5, 2])
    sides = {"sources": (fine,), "targets": (fine,)} | {side: (ids,)}
    corpus = EncodedCorpus(
        **sides, src_vocab_size=41, tgt_vocab_size=41, dropped_overlong=0, unknown_tokens=0
    )
    return make_batch(corpus, plan_epoch(corpus, TrainingConfig(), epoch=0)[0])


SRC, TGT = random_tokens(CONFIG)
ENTRANCES = {
    "apply src": lambda params, ids: apply(params, CONFIG, ids, TGT[:1]),
    "apply tgt": lambda params, ids: apply(params, CONFIG, SRC[:1], ids),
    "encode": lambda params, ids: encode(params, CONFIG, ids),
    "decode": lambda params, ids: decode(params, CONFIG, ids, jnp.zeros((1, 5, 42))),
    "generate": lambda params, ids: generate(params, CONFIG, ids, max_new_tokens=3),
    "score src": lambda params, ids: score(params, CONFIG, ids, TGT[:1]),
    "score tgt": lambda params, ids: score(params, CONFIG, SRC[:1], ids),
    "batch of sources": lambda _, ids: batch_of("sources", ids[0]),
    "batch of targets": lambda _, ids: batch_of("targets", ids[0]),
}


@pytest.mark.parametrize("enter", ENTRANCES.values(), ids=ENTRANCES)
def test_an_id_outside_the_vocabulary_is_refused_everywhere(enter):
    params, caught = random_params(CONFIG), 0
    for bad in BAD_IDS.values():
        ids = np.array([[1, 5, 7, 2]], bad.dtype)
        ids[0, 2] = bad
        with pytest.raises(InputError, match=rf"\[0, [12]\]={bad} .* from 0 to 40") as refusal:
            enter(params, ids)
        assert "\n" not in str(refusal.value)
        caught += 1
    print(f"\n{caught} of {len(BAD_IDS)} caught")


def test_ids_of_a_large_vocabulary_are_not_wrapped():
    ids = np.array([1, 70_000, 65_536, 2])
    corpus = EncodedCorpus(
        (ids,),
        (ids,),
        src_vocab_size=70_001,
        tgt_vocab_size=70_001,
        dropped_overlong=0,
        unknown_tokens=0,
    )
    batch = make_batch(corpus, plan_epoch(corpus, TrainingConfig(), epoch=0)[0])
    assert batch.src[0].tolist() == ids.tolist()
    assert batch.tgt_out[0].tolist() == [*ids[1:].tolist(), 0]


def test_checking_costs_less_than_a_hundredth_of_a_step():
    # A step costs far more than this: the forward pass alone, of a model of one small layer.
    config = dataclasses.replace(
        CONFIG, d_model=64, num_heads=4, num_encoder_layers=1, num_decoder_layers=1
    )
    params = random_params(config)
    ids = np.random.default_rng(0).integers(3, 41, (128, 29)).astype(np.int32)
    batch, settings = Batch(ids, ids, ids), TrainingConfig()

    def check():
        for array in batch[:3]:
            check_ids("ids", array, 41)

    def step():
        jax.block_until_ready(evaluation_step(params, batch, config, settings))

    def fastest(function):
        times = []
        for _ in range(10):
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
        return min(times)

    share = fastest(check) / fastest(step)
    print(f"\nchecking {3 * ids.size:,} ids takes {share:.3%} of a forward pass")
    assert share < 0.01
