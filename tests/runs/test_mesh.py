"""Training on every mesh of eight devices is training on one: losses, masks, samples, restores.

Run as a module, this file prints what differs, as JSON: a process of its own has eight devices.
By hand: `python -m tests.runs.test_mesh CACHE`.
"""

import dataclasses
import io
import itertools
import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from rich.console import Console

from jax_transformer import generate
from jax_transformer.commands import train
from jax_transformer.kernels.dropout import dropout
from jax_transformer.kernels.execution import Execution
from jax_transformer.model.tree import parameter_shardings
from jax_transformer.runs import loop
from jax_transformer.runs.checkpoints import restore
from jax_transformer.runs.mesh import fill_rows, sharded_batches, sharded_epoch
from jax_transformer.runs.metrics import METRICS_FILE, read_metrics
from jax_transformer.runs.state import RunSettings
from jax_transformer.runtime.sharding import AXES, AXIS_TYPES, make_mesh, replicated, row_sharding
from jax_transformer.text.batches import make_batch
from jax_transformer.text.plan import PlannedBatch, epoch_layout, plan_epoch
from jax_transformer.tokenizers import train_byte_pair
from jax_transformer.training.config import TrainingConfig
from jax_transformer.training.objective import batch_loss
from jax_transformer.training.step import (
    init_state,
    sharded_init_state,
    sharded_train_step,
    state_shardings,
)
from jax_transformer.translation.translate import translate
from tests.compilation import QUICKLY
from tests.models import small_config, tiny_model
from tests.programs import run_python
from tests.runs.kill_resume import Task, tiny_task
from tests.runs.runs import same_bits
from tests.text.texts import corpus_of
from tests.tiers import tiered

CONTROL = "what XLA has to complain of:"
EIGHT = [
    f"data={data},fsdp={fsdp},tensor={8 // data // fsdp}"
    for data, fsdp in itertools.product((1, 2, 4, 8), repeat=2)
    if data * fsdp <= 8
]
QUICK = "data=2,fsdp=1,tensor=2"
LONG = ["data=8,fsdp=1,tensor=1", "data=1,fsdp=8,tensor=1", "data=2,fsdp=2,tensor=2"]
FEWER = ["data=2,fsdp=1,tensor=1", "data=1,fsdp=2,tensor=2"]
SOME, EVERY = (FEWER[0], *LONG[1:]), (*FEWER, *EIGHT)
STEPS, FEWER_STEPS = 200, 20  # on the meshes of LONG, and on others
ROWS, PAIRS, LENGTH, VOCABULARY = 11, 43, 8, 40
FLAGS = (
    f"--xla_force_host_platform_device_count=8 {QUICKLY} "
    # Eight devices on one busy processor are late, not lost.
    "--xla_cpu_collective_call_terminate_timeout_seconds=600"
)

CONFIG = small_config(
    "vaswani2017",
    **dict.fromkeys(("src_vocab_size", "tgt_vocab_size"), VOCABULARY),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), 1),
    d_model=16,
    num_heads=8,
    d_ff=24,
    dropout=0.0,
    attention_dropout=0.2,
    # The slope of relu jumps at 0: an input within rounding of it has another gradient on another
    # mesh. With relu that happened after 166 steps, to unit 19 of the decoder, on fsdp=8.
    activation="gelu",
)
SETTINGS = TrainingConfig(
    warmup_steps=50,
    learning_rate_factor=0.3,
    max_tokens=(ROWS + 1) * LENGTH,
    bucket_count=1,
    evaluation_interval=100,
)


def corpus():
    random = np.random.default_rng(0)
    sides = [
        tuple(random.integers(3, VOCABULARY, random.integers(3, LENGTH + 1)) for _ in range(PAIRS))
        for _ in range(2)
    ]
    return corpus_of(*sides, src_vocab_size=VOCABULARY, tgt_vocab_size=VOCABULARY)


def devices(sizes):
    count = int(np.prod([int(part.split("=")[1]) for part in sizes.split(",")]))
    return make_mesh(sizes, jax.devices()[:count])


def placed(tree, mesh):
    return jax.device_put(jax.tree.map(jnp.copy, tree), parameter_shardings(mesh, tree, CONFIG))


