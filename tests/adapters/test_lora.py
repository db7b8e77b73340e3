"""LoRA as a tree beside the tree: what is drawn, added, trained, merged and refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_transformer import Execution, InputError, apply, convert, generate, make_train_step
from jax_transformer.adapters import lora
from jax_transformer.convert.table import flatten, nest
from jax_transformer.model import layers
from jax_transformer.model.tree import decayed, in_dtype, parameter_shapes, parameter_shardings
from jax_transformer.runtime.sharding import make_mesh
from jax_transformer.training.config import TrainingConfig
from jax_transformer.training.freeze import trainable, trained_names, trained_sizes
from jax_transformer.training.step import sharded_init_state, sharded_train_step
from tests.models import random_params, random_tokens, shallow_config, small_config, unchecked
from tests.parity import measure
from tests.parity.ladder import ROUNDED, bound, error
from tests.tiers import DISTINCT_MODELS, MODELS, tiered

CONFIG = shallow_config("vaswani2017")
EVERY = ("*/query", "*/key", "*/value", "*_attention/output", "*/inner", "*/outer")
forward = jax.jit(apply, static_argnames=("config", "execution"))


def random_adapter(config, rank=3, targets=EVERY, seed=1, dtype=np.float32):
    """Return an adapter whose product is as large as that of the kernels."""
    random = np.random.default_rng(seed)
    leaves = {}
    for path, shape in lora.shapes(config, rank, targets).items():
        deviation = shape[0] ** -0.5 if shape else 0
        leaves[path] = np.asarray(random.normal(0 if shape else 1.5, deviation, shape), dtype)
    return nest(leaves)


def adapted(config, **options):
    return lora.attach(random_params(config), random_adapter(config, **options))


@pytest.mark.parametrize("preset", tiered(MODELS, ["shared_heads"], DISTINCT_MODELS))
def test_a_merged_model_computes_what_the_adapter_adds(preset, x64):
    config = shallow_config(preset)
    params = random_params(config, dtype=np.float64)
    adapter = random_adapter(config, dtype=np.float64)
    src, tgt = random_tokens(config, dtype=np.float64)
    whole = lora.attach(params, adapter)
    logits = forward(whole, config=config, src=src, tgt=tgt)
    merged = lora.merge(whole)
    assert parameter_shapes(config).keys() == flatten(merged).keys()
    expected = forward(merged, config=config, src=src, tgt=tgt)
    apart, moved = (error(logits, other) for other in (expected, forward(params, config, src, tgt)))
    print(f"{preset}: {apart:.1e} from the merged model, {moved:.1e} from that without an adapter")
    assert apart <= 4 * bound("logits", "float64")
    assert moved > 1e-2


def test_a_new_adapter_changes_no_bit_and_is_drawn_as_peft_draws_it():
    key = jax.random.key(3)
    adapter = flatten(lora.init(key, CONFIG, 14, EVERY, alpha=21.0))
    for path, leaf in adapter.items():
        inputs = parameter_shapes(CONFIG)[f"{path.rpartition('/')[0]}/kernel"][0]
        if path.endswith("lora_a"):  # kaiming_uniform_(a=sqrt(5)) of torch
            assert 0.9 < np.abs(leaf).max() * inputs**0.5 <= 1
            assert abs(np.std(leaf) * (3 * inputs) ** 0.5 - 1) < 0.1
        else:
            assert np.all(leaf == (1.5 if path.endswith("scale") else 0))
    assert len({np.asarray(leaf).tobytes() for leaf in adapter.values() if leaf.ndim}) > 9
    fewer = flatten(lora.init(key, CONFIG, 14, ("encoder/*/query",)))
    assert len(fewer) == 3
    name = "encoder/layers_0/self_attention/query/lora_a"
    np.testing.assert_array_equal(fewer[name], adapter[name])
    params, (src, tgt) = random_params(CONFIG), random_tokens(CONFIG)
    whole = lora.attach(params, nest(adapter))
    assert np.array_equal(*(forward(some, CONFIG, src, tgt) for some in (params, whole)))


def test_adapters_of_one_model_share_its_leaves_and_replace_each_other():
    params = random_params(CONFIG)
    first, second = (random_adapter(CONFIG, seed=seed) for seed in (1, 2))
    one = lora.attach(params, first)
    both = lora.attach(one, second)
    kernel = "encoder/layers_0/self_attention/query/kernel"
    assert flatten(both)[kernel] is flatten(params)[kernel]
    assert jax.tree.all(jax.tree.map(np.array_equal, lora.detach(both), second))
    assert lora.detach(params) == {}
    fewer = lora.attach(both, random_adapter(CONFIG, targets=("encoder/*/query",)))
    assert len(flatten(lora.detach(fewer))) == 3  # those of an earlier adapter are gone


def test_a_scale_has_float32_whatever_the_factors_and_kernels_have():
    params = random_params(CONFIG)
    adapter = random_adapter(CONFIG, dtype=jnp.bfloat16)
    scale = "encoder/layers_0/self_attention/query/lora_scale"
    leaves = flatten(adapter) | {scale: np.float64(8 / 3)[...]}
    half = jax.tree.map(lambda leaf: jnp.asarray(leaf, "bfloat16"), params)
    for base, kind in ((params, "float32"), (half, "bfloat16")):
        whole = flatten(in_dtype(lora.attach(base, nest(leaves)), kind))
        assert {leaf.dtype.name for leaf in whole.values() if leaf.ndim} == {kind}
        assert whole[scale].dtype == np.float32
        assert whole[scale] == np.float32(8 / 3)
    leaves = {"kernel": np.zeros((2, 2)), "lora_a": np.eye(2), "lora_b": np.eye(2)}
    leaves = jax.tree.map(lambda leaf: jnp.asarray(leaf, "bfloat16"), leaves)
    leaves["lora_scale"] = jnp.float32(8 / 3)
    y = layers.Linear(CONFIG).apply({"params": leaves}, jnp.full((1, 2), 3, "bfloat16"))
    assert np.array_equal(y, np.full((1, 2), 8))  # 3 * 2.671875 would be 8.0625


def test_a_half_precision_kernel_is_merged_in_float32_and_rounded_once():
    half = jax.tree.map(lambda leaf: jnp.asarray(leaf, "bfloat16"), random_params(CONFIG))
    # Of jax: numpy multiplies matrices of bfloat16 in float32.
    whole = lora.attach(half, jax.tree.map(jnp.asarray, random_adapter(CONFIG)))
    merged, leaves = flatten(lora.merge(whole)), flatten(whole)
    for path in (path for path in leaves if path.endswith("/lora_a")):
        module = path.removesuffix("lora_a")
        kernel, first, second, scale = (
            np.asarray(leaves[f"{module}{leaf}"], np.float64)
            for leaf in ("kernel", "lora_a", "lora_b", "lora_scale")
        )
        expected = kernel + scale * first @ second
        rounding = 2.0**-8 * np.abs(expected) + 1e-5
        assert np.all(
            np.abs(np.asarray(merged[f"{module}kernel"], np.float64) - expected) <= rounding
        )


WHOLE = "token_embedding/embedding"


def test_a_whole_parameter_takes_the_place_of_the_base_until_another_adapter_does():
    params, (src, tgt) = random_params(CONFIG), random_tokens(CONFIG)
    new = np.asarray(random_params(CONFIG, seed=5)["token_embedding"]["embedding"])
    adapter = random_adapter(CONFIG) | {"token_embedding": {"embedding": new}}
    whole = lora.attach(params, adapter)
    assert np.array_equal(flatten(whole)[WHOLE], new)
    assert jax.tree.all(jax.tree.map(np.array_equal, lora.detach(whole), adapter))
    merged = lora.merge(whole)
    assert flatten(merged).keys() == parameter_shapes(CONFIG).keys()
    assert np.array_equal(flatten(merged)[WHOLE], new)
    logits = [forward(some, config=CONFIG, src=src, tgt=tgt) for some in (whole, merged)]
    assert error(*logits) < ROUNDED
    other = flatten(lora.attach(whole, random_adapter(CONFIG)))
    assert other.keys() == flatten(adapted(CONFIG)).keys()
    assert other[WHOLE] is flatten(params)[WHOLE]
    with pytest.raises(InputError, match="have an adapter"):
        convert.to_torch(lora.attach(params, {"token_embedding": {"embedding": new}}), CONFIG)
    mesh = make_mesh("data=1")
    places = flatten(parameter_shardings(mesh, whole, CONFIG))
    assert places["token_embedding/base_embedding"] == places[WHOLE]


@pytest.mark.parametrize("whole", [(), (WHOLE,)], ids=str)
def test_a_step_trains_what_the_adapter_has_and_keeps_moments_of_its_size(whole):
    params = random_params(CONFIG)
    leaves = {name: flatten(params)[name] for name in whole}
    params = lora.attach(params, random_adapter(CONFIG) | nest(leaves))
    optimizer = optax.adamw(1e-2)
    state = optimizer.init(trainable(params, ()))
    names = [name for name in flatten(params) if name.endswith(("/lora_a", "/lora_b"))]
    assert {*flatten(state[0].mu)} == {*names, *whole}
    decays = flatten(decayed(trainable(params, ())))
    assert all(decays[name] for name in names)
    (batch,) = measure.random_batches(CONFIG, 1)
    new, _, loss = jax.jit(make_train_step(CONFIG, optimizer))(params, state, batch)
    assert np.isfinite(loss)
    for name, leaf in flatten(new).items():
        assert np.array_equal(leaf, flatten(params)[name]) == (name not in {*names, *whole}), name


def test_patterns_of_freeze_name_factors_where_there_are_any():
    names = [*flatten(adapted(CONFIG))]
    left = trained_names(names, ("encoder/*",))
    assert left
    assert all(name.startswith("decoder/") and "lora_" in name for name in left)
    with pytest.raises(InputError, match="freeze='token_embedding/embedding' matches no parameter"):
        trained_names(names, ("token_embedding/*", "token_embedding/embedding")[1:])


def test_dropout_is_that_of_what_an_adapter_reads_for_each_product_alone():
    width = CONFIG.d_model
    eye, zeros = np.eye(width, dtype=np.float32), np.zeros((width, width), np.float32)
    leaves = {"kernel": zeros, "lora_a": eye, "lora_b": eye, "lora_scale": np.float32(3)[...]}
    leaves = jax.tree.map(jnp.asarray, leaves)
    x = jnp.ones((7, 29, width))

    def dropped(rate, key=5):
        layer = layers.Linear(CONFIG, Execution(lora_dropout=rate))
        rngs = {} if key is None else {"dropout": jax.random.key(key)}
        return np.asarray(layer.apply({"params": leaves}, x, rngs=rngs))

    assert np.array_equal(dropped(0.0), 3 * x)
    assert np.array_equal(dropped(0.25, key=None), 3 * x)
    kept = dropped(0.25)
    assert set(np.unique(kept)) == {0, 4}
    assert abs(kept.mean() - 3) < 0.1
    assert not np.array_equal(kept, dropped(0.25, key=6))

    class Two(layers.nn.Module):
        def setup(self):
            execution = Execution(lora_dropout=0.25)
            self.one, self.other = (layers.Linear(CONFIG, execution) for _ in range(2))

        def __call__(self, x):
            return self.one(x), self.other(x)

    both = {"params": {"one": leaves, "other": leaves}}
    assert not np.array_equal(*Two().apply(both, x, rngs={"dropout": jax.random.key(5)}))


@pytest.mark.parametrize(
    "fields",
    [
        {"scan_layers": True},
        pytest.param({"remat": "dots"}, marks=pytest.mark.exhaustive),
        pytest.param({"product": "wide_sums"}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_forms_of_execution_differ_by_rounding(fields):
    config = small_config("pre_norm", num_encoder_layers=2, num_decoder_layers=2)
    params, (src, tgt) = adapted(config), random_tokens(config)
    plain, other = (
        forward(params, config, src, tgt, execution=Execution(**some)) for some in ({}, fields)
    )
    assert error(other, plain) < ROUNDED


@pytest.mark.exhaustive
def test_an_adapter_in_bfloat16_computation_keeps_float32_gradients():
    params, (batch,) = adapted(CONFIG), measure.random_batches(CONFIG, 1)
    half = Execution(compute_dtype="bfloat16")
    losses = []
    for execution in (Execution(), half):
        optimizer = optax.sgd(1.0)
        step = jax.jit(make_train_step(CONFIG, optimizer, execution))
        new, _, loss = step(params, optimizer.init(trainable(params, ())), batch)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(new)} == {"float32"}
        losses.append(float(loss))
    assert losses[0] != losses[1]
    assert abs(losses[0] - losses[1]) < 0.05


@pytest.mark.exhaustive
@pytest.mark.parametrize("beam_size", [1, 4])
def test_greedy_search_and_beams_of_the_merged_model_are_equal(beam_size):
    config = small_config("bart")
    params, (src, _) = adapted(config), random_tokens(config)
    merged, unmerged = (
        generate(some, config, src, max_new_tokens=9, beam_size=beam_size)
        for some in (lora.merge(params), params)
    )
    assert np.array_equal(merged.tokens, unmerged.tokens)


@pytest.mark.exhaustive
def test_a_run_places_its_adapter_on_a_mesh():
    mesh = make_mesh("data=1")
    settings = TrainingConfig(steps=2, warmup_steps=1, lora_rank=2, lora_targets=("*/key",))
    params, batches = random_params(CONFIG), measure.random_batches(CONFIG, 2)
    state = sharded_init_state(mesh, CONFIG, settings, params)
    placed = parameter_shardings(mesh, state.params, CONFIG)
    assert jax.tree.all(
        jax.tree.map(lambda leaf, place: leaf.sharding == place, state.params, placed)
    )
    step = sharded_train_step(mesh, CONFIG, settings)
    before = {name: np.asarray(leaf) for name, leaf in flatten(state.params).items()}
    for batch in batches:
        state, metrics = step(state, batch)
        assert metrics.finite
    for name, leaf in flatten(state.params).items():
        assert np.array_equal(leaf, before[name]) == (not name.endswith(("_a", "_b"))), name


INNER = "decoder/layers_0/feed_forward/inner"
init = functools.partial(lora.init, jax.random.key(0), CONFIG)


def changed(**changes):
    """Return parameters with an adapter of which one product has other leaves; None is absent."""
    leaves = flatten(adapted(CONFIG)) | {f"{INNER}/{name}": x for name, x in changes.items()}
    return nest({path: leaf for path, leaf in leaves.items() if leaf is not None})


REFUSED = {
    "a target that is none": (
        lambda: init(4, ("*/queri",)),
        "lora_targets='*/queri' matches no parameter; the nearest are ",
    ),
    "a table": (
        lambda: init(4, ("token_embedding",)),
        "lora_targets='token_embedding' matches no parameter; the nearest are ",
    ),
    "a rank above the width": (
        lambda: init(43, ("*/inner",)),
        f"lora_rank=43 must be at most 42: the kernel of {INNER} is 42 x 53",
    ),
    "no targets": (
        lambda: init(4, ()),
        "lora_targets is empty; name products, for example '*/query'",
    ),
    "no rank": (lambda: init(0, EVERY), "lora_rank=0 must be at least 1"),
    "another model's adapter": (
        lambda: lora.attach(
            random_params(CONFIG), random_adapter(small_config("vaswani2017"), targets=("*/key",))
        ),
        "the adapter has decoder/layers_1/cross_attention/key/lora_a, and the model no decoder",
    ),
    "another width": (
        lambda: apply(
            lora.attach(
                random_params(CONFIG), random_adapter(dataclasses.replace(CONFIG, d_ff=54))
            ),
            CONFIG,
            *random_tokens(CONFIG),
        ),
        f"the adapter has {INNER}/lora_a in the shapes [(42, 3), (3, 54), ()], not "
        "[(42, 3), (3, 53), ()]",
    ),
    "a whole parameter of another shape": (
        lambda: lora.attach(
            random_params(CONFIG), {"token_embedding": {"embedding": np.zeros((2, 3), np.float32)}}
        ),
        "the adapter has token_embedding/embedding in the shapes (2, 3), not (",
    ),
    "no adapter": (
        lambda: lora.attach(random_params(CONFIG), None),
        "adapter=None must be a nested dict, as lora.init returns",
    ),
    "one factor": (
        lambda: lora.merge(changed(lora_b=np.zeros((4, 53)))),
        f"the adapter has {INNER}/lora_a in the shapes [(42, 3), (4, 53), ()], not [(42, 3), (3,",
    ),
    "no second factor": (
        lambda: lora.merge(changed(lora_b=None)),
        f"the adapter has {INNER}/lora_a in the shapes [(42, 3), None, ()], not [(42, 3), (3, 53)",
    ),
    "no scale": (
        lambda: apply(changed(lora_scale=None), CONFIG, *random_tokens(CONFIG)),
        f"the adapter has {INNER}/lora_a in the shapes [(42, 3), (3, 53), None], not",
    ),
    "an alpha that is no number": (
        lambda: init(4, EVERY, alpha=float("nan")),
        "alpha=nan must be a finite number, at least",
    ),
    "an alpha that float32 lacks": (
        lambda: init(4, EVERY, alpha=1e-50),
        "alpha=1e-50 must be a finite number, at least",
    ),
    "settings without a rank": (
        lambda: trained_sizes(CONFIG, TrainingConfig(lora_dropout=0.1)),
        "lora_dropout=0.1 needs lora_rank, for example 16",
    ),
    "an adapter in a model that is written": (
        lambda: convert.to_torch(adapted(CONFIG), CONFIG),
        "the parameters have an adapter: add it to the kernels by adapters.lora.merge",
    ),
    "a loop over different layers": (
        lambda: forward(
            adapted(small_config("pre_norm"), targets=("encoder/layers_1/*/query",)),
            small_config("pre_norm"),
            *random_tokens(small_config("pre_norm")),
            execution=Execution(scan_layers=True),
        ),
        "scan_layers=True needs an adapter of the same targets and rank in every layer",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_meant_is_refused_in_one_line(call, message):
    with unchecked(), pytest.raises(InputError) as refused:  # None is no nested dict
        call()
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)
