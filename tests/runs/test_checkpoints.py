"""Checkpoints of a run: back bit for bit, there only when complete, other runs refused."""

import contextlib
import dataclasses
import json
import shutil
import threading

import jax
import numpy as np
import pytest

from jax_transformer import InputError
from jax_transformer.commands.average import average_run
from jax_transformer.runs.checkpoints import (
    FORMAT,
    CheckpointWriter,
    DescribingHandler,
    restore,
    steps_in,
    verified,
)
from jax_transformer.runs.state import check_same
from jax_transformer.storage.reading import json_digest
from jax_transformer.tokenizers import train_byte_pair
from tests.runs.kill_resume import named_arrays
from tests.runs.runs import make_checkpoint, quiet, same_bits, save
from tests.training.steps import OTHER_SETTINGS

MAY_CHANGE = {"steps", "cooldown_steps", "patience", "evaluation_interval", "keep_checkpoints"}
MAY_CHANGE |= {"remat"}


@pytest.mark.parametrize("step", [0, 8])
def test_all_of_a_run_comes_back_bit_for_bit(settings, tmp_path, step):
    expected = make_checkpoint(settings, step)
    save(tmp_path / "run", settings, [step])
    restored = restore(tmp_path / "run", quiet())
    assert same_bits(restored.read(), expected)
    structures = [jax.tree.structure(one[1:]) for one in (restored.read(), expected)]
    assert structures[0] == structures[1]
    assert restored.read().state.key.dtype == expected.state.key.dtype
    assert repr(restored.progress._replace(window=())) == repr(
        expected.progress._replace(window=())
    )
    windows = zip(restored.progress.window, expected.progress.window, strict=True)
    for (position, metrics), (expected_position, expected_metrics) in windows:
        assert position == expected_position
        assert [*metrics.task_counts] == [*expected_metrics.task_counts]
        np.testing.assert_array_equal(np.float32(metrics[:-1]), np.float32(expected_metrics[:-1]))
    assert restored.settings[:2] == settings[:2]
    assert restored.settings.tokenizer.digest() == settings.tokenizer.digest()
    assert restored.settings[3:] == settings[3:]
    check_same(restored.settings, settings, step=8)


def test_frozen_parameters_are_saved_once(settings, tmp_path):
    frozen = dataclasses.replace(settings.training_config, freeze=("encoder/*", "token*"))
    expected = make_checkpoint(settings._replace(training_config=frozen), 8)
    save(tmp_path / "run", settings._replace(training_config=frozen), [8])
    restored = restore(tmp_path / "run", quiet())
    assert restored.settings.training_config == frozen
    assert same_bits(restored.read(), expected)
    parts = [name.split("/")[:-1] for name in named_arrays(restored.read())]
    with_encoder = {"/".join(part[: part.index("encoder")]) for part in parts if "encoder" in part}
    assert with_encoder == {"state/params", "best_params"}  # neither moments nor EMA


def test_what_is_saved_is_the_state_of_that_moment(settings, tmp_path):
    checkpoint = make_checkpoint(settings, 1)
    expected = jax.tree.map(np.copy, checkpoint.best_params)
    with CheckpointWriter(tmp_path, settings) as checkpoints:
        checkpoints.save(checkpoint)
        for leaf in jax.tree.leaves(checkpoint.best_params):
            leaf[...] = 0  # as the next step reuses its memory
    restored = restore(tmp_path, quiet()).read().best_params
    assert all(map(np.array_equal, *map(jax.tree.leaves, (restored, expected))))


def test_a_step_is_there_only_once_it_is_complete(settings, directory, monkeypatch):
    written, going_on = threading.Event(), threading.Event()
    finalize = DescribingHandler.finalize

    def waits(self, path):
        written.set()  # all arrays are: no file appears or disappears under the copy
        assert going_on.wait(60)
        finalize(self, path)

    monkeypatch.setattr(DescribingHandler, "finalize", waits)
    with CheckpointWriter(directory, settings) as checkpoints:
        checkpoints.save(make_checkpoint(settings, 12))  # returns while it is being written
        assert written.wait(60)
        assert steps_in(directory) == [0, 4, 8]
        killed = shutil.copytree(directory, directory.parent / "killed")  # as a kill leaves it
        going_on.set()
        checkpoints.wait()
        assert steps_in(directory) == [4, 8, 12]
    assert any("tmp" in path.name for path in killed.iterdir())
    assert restore(killed, quiet()).progress.step == 8


def test_only_settings_that_decide_no_step_made_may_change(settings):
    for name, (value, beside) in OTHER_SETTINGS.items():
        config = dataclasses.replace(settings.training_config, **beside)
        changed = dataclasses.replace(config, **{name: value})
        saved, given = (settings._replace(training_config=one) for one in (config, changed))
        if name in MAY_CHANGE:
            check_same(saved, given, step=8)
            continue
        with pytest.raises(InputError) as refused:
            check_same(saved, given, step=8)
        fault = f"{name}={value!r} is not the run's, which has {getattr(config, name)!r};"
        assert str(refused.value).startswith(fault)


def test_with_cosine_the_steps_decide_the_learning_rate(settings):
    cosine = dataclasses.replace(settings.training_config, schedule="cosine", warmup_steps=9)
    longer = dataclasses.replace(cosine, steps=50)
    with pytest.raises(InputError, match="steps=50 is not the run's, which has 40"):
        check_same(*(settings._replace(training_config=one) for one in (cosine, longer)), step=8)


