"""No argument of another kind, and no id outside the vocabulary, reaches a device.

What `generate` refuses of its options is in `tests/decoding/test_options.py`.
"""

import jax
import numpy as np
import pytest
import torch

from jax_transformer import (
    InputError,
    apply,
    cross_attention_weights,
    decode,
    decode_step,
    encode,
    generate,
    init_cache,
    init_params,
    select_hypotheses,
)
from jax_transformer.decoding import score
from jax_transformer.kernels.execution import Execution, SearchExecution
from jax_transformer.kernels.segments import SegmentMask
from jax_transformer.model import functional
from jax_transformer.text.batches import Batch, make_batch
from jax_transformer.text.plan import plan_epoch
from jax_transformer.training.config import TrainingConfig
from jax_transformer.training.step import init_state, make_run_step
from tests.models import random_params, random_tokens, shallow_config, small_config, unchecked
from tests.text.texts import corpus_of
from tests.tiers import tiered

SMALL = shallow_config("vaswani2017")  # 41 ids
SRC, TGT = random_tokens(SMALL)
PARAMS = random_params(SMALL)
MEMORY = np.ones((5, 13, 42), np.float32)
VISIBLE = (SRC != 0)[:, None, None]
WINDOWS = small_config("windows")
EQUAL = small_config("shared_heads", src_vocab_size=41)
KEY = jax.random.key(0)


def step(tokens):
    return decode_step(PARAMS, SMALL, init_cache(PARAMS, SMALL, MEMORY, 3), tokens)


def search(**options):
    return generate(PARAMS, SMALL, SRC, **{"max_new_tokens": 3} | options)


def train(**fields):
    batch = Batch(SRC, SRC, SRC)._replace(**fields)
    settings = TrainingConfig()
    return jax.jit(make_run_step(SMALL, settings))(init_state(SMALL, settings), batch)


BAD_IDS = {
    "first beyond": np.int64(41),
    "negative": np.int64(-1),
    "wraps to negative in int32": np.int64(2**31),
    "wraps to 1 in int32": np.int64(2**32 + 1),
    "-1 stored as uint16": np.array(-1).astype(np.uint16).astype(np.int64)[()],
}
READERS = {  # of ids [batch, length]
    "encode": lambda ids: encode(PARAMS, SMALL, ids),
    "decode": lambda ids: decode(PARAMS, SMALL, ids, MEMORY),
    "apply src": lambda ids: apply(PARAMS, SMALL, ids, TGT),
    "apply tgt": lambda ids: apply(PARAMS, SMALL, SRC, ids),
    "generate": lambda ids: generate(PARAMS, SMALL, ids, max_new_tokens=3),
    "prefix": lambda ids: search(prefix=ids),
    "score src": lambda ids: score(PARAMS, SMALL, ids, TGT),
    "score tgt": lambda ids: score(PARAMS, SMALL, SRC, ids),
    "weights": lambda ids: cross_attention_weights(PARAMS, SMALL, SRC, ids),
    "positions": lambda ids: encode(PARAMS, SMALL, SRC, src_positions=ids),
}
MASKED = {
    "encode": lambda mask: encode(PARAMS, SMALL, SRC, mask),
    "decode": lambda mask: decode(PARAMS, SMALL, TGT, MEMORY, None, mask),
    "apply": lambda mask: apply(PARAMS, SMALL, SRC, TGT, mask),
    "generate": lambda mask: search(src_mask=mask),
    "score": lambda mask: score(PARAMS, SMALL, SRC, TGT, src_mask=mask),
    "init_cache": lambda mask: init_cache(PARAMS, SMALL, MEMORY, 3, mask),
}
NO_ARRAYS = {
    "a list": SRC.tolist(),
    "objects": SRC.astype(object),
    "text": SRC.astype(str),
    "a tensor of torch": torch.tensor(SRC),
    "a number": 3,
}
NO_IDS = {
    "floats": SRC + 0.9,
    "booleans": SRC > 0,
    "complex": SRC + 0j,
    "one row": SRC[0],
    "three axes": SRC[..., None],
}
with unchecked():  # which checks the segments' types too
    NO_MASKS = {
        "additive": np.where(VISIBLE, 0, -np.inf).astype(np.float32),
        "integers": VISIBLE.astype(np.int32),
        "two axes": SRC != 0,
        "fewer rows": VISIBLE[:2],
        "fewer keys": VISIBLE[..., :5],
        "segments of floats": SegmentMask((SRC != 0).astype(np.float32)),
        "segments of fewer rows": SegmentMask((SRC != 0)[:2]),
        "segments of fewer keys": SegmentMask((SRC != 0)[:, :5]),
        "segments of queries alone": SegmentMask(None, SRC),
        "a segment": SegmentMask(np.True_),
    }


