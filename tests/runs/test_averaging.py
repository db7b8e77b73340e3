"""The mean of a run's checkpoints: by hand, from the command line, and what is refused."""

import shutil
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from jax_transformer import InputError
from jax_transformer.commands import main as cli
from jax_transformer.commands.average import average_run, mean
from jax_transformer.runs import loop
from jax_transformer.runs.checkpoints import read_step, steps_in
from jax_transformer.translation.model_folder import load, read_origin
from tests.runs import runs
from tests.tiers import tiered


@pytest.fixture(scope="module", params=tiered([None, 0.9], [0.9]), ids=["parameters", "EMA"])
def run(request, tmp_path_factory):
    """Return the output of an unfinished run, which keeps the last three of its checkpoints."""
    directory = tmp_path_factory.mktemp("output")
    runs.save(directory / loop.CHECKPOINTS, runs.make_settings(request.param), [1, 2, 3, 4, 5])
    return directory


def test_the_mean_is_summed_in_double_precision():
    leaves = [np.float32([1e8, 1]), np.float32([1, 2]), np.float32([-1e8, 6])]
    averaged = mean([{"kernel": leaf} for leaf in leaves])["kernel"]
    assert averaged.dtype == np.float32
    np.testing.assert_array_equal(averaged, np.float32([1 / 3, 3]))


def test_the_last_checkpoints_count(run):
    checkpoints = run / loop.CHECKPOINTS
    states = [read_step(checkpoints, step).read().state for step in steps_in(checkpoints)[-2:]]
    assert [int(state.step) for state in states] == [4, 5]
    _, params, steps = average_run(run, last=2)
    assert steps == (4, 5)
    expected = jax.tree.map(lambda *leaves: sum(leaves) / 2, *(one.eval_params for one in states))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), params, expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("options", "last"), [((), None), (("--last=2",), 2)])
def test_the_command_line_writes_a_model(run, tmp_path, capsys, options, last):
    output = tmp_path / "mean"
    command = ["average", str(run), str(output), *options]
    cli.main(command)
    shown = f"mean of the last {last or 3} checkpoints of {run} written to {output}\n"
    assert capsys.readouterr().out == shown
    written, (settings, params, _) = load(output), average_run(run, last)
    assert written.config == settings.config
    assert written.tokenizer.digest() == settings.tokenizer.digest()
    assert (written.generation, read_origin(output)) == (runs.GENERATION, runs.ORIGIN)
    jax.tree.map(np.testing.assert_array_equal, written.params, params)
    with pytest.raises(SystemExit, match="exists already"):
        cli.main(command)


def test_by_default_all_checkpoints_count_and_the_folder_in_the_output_is_as_good(run):
    assert average_run(run)[-1] == (3, 4, 5)
    assert average_run(run / loop.CHECKPOINTS, last=2)[-1] == (4, 5)


@pytest.mark.parametrize("last", [0, 4, 10])
def test_more_than_there_are_is_refused(run, last):
    with pytest.raises(InputError) as refused:
        average_run(run, last)
    assert str(refused.value) == (
        f"last={last} must be from 1 to 3, the number of checkpoints in {run / 'run'}; a run with "
        "a larger keep_checkpoints keeps more"
    )


@pytest.mark.parametrize("last", [None, 1])
def test_a_directory_of_none_is_refused(tmp_path, last):
    with pytest.raises(InputError, match="none: holds no checkpoint of a run; name the output of"):
        average_run(tmp_path / "none", last)


def test_a_damaged_checkpoint_is_refused_and_not_left_out(run, tmp_path):
    damages = {
        "of another size": lambda step: max((step / "d").iterdir()).write_bytes(b"x"),
        "is missing": lambda step: max((step / "d").iterdir()).unlink(),
        "is damaged": lambda step: (step / "run.json").unlink(),
    }
    for number, (reason, damage) in enumerate(damages.items()):
        copy = Path(shutil.copytree(run / loop.CHECKPOINTS, tmp_path / str(number)))
        damage(copy / "4")
        with pytest.raises(InputError, match=reason) as refused:
            average_run(copy)
        assert str(refused.value).startswith(f"{copy / '4'} is damaged (")
        assert "\n" not in str(refused.value)
        assert average_run(copy, last=1)[-1] == (5,)