def losses_on(sizes, start, steps):
    """Return the losses of the steps on a mesh, and the rows of its batches."""
    mesh, encoded = devices(sizes), corpus()
    plan = fill_rows(plan_epoch(encoded, SETTINGS, 0), mesh, SETTINGS.num_microbatches)
    batches = list(sharded_batches(mesh, encoded, plan))
    state, losses = placed(start, mesh), []
    print(f"compiling for {sizes}", file=sys.stderr, flush=True)
    make = sharded_train_step(mesh, CONFIG, SETTINGS).lower(state, batches[0]).compile()
    for batch in itertools.islice(itertools.cycle(batches), steps):
        state, metrics = make(state, batch)
        losses.append(float(metrics.loss))
    return np.array(losses), len(batches[0].src)


def compare_losses(meshes, steps, fewer_steps):
    """Return how far losses differ from those on one device: of the first step, and at worst."""
    start = jax.device_get(init_state(CONFIG, SETTINGS))
    one, rows = losses_on("data=1,fsdp=1,tensor=1", start, steps)
    found = {"one": {"rows": rows, "losses": [one[0], one[-1]]}}
    for sizes in meshes:
        many, rows = losses_on(sizes, start, steps if sizes in LONG else fewer_steps)
        differences = np.abs(many / one[: len(many)] - 1)
        found[sizes] = {
            "rows": rows,
            "steps": len(many),
            "first": differences[0],
            "worst": differences.max(),
        }
    return found


def compare_masks(meshes):
    """Return on which meshes dropout's masks are others, whatever rows of padding follow."""

    def drop(mesh, x, weights, key):
        heads = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), "tensor"))
        weights = jax.lax.with_sharding_constraint(weights, heads)
        own = [dropout(array, 0.3, key) for array in (x, weights)]
        again = jax.checkpoint(partial(dropout, rate=0.3, key=key))
        return own, jax.grad(lambda x: again(x).sum())(x)

    def arrays(rows):
        return jnp.ones((rows, LENGTH, 16)), jnp.ones((rows, 8, LENGTH, LENGTH))

    key, unequal = jax.random.key(1), []
    expected = jax.jit(partial(drop, make_mesh()))(*arrays(ROWS), key)
    assert 0.2 < np.mean(np.asarray(expected[0][1]) == 0) < 0.4
    for sizes in meshes:
        mesh = devices(sizes)
        rows = row_sharding(mesh)
        run = jax.jit(partial(drop, mesh), in_shardings=(rows, rows, replicated(mesh)))
        found = run(*arrays(16), key)
        pairs = zip(*map(jax.tree.leaves, (found, expected)), strict=True)
        if not all(np.array_equal(many[:ROWS], one) for many, one in pairs):
            unequal.append(sizes)
    return unequal


def compare_parts():
    """Return how far loss and gradient, with the loss in parts on eight devices, are from one's."""
    encoded, found = corpus(), {}
    params = jax.device_get(init_state(CONFIG, SETTINGS)).params

    @partial(jax.jit, static_argnums=1)
    def run(batch, execution):
        def mean_loss(params):
            total, count = batch_loss(params, batch, CONFIG, 0.1, execution=execution)
            return total / count

        return jax.value_and_grad(mean_loss)(params)

    for batching in ("buckets", "packed"):
        settings = dataclasses.replace(SETTINGS, batching=batching, pack_length=LENGTH)
        plan = plan_epoch(encoded, settings, 0)[:1]
        loss, gradient = run(make_batch(encoded, plan[0]), Execution())
        largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradient))
        for sizes in ("data=8", "data=2,fsdp=4"):
            mesh = make_mesh(sizes)
            (spread,) = sharded_batches(mesh, encoded, fill_rows(plan, mesh, 1))
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                ours, many = run(spread, Execution(loss_parts=4))
            leaves = zip(jax.tree.leaves(gradient), jax.tree.leaves(many), strict=True)
            found[f"{batching} {sizes}"] = {
                "rows": [plan[0].rows, len(spread.src)],
                "loss": abs(ours / loss - 1),
                "gradient": max(np.abs(a - np.asarray(b)).max() for a, b in leaves) / largest,
            }
    return found