def refuse(call, match=""):
    with unchecked(), pytest.raises(InputError, match=match) as refusal:  # as users call it
        call()
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 300


@pytest.mark.parametrize("name", [name for name in READERS if name != "positions"])
def test_an_id_outside_the_vocabulary_is_refused_everywhere(name):
    for bad in BAD_IDS.values():
        ids = np.full((5, 4), 7, bad.dtype)
        ids[0, 2] = bad
        refuse(lambda ids=ids: READERS[name](ids), rf"\[0, [12]\]={bad} .* from 0 to 40")


def test_ids_of_a_large_vocabulary_are_not_wrapped():
    ids = np.array([1, 70_000, 65_536, 2])
    corpus = corpus_of((ids,), (ids,), src_vocab_size=70_001, tgt_vocab_size=70_001)
    batch = make_batch(corpus, plan_epoch(corpus, TrainingConfig(), epoch=0)[0])
    assert batch.src[0].tolist() == ids.tolist()
    assert batch.tgt_out[0].tolist() == [*ids[1:].tolist(), 0]


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_what_is_no_array_of_ids_is_refused(read):
    for wrong in NO_ARRAYS.values():
        refuse(lambda wrong=wrong: read(wrong), "of (d?)type .* must (be an array|hold whole)")
    for wrong in NO_IDS.values():
        refuse(lambda wrong=wrong: read(wrong), r"whole numbers|\[batch, length\]")
        refuse(lambda wrong=wrong: jax.jit(read)(wrong), r"whole numbers|\[batch, length\]")


@pytest.mark.parametrize("attend", MASKED.values(), ids=MASKED)
def test_what_is_no_mask_is_refused(attend):
    for wrong in NO_MASKS.values():
        refuse(lambda wrong=wrong: attend(wrong), "src_mask")
        refuse(lambda wrong=wrong: jax.jit(attend)(wrong), "src_mask")
    for wrong in (VISIBLE.tolist(), VISIBLE.astype(object), "padding"):
        refuse(lambda wrong=wrong: attend(wrong), "src_mask of (d?)type")


@pytest.mark.parametrize("name", tiered(MASKED, ["decode"]))
def test_a_mask_by_segments_is_read_as_the_same_boolean_mask(name):
    attend = MASKED[name]
    with unchecked():  # NumPy arrays are welcome
        pair = [jax.tree.leaves(attend(mask)) for mask in (SegmentMask(SRC != 0), VISIBLE)]
    for one, other in zip(*pair, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention": "flesh"}, "attention='flesh' must be one of 'cudnn', 'flash', 'plain'"),
        ({"remat": "layer"}, "remat='layer' must be one of 'dots', 'layers', 'none'"),
        ({"compute_dtype": "float8"}, "compute_dtype='float8' must be 'bfloat16' or None"),
        (
            {"loss_parts": 0},
            "loss_parts=0 must be a whole number, at least 1 and at most 2147483647",
        ),
        ({"scan_layers": 1}, "scan_layers=1 must be True or False"),
        ({"cache": "rows"}, "cache='rows' must be one of 'joined_heads', 'split_heads'"),
    ],
)
def test_an_unknown_form_of_execution_is_refused(fields, message):
    with pytest.raises(InputError) as refusal:
        SearchExecution(**fields)
    assert str(refusal.value) == message


def test_an_execution_takes_the_numbers_that_a_config_takes():
    assert type(Execution(loss_parts=np.int64(2)).loss_parts) is int
    same = SearchExecution(loss_parts=np.int64(2), scan_layers=np.True_, remat="dots")
    assert repr(same) == "SearchExecution(loss_parts=2, remat='dots', scan_layers=True)"
    assert hash(same) == hash(SearchExecution(loss_parts=2, scan_layers=True, remat="dots"))


def test_an_id_of_64_bits_outside_of_the_table_gives_nan():
    table = np.ones((8, 3), np.float32)
    with unchecked():
        for ids in (np.array([2**32 + 5]), np.array([-(2**32) + 5]), np.array([5])):
            rows = functional.embed(ids, table)
            assert np.isnan(rows).all() == (ids[0] != 5)


