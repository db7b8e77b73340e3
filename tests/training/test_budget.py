"""The budget beside what XLA says of the compiled step, and beside counts by hand."""

import dataclasses
import functools
import json
import math
import re

import jax
import jax.numpy as jnp
import pytest

from jax_transformer.commands import main as cli
from jax_transformer.config import TransformerConfig
from jax_transformer.convert.families import get_family
from jax_transformer.convert.families.family import config_to_json
from jax_transformer.errors import InputError
from jax_transformer.model.transformer import apply, init_params
from jax_transformer.model.tree import parameter_count
from jax_transformer.runtime import host_memory
from jax_transformer.runtime.topologies import DEVICES
from jax_transformer.training.budget import (
    SIZES,
    Workload,
    activations_per_row,
    budget,
    check_training,
    compile_step,
    step_flops,
)
from jax_transformer.training.config import TrainingConfig
from jax_transformer.training.objective import cross_entropy
from tests.models import small_config
from tests.tiers import tiered

ROWS, LENGTH = 4, 32
FLOPS_FACTOR = 1.05  # XLA counts sums, norms and softmax too
MEMORY_FACTOR = 1.15


def make_config(**fields):
    sizes = {
        "src_vocab_size": 252,
        "tgt_vocab_size": 252,
        "d_model": 128,
        "num_heads": 2,
        "d_ff": 512,
        "num_encoder_layers": 1,
        "num_decoder_layers": 1,
        "dropout": 0.0,
    }
    return TransformerConfig.preset("vaswani2017", **sizes | fields)


def half(**fields):
    return TrainingConfig(compute_dtype="bfloat16", **fields)


@functools.cache
def compile_loss(config, target_length=LENGTH):
    """Return the compiled loss and gradients of float32 parameters."""

    def loss(params, src, tgt):
        return cross_entropy(apply(params, config, src, tgt), tgt, config.pad_id, 0.1)[0]

    params = jax.eval_shape(lambda: init_params(jax.random.key(0), config))
    ids = (jax.ShapeDtypeStruct((ROWS, length), jnp.int32) for length in (LENGTH, target_length))
    return jax.jit(jax.value_and_grad(loss)).lower(params, *ids).compile()


GATED = {"d_kv": 96, "gated_feed_forward": True, "output_projection": "linear"}
GROUPED = {"num_heads": 4, "d_kv": 32, "num_kv_heads": 1, "d_v": 128}
MERGED = GROUPED | {"decoder_attention": "merged"}
WIDER = {"token_embeddings": "separate", "d_kv": 64, "encoder_d_model": 256, "encoder_d_ff": 1024}
RECURRENT = {"decoder_attention": "ssru_then_cross"}