def compare_starts():
    """Return whether a state made in parts is that of one device, and its largest part's share."""
    settings = dataclasses.replace(SETTINGS, ema_decay=0.9)
    expected = init_state(CONFIG, settings)
    found = {}
    for sizes in ("data=1,fsdp=1,tensor=1", "data=1,fsdp=8,tensor=1", "data=2,fsdp=2,tensor=2"):
        state = sharded_init_state(devices(sizes), CONFIG, settings)
        pairs = zip(
            *(jax.tree.leaves(s._replace(key=None)) for s in (state, expected)), strict=True
        )
        matrices = [leaf for leaf in jax.tree.leaves(state.params) if leaf.ndim == 2]
        found[sizes] = {
            "equal": all(np.array_equal(ours, theirs) for ours, theirs in pairs),
            "share": max(leaf.addressable_shards[0].data.size / leaf.size for leaf in matrices),
        }
    return found


def compare_resumed(directory):
    """Return what a run that goes on with 8, 1, 4, 2 devices does otherwise than one on a device.

    Twelve steps, three on each mesh, with some parameters frozen.
    """
    encoded, seen = corpus(), {}
    config = dataclasses.replace(CONFIG, d_ff=23)  # which tensor=2 does not divide
    fixed = dataclasses.replace(SETTINGS, evaluation_interval=3, freeze=("encoder/*/outer/*",))

    def go_on(name, sizes, steps):
        some = dataclasses.replace(fixed, steps=steps)
        settings = RunSettings(config, some, tokenizer, "0" * 64, {})
        resumed = None
        if (directory / name / loop.CHECKPOINTS).exists():
            resumed = restore(directory / name / loop.CHECKPOINTS, quiet)
        run = loop.Run(directory / name, settings, resumed, mesh=devices(sizes))

        def noted(*arguments):
            for numbered in sharded_epoch(*arguments):
                rows = np.asarray(numbered.batch.src)
                seen.setdefault(name, []).append([row.tobytes() for row in rows if row.any()])
                yield numbered

        with mock.patch.object(loop, "sharded_epoch", noted):
            loop.train(run, encoded, held_out, quiet)
        return run

    quiet = Console(file=io.StringIO(), soft_wrap=True)
    words = [chr(ord("a") + number) for number in range(26)]
    tokenizer = train_byte_pair(words, vocab_size=31)
    held_out = corpus_of(
        *zip(*encoded.read(np.arange(5)).sides(), strict=True), VOCABULARY, VOCABULARY
    )
    go_on("one", "data=1", 12)
    unequal, parts = [], ("data=2,fsdp=2,tensor=2", "data=1", "fsdp=4", "fsdp=2")
    for steps, sizes in zip((3, 6, 9, 12), parts, strict=True):
        run = go_on("many", sizes, steps)
        saved = restore(run.directory / loop.CHECKPOINTS, quiet)
        for other in parts:
            mesh = devices(other)
            again = loop._start(dataclasses.replace(run, resumed=saved, mesh=mesh))
            where = state_shardings(mesh, config, fixed)
            assert jax.tree.map(lambda leaf: leaf.sharding, again.state) == where
            if not same_bits(again, saved.read()):
                unequal.append([steps, sizes, other])
    one, many = (read_metrics(directory / name / METRICS_FILE) for name in ("one", "many"))
    names = ("loss", "validation_loss")
    pairs = [
        (ours[name], theirs[name])
        for ours, theirs in zip(many, one, strict=True)
        for name in names
        if name in theirs
    ]
    shown = quiet.file.getvalue()
    return {
        "warnings": [line for line in shown.splitlines() if "WARNING" in line],
        "restores": len(parts) ** 2,
        "unequal": unequal,
        "same samples": seen["one"] == seen["many"],
        "batches": len(seen["one"]),
        "losses": len(pairs),
        "worst loss": max(abs(ours / theirs - 1) for ours, theirs in pairs),
    }