@pytest.mark.parametrize("change", [{"steps": 50}, {"cooldown_steps": 10}, {"cooldown_steps": 0}])
def test_a_cooldown_may_change_until_it_begins(settings, change):
    cooling = dataclasses.replace(settings.training_config, cooldown_steps=20)  # of 40
    saved = settings._replace(training_config=cooling)
    given = settings._replace(training_config=dataclasses.replace(cooling, **change))
    check_same(saved, given, step=20)
    with pytest.raises(InputError, match="is not the run's"):
        check_same(saved, given, step=21)
    with pytest.raises(InputError, match="is not the run's"):
        check_same(given, saved, step=21)


def test_another_model_vocabulary_or_text_is_refused(settings):
    other_tokenizer = train_byte_pair(("ab", "ac", "bc"), vocab_size=8)
    changes = {
        "d_ff=5": {"config": dataclasses.replace(settings.config, d_ff=5)},
        "dropout=0.5": {"config": dataclasses.replace(settings.config, dropout=0.5)},
        "tokenizer's sha256=": {"tokenizer": other_tokenizer},
        "text's sha256=": {"text_sha256": "1" * 64},
    }
    for message, change in changes.items():
        with pytest.raises(InputError) as refused:
            check_same(settings, settings._replace(**change), step=8)
        assert str(refused.value).startswith(message)


def rewritten(directory, place, value):
    """Change a value of a step's description, or remove it (None); make the digest right again."""
    path = directory / "run.json"
    read = json.loads(path.read_text())
    *outer, name = place.split()
    part = read["content"]
    for key in outer:
        part = part[key]
    part[name] = value
    if value is None:
        del part[name]
    read["sha256"] = json_digest(read["content"])
    path.write_text(json.dumps(read))


FOREIGN = {  # by the message: where the description changes, and to what; None removes
    f"is of format {FORMAT + 1}": ("format", FORMAT + 1),
    "is of format 0,": ("format", 0),
    f"is of format '{FORMAT}',": ("format", str(FORMAT)),
    f"is of format {FORMAT}.0,": ("format", float(FORMAT)),
    "is of format True,": ("format", True),
    "is of format None,": ("format", None),
    "sharpness=3 is not a setting": ("settings training_config sharpness", 3),
    "width=3 is not a setting": ("settings config width", 3),
    # More than the arrays hold, and less.
    "parameters, but its arrays have only": ("settings config num_encoder_layers", 10_000),
    "numbers; restore": ("settings config d_model", 2**30),
    "belongs to no model of its config": ("settings config feed_forward_bias", False),
    "is missing or of another shape": ("settings config d_ff", 5),
}


@pytest.mark.parametrize(("message", "change"), FOREIGN.items(), ids=FOREIGN)
def test_what_another_version_wrote_is_no_damage_but_refused(directory, message, change):
    rewritten(directory / "8", *change)
    with pytest.raises(InputError, match=message):
        restore(directory, quiet())
    assert steps_in(directory) == [0, 4, 8]


def other_runs(settings):
    """Return settings of runs whose arrays have the shapes of those of a run, by what differs."""
    config, training_config = settings.config, settings.training_config
    return {
        "num_heads=": settings._replace(config=dataclasses.replace(config, num_heads=1)),
        "seed=": settings._replace(training_config=dataclasses.replace(training_config, seed=1)),
        "text's sha256=": settings._replace(text_sha256="1" * 64),
    }


@pytest.mark.exhaustive
def test_a_step_of_another_run_is_refused(settings, directory, tmp_path):
    changed = dataclasses.replace(settings.training_config, steps=50)
    save(directory, settings._replace(training_config=changed), [12])  # the same run, longer
    assert restore(directory, quiet()).progress.step == 12
    for number, (message, other) in enumerate(other_runs(settings).items()):
        for step in (10, 13):
            save(tmp_path / f"{number} {step}", other, [step])
            shutil.copytree(tmp_path / f"{number} {step}/{step}", directory / str(step))
            for read in (lambda: restore(directory, quiet()), lambda: average_run(directory)):
                with pytest.raises(InputError, match="is of another run than the newest") as error:
                    read()
                assert f"({message}" in str(error.value)
            shutil.rmtree(directory / str(step))
    assert average_run(directory)[-1] == (4, 8, 12)


@pytest.mark.exhaustive
def test_every_flipped_bit_of_a_description_is_found(directory):
    """Without the shapes of the arrays, which are most of it."""
    read = json.loads((directory / "8/run.json").read_text())
    content = read["content"]
    content["arrays"] = {}
    text = json.dumps({"sha256": json_digest(content), "content": content}).encode()
    assert len(text) > 1_250
    for bit in range(8 * len(text)):
        damaged = bytearray(text)
        damaged[bit // 8] ^= 1 << bit % 8
        with contextlib.suppress(ValueError, LookupError):  # to `read_step`, any error is damage
            assert verified(json.loads(damaged.decode())) == content


def test_settings_younger_than_a_checkpoint_have_their_defaults(directory):
    rewritten(directory / "8", "settings training_config adam_epsilon", None)
    assert restore(directory, quiet()).settings.training_config.adam_epsilon == 1e-9


def test_the_same_step_is_written_once(settings, directory):
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    save(directory, settings, [8])
    assert {path: path.stat().st_mtime_ns for path in directory.rglob("*")} == before


def test_opening_what_is_no_directory_is_an_error(settings, tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(InputError, match="could not be written"):
            save(path, settings, [])


def test_one_process_at_a_time_writes_to_a_run(settings, directory):
    temporary = directory / "99.orbax-checkpoint-tmp"
    with CheckpointWriter(directory, settings):
        temporary.mkdir()  # what the first process is writing
        with pytest.raises(InputError, match="another process is training this run"):
            save(directory, settings, [12])
        assert temporary.exists()
    save(directory, settings, [12])
    assert sorted(path.name for path in directory.iterdir()) == ["12", "4", "8", "start"]