@pytest.mark.parametrize(
    ("fields", "target_length", "counting"),
    [
        ({}, LENGTH, ()),
        pytest.param({}, LENGTH // 4, (), marks=pytest.mark.exhaustive),
        (GATED, LENGTH, ("d_kv", "gated_feed_forward")),
        (GROUPED, LENGTH, ("num_kv_heads", "d_v")),
        (MERGED, LENGTH, ("num_kv_heads", "d_v", "decoder_attention")),
        (WIDER, LENGTH, ("encoder_d_model",)),
        (RECURRENT, LENGTH, ("decoder_attention",)),
    ],
)
def test_flops_are_those_of_the_compiled_step(fields, target_length, counting):
    """And those of a model without one of the fields are others."""
    config = make_config(**fields)
    counted = compile_loss(config, target_length).cost_analysis()["flops"]
    ratio = counted / step_flops(config, ROWS, LENGTH, target_length)
    print(f"XLA counts {ratio:.3f} times the products' FLOPs")
    assert 1 <= ratio < FLOPS_FACTOR
    for name in counting:
        usual = dataclasses.replace(config, **{name: getattr(TransformerConfig(), name)})
        assert not 1 <= counted / step_flops(usual, ROWS, LENGTH) < FLOPS_FACTOR, name


def test_activations_are_the_compiled_steps_memory():
    workload = Workload(1, LENGTH, training=TrainingConfig())
    expected = ROWS * activations_per_row(make_config(), workload, 1)["none"]
    ratio = compile_loss(make_config()).memory_analysis().temp_size_in_bytes / expected
    print(f"XLA wants {ratio:.2f} times the residuals")
    assert 1 / MEMORY_FACTOR < ratio < MEMORY_FACTOR


def test_rematerialisation_keeps_less():
    kept = activations_per_row(make_config(dropout=0.1), Workload(1, LENGTH), 1)
    assert kept["layers"] < kept["dots"] < kept["none"]


@pytest.mark.exhaustive
def test_the_whole_budget_is_the_memory_of_a_step_for_a_tpu():
    pytest.importorskip("libtpu")
    sizes = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    sizes |= {"src_vocab_size": 32_000, "tgt_vocab_size": 32_000}
    config = TransformerConfig.preset("vaswani2017", **sizes)
    workload = Workload(32, 64)
    step = compile_step(config, workload, "v5e:1x1")
    ratio = budget(config, workload).total("none") / step.memory_analysis().peak_memory_in_bytes
    print(f"computed / XLA's peak {ratio:.2f}")
    assert 1 / MEMORY_FACTOR < ratio < MEMORY_FACTOR


def test_rematerialised_layers_keep_their_input_alone():
    shallow, deep = (
        activations_per_row(
            make_config(num_encoder_layers=depth, num_decoder_layers=depth), Workload(1, LENGTH), 1
        )["layers"]
        for depth in (1, 5)
    )
    assert deep - shallow == 4 * 2 * LENGTH * 128 * 2  # bytes: 4 layers more, 2 stacks, bfloat16


def test_parameters_of_the_papers_models_are_counted_exactly():
    for name, d_model, d_ff in (("base", 512, 2048), ("big", 1024, 4096)):
        config = TransformerConfig.preset("vaswani2017", **SIZES[name][0])
        norm, attention = 2 * d_model, 4 * d_model**2
        feed_forward = 2 * d_model * d_ff + d_ff + d_model
        expected = 37_000 * d_model
        expected += 6 * (attention + feed_forward + 2 * norm)
        expected += 6 * (2 * attention + feed_forward + 3 * norm)
        found = budget(config, Workload(rows=1, length=2))
        print(f"{name}: {found.num_parameters:,}")
        assert found.num_parameters == expected
        assert found.parameters == 2 * found.gradients == 4 * expected
        assert found.adam_moments == 8 * expected


# Counted in transformers' models of these sizes, built without memory: their parameters without
# sinusoids, with final_logits_bias and, in T5 v1.1, mT5 and UMT5, with a head of its own.
COUNTS = {
    "bart": 406_341_721,
    "mbart": 611_129_542,
    "m2m100": 483_905_536,
    "pegasus": 568_796_007,
    "blenderbot": 2_696_276_808,
    "t5": 60_506_624,
    "t5_v1_1": 222_903_552 + 32_128 * 768,
    "mt5": 172_119_424 + 250_112 * 512,
    "umt5": 175_333_376 + 256_384 * 512,
}


@pytest.mark.parametrize("preset", tiered(COUNTS, ["bart", "t5_v1_1"]))
def test_parameters_of_presets_are_those_of_transformers(preset):
    found = budget(TransformerConfig.preset(preset), Workload(rows=1, length=2))
    assert found.num_parameters == COUNTS[preset]


@pytest.mark.exhaustive
def test_the_command_takes_the_config_of_a_model(tmp_path, run):
    config = TransformerConfig.preset("marian", d_model=16, num_heads=2, d_ff=8, max_length=64)
    values = config_to_json(get_family("marian"), config)
    own = {"model_type": "jax_transformer", "config": config.to_dict()}
    for name, content in (("foreign", values), ("own", own)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(content))
    expected = sum(leaf.size for leaf in jax.tree.leaves(init_params(jax.random.key(0), config)))
    workload = ["--batch-rows", "4", "--length", "6"]
    for place in ("foreign", "own", "foreign/config.json"):
        shown = run("--model", str(tmp_path / place), *workload)
        assert f"{expected:,} parameters; 4 x 6 tokens" in shown
    assert "--model x takes the place of --size and" in run("--model", "x", "--preset", "t5")
    (tmp_path / "own" / "config.json").write_text('{"model_type": "jax_transformer"}')
    assert "holds no config of a model" in run("--model", str(tmp_path / "own"))


def test_a_mesh_divides_what_its_axes_spread():
    config = make_config(d_ff=520)
    alone = budget(config, Workload(7, LENGTH))
    data = budget(config, Workload(7, LENGTH, mesh="data=8"))
    all_axes = budget(config, Workload(7, LENGTH, mesh="fsdp=2, tensor=4"))

    assert (alone.num_devices, alone.rows) == (1, 7)
    assert (data.num_devices, data.rows) == (8, 8)
    assert data.parameters == alone.parameters
    assert data.activations["none"] == alone.activations["none"] / 7

    params = jax.eval_shape(lambda: init_params(jax.random.key(0), config))
    leaves = jax.tree_util.tree_leaves_with_path(params)
    expected = 0
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        shards = 1
        if leaf.ndim == 2:
            # Two heads cannot be dealt to four devices.
            shards = 2 if "attention" in name else 8
        elif name.endswith("inner/bias"):
            shards = 4
        expected += 4 * math.prod(leaf.shape) / shards
    assert all_axes.parameters == expected
    assert all_axes.activations["none"] < alone.activations["none"] * 4 / 7
    assert all_axes.flops == step_flops(config, 8, LENGTH)


def test_frozen_parameters_have_neither_gradients_nor_moments():
    config = make_config(d_ff=520)
    alone = budget(config, Workload(7, LENGTH))
    frozen = budget(config, Workload(7, LENGTH, training=half(freeze=("*coder/*",))))
    table = 252 * 128  # the only parameter that is left
    assert (frozen.gradients, frozen.adam_moments) == (2 * table, 8 * table)
    assert frozen.total("none") == alone.total("none") - 10 * (alone.num_parameters - table)


def test_time_is_flops_over_what_the_devices_reach():
    found = budget(make_config(), Workload(8, LENGTH, mesh="data=8"))
    seconds = found.seconds(DEVICES["H100"], 0.5)
    assert seconds == pytest.approx(found.flops / 8 / 989e12 / 0.5)


@pytest.fixture
def run(capsys):
    """The command as a function: what it prints in one line, or refuses."""

    def run(*options):
        try:
            cli.main(["budget", *options])
        except SystemExit as left:
            assert capsys.readouterr().out == ""
            return str(left)
        return " ".join(capsys.readouterr().out.split())

    return run


TINY = "--vocab-size 50 --d-model 8 --num-heads 2 --d-ff 16 --batch-rows 4 --length 6".split()


def test_the_command_prints_the_tables(run):
    shown = run(*TINY, "--mesh", "data=2", "--steps", "9")
    config = TransformerConfig.preset(
        "vaswani2017", src_vocab_size=50, tgt_vocab_size=50, d_model=8, num_heads=2, d_ff=16
    )
    found = budget(config, Workload(4, 6, mesh="data=2"))
    assert f"{found.num_parameters:,} parameters; 4 x 6 tokens a side" in shown
    assert "9 steps" in shown
    for name in DEVICES:
        assert name in shown


TINY_COMPILED = [*TINY, "--num-encoder-layers", "1", "--num-decoder-layers", "1"]


@pytest.mark.exhaustive
def test_the_command_compiles_the_step_for_a_slice(run):
    pytest.importorskip("libtpu")
    options = ["--compile", "v5e:2x2", "--batching", "packed", "--dropout", "0"]
    shown = run(*TINY_COMPILED, *options)
    assert "on 4 devices (data=4)" in shown
    assert "v5e:2x2: the step fits: XLA's peak is" in shown
    assert "of 16.91 GB" in shown
    assert "FLOPs on a chip" in shown
    assert "nothing was timed. Heads of " in shown


@pytest.mark.exhaustive
def test_the_command_says_by_how_much_a_step_does_not_fit(run):
    pytest.importorskip("libtpu")
    shown = run(*TINY_COMPILED, "--compile", "v5e:1x1", "--batch-rows", str(2**25))
    found = re.search(r"does not fit: XLA needs at least (.*) GB of 16.91 GB \((.*) GB too", shown)
    needed, excess = (float(number.replace(",", "")) for number in found.groups())
    assert excess == pytest.approx(needed - 16.91, abs=0.02)
    assert excess > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--compile", "v5e"], "topology='v5e': a slice of v5e has 2 dimensions"),
        (["--compile", "v5e:2x4", "--mesh", "data=4"], "mesh='data=4' is 4 devices, but there are"),
    ],
)
def test_a_slice_that_does_not_match_is_refused_before_any_work(run, options, message):
    pytest.importorskip("libtpu")
    assert run(*TINY, *options).startswith(f"error: {message}")


