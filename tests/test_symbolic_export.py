"""Programs are exported once for batches and lengths of any size (`jax.export.symbolic_shape`)."""

from functools import partial

import jax
import numpy as np
import pytest

from jax_transformer import InputError, apply, encode, generate
from jax_transformer.kernels.execution import Execution, SearchExecution
from tests.models import random_params, shallow_config, unchecked
from tests.parity.ladder import error
from tests.tiers import tiered_rows

BOUND = 1e-6
NEW_TOKENS = 4
KEY = jax.random.key(3)
SIZES = ((1, 1, 1), (17, 13, 5))  # (batch, source length, target length)


def memory_of(execution, config, params, src, tgt):
    return encode(params, config, src, execution=execution)


def logits_of(execution, config, params, src, tgt):
    return apply(params, config, src, tgt, execution=execution)


def search(execution, config, params, src, tgt, **options):
    limit = {"max_new_tokens": NEW_TOKENS, "execution": execution}
    return tuple(generate(params, config, src, **limit, **options))


PROGRAMS = {
    "encode": memory_of,
    "apply": logits_of,
    "greedy": search,
    "beam": partial(search, beam_size=2, num_hypotheses=2, no_repeat_ngram_size=2),
    "sampling": partial(search, key=KEY, temperature=0.8, top_k=5, top_p=0.9),
}


@pytest.fixture(autouse=True)
def as_users_call_it():
    with unchecked():  # the types of the code name lengths `int`, which a symbolic one is not
        yield


def export(preset, name, sizes="b, s, t", constraints=(), platform="cpu", platforms=("cpu",)):
    """Return a program of (parameters, src, tgt), and its export, written and read back."""
    config = shallow_config(preset)
    if config.decoder_attention == "self_over_memory":  # sources and targets of one length
        sizes = sizes.replace("t", "s")
    run = jax.jit(partial(PROGRAMS[name], SearchExecution.for_platform(platform), config))
    batch, source, target = jax.export.symbolic_shape(sizes, constraints=constraints)
    exported = jax.export.export(run, platforms=platforms)(
        random_params(config),
        jax.ShapeDtypeStruct((batch, source), np.int32),
        jax.ShapeDtypeStruct((batch, target), np.int32),
    )
    return run, jax.export.deserialize(exported.serialize())


def tokens(config, batch, source, target):
    """Return ids of a batch; rows after the first end in padding."""
    if config.decoder_attention == "self_over_memory":
        target = source
    random, sides = np.random.default_rng(batch), []
    for length in (source, target):
        ids = random.integers(3, config.src_vocab_size - 1, (batch, length)).astype(np.int32)
        ids[1:, 1 + length // 2 :] = config.pad_id
        sides.append(ids)
    return sides


@pytest.mark.parametrize(
    ("preset", "name"),
    tiered_rows(
        [
            *(("vaswani2017", name) for name in PROGRAMS),
            *(("pre_norm", name) for name in ("apply", "beam")),
            *(("t5", name) for name in ("encode", "apply", "greedy", "beam")),  # relative positions
            ("shared_heads", "greedy"),
            *(
                (preset, name)
                for preset in ("windows", "merged", "ssru")
                for name in ("apply", "beam")
            ),
        ],
        lambda *row: row == ("t5", "greedy"),
    ),
)
def test_one_export_computes_what_a_call_of_each_size_computes(preset, name):
    config, params = shallow_config(preset), random_params(shallow_config(preset))
    run, exported = export(preset, name)
    worst = 0.0
    for sizes in SIZES:
        src, tgt = tokens(config, *sizes)
        found, expected = map(jax.tree.leaves, (f(params, src, tgt) for f in (exported.call, run)))
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.dtype == theirs.dtype
            if ours.dtype == np.int32:  # tokens and lengths
                assert np.array_equal(ours, theirs)
            else:
                worst = max(worst, error(ours, theirs))
    print(f"\n{preset}, {name}: {worst:.1e}")
    assert worst <= BOUND


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize(
    ("preset", "name"), [("vaswani2017", "apply"), ("pre_norm", "beam"), ("t5", "greedy")]
)
def test_an_export_of_any_size_is_made_for_a_platform_that_is_not_here(preset, name, platform):
    execution = {"cuda": "gpu", "tpu": "tpu"}[platform]
    _, exported = export(preset, name, platform=execution, platforms=(platform,))
    assert exported.platforms == (platform,)
    assert any("b" in str(size) for size in exported.out_avals[0].shape)


@pytest.mark.exhaustive
def test_flash_attention_of_lengths_that_are_not_known_is_plain():
    config = shallow_config("vaswani2017", max_length=2048)
    params, (src, tgt) = random_params(config), tokens(config, 3, 13, 11)
    sizes = jax.export.symbolic_shape("b, s, t", constraints=["s <= 2048", "t <= 2048"])
    shapes = [jax.ShapeDtypeStruct((sizes[0], length), np.int32) for length in sizes[1:]]
    run = jax.jit(partial(logits_of, Execution(attention="flash"), config))
    found = jax.export.export(run)(params, *shapes).call(params, src, tgt)
    assert error(found, apply(params, config, src, tgt)) <= BOUND


def test_positions_beyond_the_table_are_nan_where_no_constraint_bounds_the_length():
    config = shallow_config("vaswani2017")
    run, exported = export("vaswani2017", "encode")
    src, tgt = tokens(config, 2, config.max_length + 1, 1)
    with pytest.raises(InputError, match=r"30 tokens long.*max_length=29"):
        run(random_params(config), src, tgt)
    memory = np.asarray(exported.call(random_params(config), src, tgt))
    assert np.isnan(memory[0]).all()
    assert np.isfinite(memory[1]).all()  # of which padding alone is beyond the table
    _, relative = export("t5", "encode")  # which has no table
    config = shallow_config("t5")
    assert np.isfinite(relative.call(random_params(config), *tokens(config, 2, 100, 1))).all()


def test_a_constraint_of_the_length_is_read():
    with pytest.raises(InputError, match=r"src is s tokens long.*max_length=29"):
        export("vaswani2017", "encode", constraints=("s >= 30",))


def test_sides_of_different_symbols_are_refused_where_they_belong_together():
    config = shallow_config("vaswani2017")
    batch, other, length = jax.export.symbolic_shape("b, c, s")
    ids = [jax.ShapeDtypeStruct((rows, length), np.int32) for rows in (batch, other)]
    with pytest.raises(InputError, match="tgt has c rows and src b"):
        jax.export.export(jax.jit(partial(apply, random_params(config), config)))(*ids)
