"""What the benchmarks compute from what they measure."""

from multiprocessing import Pipe, get_context

import jax
import numpy as np
import pytest
from rich.console import Console

from benchmarks import accelerators, machine, memory, training
from benchmarks.cost import nearest_line
from benchmarks.nn_transformer import Size, our_steps, torch_steps
from jax_transformer import decode_step, init_cache, init_params
from jax_transformer.decoding.cache import select_hypotheses
from jax_transformer.runtime.sharding import parse_sizes
from tests.models import one_layer

MEGABYTE = 2**20


def test_the_nearest_line_of_points_on_a_line_is_that_line():
    slope, start, deviation = nearest_line([1, 2, 4, 8], [5.5, 8.5, 14.5, 26.5])
    assert (slope, start) == pytest.approx((3.0, 2.5))
    assert deviation == pytest.approx(0, abs=1e-9)


def test_a_point_beside_the_line_shows_as_a_share_of_itself():
    values = np.arange(1, 1001)
    costs = 2.0 * values
    costs[499] *= 1.25  # among so many the line stays; it is 20 % below the point
    assert nearest_line(values, costs).deviation == pytest.approx(0.2, rel=1e-2)


def test_every_point_counts_by_its_own_size():
    # Least squares of seconds would leave the small points to the large one.
    values, costs = [1, 2, 4, 100], [1.0, 2.0, 4.0, 150.0]
    assert nearest_line(values, costs).slope < 1.2


@pytest.mark.exhaustive
def test_the_systems_do_the_same_work():
    pytest.importorskip("torch")
    size = Size(32, 4, 64, layers=1, vocab_size=50, rows=4, length=8)
    ours, theirs = (
        steps(size, 0.0, training.SETTINGS, 2, **options)
        for steps, options in ((our_steps, {}), (torch_steps, {"compiled": False}))
    )
    first = ours()
    assert theirs() == pytest.approx(first, rel=1e-6)
    assert ours() == first  # whatever the later ones' is


def test_shares_are_of_the_faster_product_of_the_same_round(monkeypatch):
    step = 0.5
    seconds = dict.fromkeys(training.LOADERS, [training.STEPS * step] * 2)
    seconds |= {"product by XLA": [1.0, 4.0], "product by torch": [2.0, 2.0], "triad": [1.0, 2.0]}
    losses = dict.fromkeys([*training.LOADERS, *machine.LOADERS])
    monkeypatch.setattr(training, "time_in_turn", lambda *_: (losses, seconds))

    result = training.compare({}, "base", 0.1, rounds=2)

    width, inner, tokens, layers = 512, 2048, 16 * 64, 6
    attention = 4 * width**2 + 2 * 64 * width
    products = 3 * layers * attention + 2 * layers * 2 * width * inner + width * 8000
    product_flops = machine.PRODUCTS * 2 * machine.PRODUCT_SIZE**3
    for name in training.LOADERS:
        assert result["seconds"][name] == [step, step]
        expected = 3 * 2 * products * tokens / step / np.array([product_flops, product_flops / 2])
        assert result["shares of the peak"][name] == pytest.approx(expected)
    assert result["limits"]["triad"][0] == machine.TRIADS * 3 * 4 * machine.TRIAD_SIZE
    assert set(result["losses"]) == set(training.LOADERS)


def measure_twice(connection) -> None:
    """Send the most megabytes held in a call that makes 100, then in one that makes 30."""
    kept = np.ones(50 * MEGABYTE, np.uint8)  # there before
    measure = memory.load_measured(lambda: lambda size: np.ones(size * MEGABYTE, np.uint8).sum())
    measure(100)
    connection.send([peak / MEGABYTE for peak in measure(30)])
    assert kept.all()


@pytest.mark.exhaustive
def test_the_most_that_a_call_holds_is_measured_beyond_what_was_there_before():
    ours, theirs = Pipe()
    # A process of its own: one that has trained keeps what is freed.
    process = get_context("spawn").Process(target=measure_twice, args=(theirs,))
    process.start()
    assert ours.poll(120)
    assert ours.recv() == pytest.approx([100, 30], abs=20)
    process.join()
    assert process.exitcode == 0


@pytest.mark.exhaustive
def test_gathered_slots_are_those_that_the_ancestors_name():
    config = one_layer("vaswani2017", vocab_size=11, d_model=8, num_heads=2, d_ff=8)
    batch, count, length = 2, 3, 4
    params = init_params(jax.random.key(0), config)
    encoded = jax.random.normal(jax.random.key(1), (batch, 5, config.d_model))
    cache = init_cache(params, config, encoded, length, beam_size=count)
    parents = np.array([[2, 0, 0], [1, 1, 2]])
    own = []  # what each hypothesis has at each position, every one with a copy of its own
    for position in range(length):
        tokens = np.array([[3, 4, 5], [6, 7, 8]]) + position % 2
        _, cache = decode_step(params, config, cache, tokens)
        slots = cache.layers[0].values.reshape(batch, config.num_heads, length, count, -1)
        own.append(slots[:, :, position].swapaxes(1, 2))
        own = memory.gather_hypotheses(own, parents)
        cache = select_hypotheses(cache, parents)
    slots = np.asarray(cache.layers[0].values).reshape(batch, config.num_heads, length, count, -1)
    for row, hypothesis, position in np.ndindex(batch, count, length):
        ancestor = cache.ancestors[row, hypothesis, position]
        expected = slots[row, :, position, ancestor]
        np.testing.assert_array_equal(own[position][row, hypothesis], expected)


@pytest.mark.parametrize("chips", [1, 8, 256])
def test_every_mesh_of_the_compiled_steps_takes_all_chips(chips):
    for quick in (False, True):
        for task in accelerators.tasks(chips, quick):
            assert np.prod(parse_sizes(task.mesh, chips)) == chips
            assert accelerators.configuration(task).num_decoder_layers == task.layers


def test_a_step_that_does_not_fit_is_shown_with_its_size(capsys):
    result = {"task": "big", "needed": 20e9, "available": 16.9e9}
    accelerators.show(Console(), result, 1.5e9)
    assert "big: does not fit, XLA needs at least 20.00 GB of 16.90 GB" in capsys.readouterr().out