WRONG_CALLS = {
    "no execution": (
        lambda: apply(PARAMS, SMALL, SRC, TGT, execution=None),
        "execution=None must be an Execution, for example Execution.for_platform",
    ),
    "an execution of no search": (
        lambda: init_cache(PARAMS, SMALL, MEMORY, 3, execution=Execution()),
        r"execution=Execution\(\) must be a SearchExecution",
    ),
    "an execution by its fields": (
        lambda: generate(PARAMS, SMALL, SRC, max_new_tokens=3, execution={"remat": "none"}),
        r"execution={'remat': 'none'} must be a SearchExecution, for example SearchExecution.for_p",
    ),
    "swapped arguments": (
        lambda: apply(SMALL, PARAMS, SRC, TGT),
        r"params is a TransformerConfig: the order is \(params, config, ...\)",
    ),
    "a config as a dict": (
        lambda: score(PARAMS, SMALL.to_dict(), SRC, TGT),
        "config of type dict must be a TransformerConfig",
    ),
    "fresh parameters of a dict": (lambda: init_params(KEY, {}), "config of type dict must be"),
    "the variables of flax": (
        lambda: encode({"params": PARAMS}, SMALL, SRC),
        r"params has one key, 'params', as flax returns it: give params\['params'\]",
    ),
    "one sequence of ids": (
        lambda: apply(PARAMS, SMALL, SRC[0], TGT),
        r"src of shape \(13,\) must be ids \[batch, length\]; write src\[None\]",
    ),
    "ids with a third axis": (
        lambda: apply(PARAMS, SMALL, SRC, TGT[..., None]),
        r"tgt of shape \(5, 11, 1\) must be ids \[batch, length\]$",
    ),
    "a mask of [batch, source]": (
        lambda: apply(PARAMS, SMALL, SRC, TGT, SRC != 0),
        r"src_mask of shape \(5, 13\) must be broadcastable to .* = \[5, 3, 1, 13\]; "
        r"write src_mask\[:, None, None, :\]",
    ),
    "a mask of other lengths": (
        lambda: apply(PARAMS, SMALL, SRC, TGT, None, np.ones((1, 1, 11, 12), bool)),
        r"tgt_mask of shape \(1, 1, 11, 12\) must be broadcastable to .* = \[5, 3, 11, 11\]$",
    ),
    "a layer too few": (
        lambda: apply(PARAMS | {"encoder": {}}, SMALL, SRC, TGT),
        "config.num_encoder_layers=1, but the parameters hold 0 layers of the encoder",
    ),
    "a layer too many": (
        lambda: apply(PARAMS | {"decoder": {"layers_0": {}, "layers_1": {}}}, SMALL, SRC, TGT),
        "config.num_decoder_layers=1, but the parameters hold 2 layers of the decoder",
    ),
    "another width": (
        lambda: encode(PARAMS | {"token_embedding": {"embedding": MEMORY[0]}}, SMALL, SRC),
        r"params do not fit the config: token_embedding/embedding is \(13, 42\) and must have "
        r"shape \(41, 42\)",
    ),
    "unequal lengths where the decoder needs equal ones": (
        lambda: apply(random_params(EQUAL), EQUAL, SRC, TGT),
        "tgt is 11 long and src 13",
    ),
    "an additive target mask": (
        lambda: apply(PARAMS, SMALL, SRC, TGT, None, np.zeros((1, 1, 11, 11))),
        "tgt_mask of dtype float64 must be boolean, True = attend; from an additive mask of torch",
    ),
    "a window for both sides": (
        lambda: apply(PARAMS, SMALL, SRC, TGT, np.ones((5, 1, 13, 13), bool)),
        "src_mask of shape .* to encode alone, and its result to decode, or to generate",
    ),
    "causal attention to a memory": (
        lambda: decode(PARAMS, SMALL, TGT, MEMORY, None, SegmentMask(SRC != 0, causal=True)),
        "src_mask is causal, which needs as many queries as keys; here are 11 queries and 13 keys",
    ),
    "a source for two targets": (
        lambda: apply(PARAMS, SMALL, SRC[:1], TGT[:2]),
        "tgt has 2 rows and src 1",
    ),
    "a source for two targets, traced": (
        lambda: jax.jit(lambda src: apply(PARAMS, SMALL, src, TGT[:2]))(SRC[:1]),
        "tgt has 2 rows and src 1",
    ),
    "a source for two scores": (
        lambda: score(PARAMS, SMALL, SRC[:1], TGT[:2]),
        "tgt has 2 rows and src 1",
    ),
    "a memory of fewer rows": (
        lambda: decode(PARAMS, SMALL, TGT, MEMORY[:1]),
        "memory has 1 rows and tgt 5",
    ),
    "a memory of another width": (
        lambda: decode(PARAMS, SMALL, TGT, MEMORY[..., :40]),
        r"memory of shape \(5, 13, 40\) must be vectors \[batch, length, d_model=42\]",
    ),
    "a memory of integers": (
        lambda: init_cache(PARAMS, SMALL, MEMORY.astype(int), 3),
        "memory of dtype int64 must hold floating-point numbers",
    ),
    "no source": (
        lambda: generate(PARAMS, SMALL, SRC[:0], max_new_tokens=3, beam_size=2),
        r"src of shape \(0, 13\) is empty",
    ),
    "sources without a token": (
        lambda: generate(PARAMS, SMALL, SRC[:, :0], max_new_tokens=3),
        r"src of shape \(5, 0\) is empty",
    ),
    "no target": (lambda: score(PARAMS, SMALL, SRC, TGT[:, :0]), r"tgt .*\(5, 0\) is empty"),
    "no memory": (lambda: init_cache(PARAMS, SMALL, MEMORY[:0], 3), "memory .* is empty"),
    "tokens of floats": (lambda: step(TGT[:, 0] * 1.5), "tokens of dtype float64 must hold whole"),
    "a cache of another kind": (
        lambda: decode_step(PARAMS, SMALL, None, TGT[:, 0]),
        "cache of type NoneType must be a Cache",
    ),
    "parents that are none": (
        lambda: select_hypotheses(init_cache(PARAMS, SMALL, MEMORY, 3), np.ones((5, 1), int)),
        r"parents\[0, 0\]=1 is outside the hypotheses",
    ),
    "positions of one row": (
        lambda: encode(PARAMS, SMALL, SRC, src_positions=np.zeros((1, 13), int)),
        r"src_positions of shape \(1, 13\) must be \[batch, length\] = \[5, 13\]",
    ),
    **{
        f"{side}_positions={number}": (
            lambda side=side, number=number: apply(PARAMS, SMALL, SRC, TGT, **placed(side, number)),
            rf"{side}_positions\[2, 0\]={number} is outside the position table; .* from 0 to 28",
        )
        for side in ("src", "tgt")
        for number in (29, -1, 2**31 - 1)
    },
    "a loop over layers of which some have a window": (
        lambda: encode(
            random_params(WINDOWS),
            WINDOWS,
            random_tokens(WINDOWS)[0],
            execution=Execution(scan_layers=True),
        ),
        "but sliding_window_pattern=2 gives only some a window; use scan_layers=False",
    ),
    "a list of parameters": (lambda: apply([1], SMALL, SRC, TGT), "params of type list"),
    "parameters of a search": (
        lambda: generate("weights", SMALL, SRC, max_new_tokens=3),
        "params of type str",
    ),
    "no parameters": (lambda: encode({}, SMALL, SRC), "params do not fit .* is missing"),
    "no decoder": (
        lambda: step_with({name: leaf for name, leaf in PARAMS.items() if name != "decoder"}),
        "decoder/.* is missing",
    ),
    "keys without an order": (
        lambda: encode({1: MEMORY, "a": MEMORY}, SMALL, SRC),
        "keys are all names",
    ),
    "a parameter of integers": (
        lambda: encode(PARAMS | {"encoder": {"layers_0": {"x": SRC}}}, SMALL, SRC),
        "params: encoder/layers_0/x of dtype int32 must hold floating-point numbers",
    ),
    "a number for a key of dropout": (
        lambda: apply(PARAMS, SMALL, SRC, TGT, dropout_key=0),
        r"dropout_key of type int must be one random key, as jax.random.key\(0\) makes it",
    ),
    "several keys": (lambda: init_params(jax.random.split(KEY), SMALL), r"key .* shape \(2,\)"),
    "targets of floats": (lambda: train(tgt_out=SRC * 0.5), "batch.tgt_out of dtype float"),
    "targets of fewer rows": (
        lambda: train(tgt_out=SRC[:1]),
        r"batch.tgt_out of shape \(1, 13\) must be \[batch, length\] as batch.tgt_in",
    ),
    "sources of fewer rows": (lambda: train(src=SRC[:1]), "tgt has 5 rows and src 1"),
    "segments of one side": (lambda: train(src_segments=SRC), "batch.tgt_segments of type None"),
}


def placed(side, number):
    """Return positions of a side, all but one of which are in the table."""
    positions = np.full({"src": SRC, "tgt": TGT}[side].shape, 28)
    positions[2, 0] = number
    return {f"{side}_positions": positions}


def step_with(params):
    return decode_step(params, SMALL, init_cache(PARAMS, SMALL, MEMORY, 3), TGT[:, 0])


@pytest.mark.parametrize(("call", "message"), WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_arguments_that_do_not_belong_together_are_refused_in_one_line(call, message):
    refuse(call, message)


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_ids_of_the_other_byte_order_are_refused_in_one_line(read):
    ids = np.array([[1, 5, 2]], np.dtype(np.int32).newbyteorder())
    refuse(lambda: read(ids), r"of dtype [<>]i4 must be in this machine's byte order")