def compare_translations():
    """Return how many translations differ between one device and eight."""
    words = ["".join(pair) for pair in itertools.product("abc", repeat=2)]
    lines = [" ".join(words[: 1 + number % 4]) for number in range(11)] + [""]
    model = tiny_model(lines, 12, max_length=32)
    found = {"lines": len(lines), "unequal": []}
    for beam_size, *meshes in (
        (1, "data=8,fsdp=1,tensor=1", "data=2,fsdp=2,tensor=2"),
        (2, "data=2,fsdp=2,tensor=2"),
    ):
        options = {"beam_size": beam_size, "num_hypotheses": beam_size}
        expected = list(translate(model, lines, **options))
        for sizes in meshes:
            ours = list(translate(model, lines, **options, mesh=devices(sizes)))
            for one, many in zip(itertools.chain(*expected), itertools.chain(*ours), strict=True):
                same = np.array_equal(one.tokens, many.tokens) and one.text == many.text
                if not same or abs(one.score - many.score) > 1e-5:
                    found["unequal"].append([beam_size, sizes, one.text, many.text])
    mesh = make_mesh("data=8")
    params = jax.device_put(model.params, parameter_shardings(mesh, model.params, model.config))
    src = np.full((16, 3), 5)
    with jax.set_mesh(mesh):
        hypotheses = generate(params, model.config, src, max_new_tokens=4)
    found["rows a device"] = len(hypotheses.tokens.addressable_shards[0].data)
    return found


def compare_plain_text():
    """Return how plain text is trained otherwise on eight devices than on one, by each optimizer.

    For each mesh: the steps, whether their batches are the same, and how far the losses are apart.
    """

    def train(sizes):
        mesh = devices(sizes)
        state = sharded_init_state(mesh, config, settings)
        make, losses, batches = sharded_train_step(mesh, config, settings), [], []
        epoch = sharded_epoch(mesh, encoded, settings, epoch_layout(encoded, settings), 0, (0, 0))
        for numbered in itertools.islice(epoch, 3):
            state, metrics = make(state, numbered.batch)
            losses.append(float(metrics.loss))
            rows = numbered.planned.rows  # a mesh adds rows of padding
            batches += [np.asarray(ids)[:rows] for ids in numbered.batch]
        return np.array(losses), batches

    run, encoded, _ = tiny_task(Task(3, batching="packed", objective="ul2"))
    config, found = dataclasses.replace(run.config, dropout=0.0), {}
    for optimizer in ("adam", "adafactor", "muon"):
        changes = {"optimizer": optimizer, "schedule": "constant"}
        settings = dataclasses.replace(run.training_config, **changes)
        one, expected = train("data=1")
        for sizes in ("data=8", "data=2,fsdp=2,tensor=2"):
            many, batches = train(sizes)
            pairs = zip(batches, expected, strict=True)
            same = all(np.array_equal(ours, its) for ours, its in pairs)
            found[f"{optimizer} {sizes}"] = [len(many), same, np.abs(many / one - 1).max()]
    return found


def rematerialize():
    """Compile what XLA cannot do without a copy of the whole on each device."""
    mesh = make_mesh("data=2,fsdp=2,tensor=2")
    columns = NamedSharding(mesh, PartitionSpec(None, "tensor"))

    def move(x):
        return jax.lax.with_sharding_constraint(x * 2, row_sharding(mesh))

    jax.jit(move, out_shardings=columns).lower(jnp.ones((8, 4))).compile()


def main():
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS}  # JAX has not looked at them yet
    if sys.argv[1] == QUICK:
        print(json.dumps(compare_losses([QUICK], 20, 20), default=float))
        return
    _, cache, *named = sys.argv
    meshes = named or EVERY
    report = {"losses": compare_losses(meshes, STEPS, FEWER_STEPS)}
    print(CONTROL, file=sys.stderr, flush=True)
    rematerialize()
    # From here on: what comes from a cache has no log.
    jax.config.update("jax_compilation_cache_dir", cache)
    compilation_cache.reset_cache()
    report["masks"] = compare_masks(meshes)
    report["parts"] = compare_parts()
    report["starts"] = compare_starts()
    with tempfile.TemporaryDirectory() as directory:
        report["resumed"] = compare_resumed(Path(directory))
    report["translations"] = compare_translations()
    report["plain text"] = compare_plain_text()
    print(json.dumps(report, default=float))