def test_a_training_that_the_machine_cannot_hold_is_refused(monkeypatch):
    """It counts the gradients and moments of what is trained, and the packed batch."""
    config = small_config("vaswani2017")
    bytes_of_parameters = 4 * parameter_count(config)
    monkeypatch.setattr(host_memory, "total_memory", lambda: 3 * bytes_of_parameters)
    with pytest.raises(InputError, match=r"training a model of d_model=42 .* choose smaller sizes"):
        check_training(config, TrainingConfig())
    frozen = TrainingConfig(freeze=("*coder/*",))
    check_training(config, frozen)
    packed = dataclasses.replace(frozen, batching="packed", max_tokens=100_000)
    with pytest.raises(InputError, match=r"a batch of 100,000 tokens a side .* lower max_tokens"):
        check_training(config, packed)


def test_an_adapter_has_the_gradients_and_moments_of_its_factors_alone(run):
    config = make_config(num_encoder_layers=2)
    whole, adapter = (
        budget(config, Workload(ROWS, LENGTH, training=half(lora_rank=n))) for n in (None, 4)
    )
    factors = (2 + 2) * 2 * 4 * (128 + 128)  # two products of each of four attentions
    scales = (2 + 2) * 2
    assert adapter.num_parameters == whole.num_parameters + factors + scales
    assert (adapter.gradients, adapter.adam_moments) == (2 * factors, 8 * factors)
    assert whole.adam_moments == 8 * whole.num_parameters
    # 6 layers, 8 bytes, 4 * (512 + 512) numbers.
    assert "0.20 MB" in run("--lora-rank=4", "--lora-targets", "encoder/*/query")
    assert "lora_rank=513 must be at most 512" in run("--lora-rank=513")