def run_child(*arguments):
    """Return what a process with eight devices prints, and its log."""
    cache = {"JAX_COMPILATION_CACHE_DIR": "", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2"}
    done = run_python("-m", "tests.runs.test_mesh", *arguments, environment=cache)
    return json.loads(done.stdout), done.stderr


@pytest.fixture(
    scope="session", params=tiered([SOME, EVERY], [], [SOME]), ids=["some meshes", "every mesh"]
)
def meshes(request):
    return request.param


@pytest.fixture(scope="session")
def child(meshes):
    return run_child(jax.config.jax_compilation_cache_dir, *meshes)


@pytest.fixture(scope="session")
def report(child):
    return child[0]


def test_losses_on_four_devices_are_those_of_one():
    losses, _ = run_child(QUICK)
    assert losses["one"]["rows"] == ROWS  # which is odd: the mesh fills it up
    assert losses[QUICK]["rows"] == ROWS + 1
    assert losses[QUICK]["first"] <= 1e-6
    assert losses[QUICK]["worst"] <= 1e-5


def test_losses_are_those_of_one_device(report, meshes):
    losses = dict(report["losses"])
    one = losses.pop("one")
    assert one["rows"] == ROWS  # which is odd: other meshes fill it up
    assert one["losses"][1] < 0.8 * one["losses"][0]  # the model learns
    assert sorted(losses) == sorted(meshes)
    assert len(EIGHT) == 10
    for sizes, found in losses.items():
        print(sizes, found)
        assert found["rows"] in (ROWS, 12, 16)
        assert found["steps"] == (STEPS if sizes in LONG else FEWER_STEPS)
        assert found["first"] <= 1e-6
        assert found["worst"] <= 1e-5


def test_nothing_is_rematerialised_involuntarily(child, meshes):
    steps, control = child[1].split(CONTROL)
    assert steps.count("compiling for ") == 1 + len(meshes)
    assert "Involuntary full rematerialization" in control
    assert [line[:300] for line in steps.splitlines() if "Involuntary" in line] == []


def test_masks_are_the_same_on_every_mesh_and_with_rows_of_padding(report):
    assert report["masks"] == []


def test_the_loss_in_parts_of_rows_that_do_not_divide_is_that_of_one_device(report):
    for figures in report["parts"].values():
        print(figures)
        assert figures["rows"][0] % 8 > 0 == figures["rows"][1] % 8
        assert figures["loss"] <= 1e-6
        assert figures["gradient"] <= 1e-6


def test_a_state_is_made_in_the_parts_that_devices_keep(report):
    starts = report["starts"]
    assert all(found["equal"] for found in starts.values())
    assert [found["share"] for found in starts.values()] == [1, 1 / 8, 1 / 4]


def test_a_run_goes_on_with_other_devices(report):
    found = report["resumed"]
    print(found)
    assert found["restores"] == 16
    assert found["unequal"] == []
    assert found["same samples"]
    assert found["batches"] == 12
    assert found["losses"] == 8
    assert found["warnings"] == [
        "WARNING: tensor=2 does not divide 23: 6 parameters are not split over it"
    ]
    assert found["worst loss"] <= 1e-5


def test_translations_are_those_of_one_device(report):
    found = report["translations"]
    assert found["lines"] == 12
    assert found["unequal"] == []
    assert found["rows a device"] == 2


def test_plain_text_has_the_batches_and_the_losses_of_one_device(report):
    found = report["plain text"]
    print(found)
    assert len(found) == 6
    for name, (steps, same, apart) in found.items():
        assert (steps, same) == (3, True), name
        assert apart < 1e-5, name


def test_rows_are_filled_up_until_mesh_and_microbatches_divide_them():
    plan = [PlannedBatch(rows, 4, np.arange(rows)) for rows in (1, 11, 12, 13)]
    mesh = AbstractMesh((2, 2, 2), AXES, axis_types=AXIS_TYPES)
    assert [planned.rows for planned in fill_rows(plan, mesh, 1)] == [4, 12, 12, 16]
    assert [planned.rows for planned in fill_rows(plan, mesh, 3)] == [12, 12, 12, 24]
    assert [planned.rows for planned in fill_rows(plan, make_mesh(), 1)] == [1, 11, 12, 13]


def test_the_trainer_refuses_other_numbers_of_devices(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        train.train("--mesh=data=2")
    assert left.value.code.startswith("error: mesh='data=2' is 2 devices, but there are 1; give")
    assert list(tmp_path.iterdir()) == []


if __name__ == "__main__":
    main()
