"""Runs that start from a model or from a tokenizer: --init, --freeze, --tokenizer, and refusals."""

import dataclasses
import json
import shutil
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import optax
import pytest
import yaml

from jax_transformer import InputError
from jax_transformer.commands import train
from jax_transformer.commands.train_arguments import named_settings
from jax_transformer.convert.families import FAMILIES
from jax_transformer.convert.table import flatten
from jax_transformer.runs import evaluation, model_settings
from jax_transformer.runs.checkpoints import read_step
from jax_transformer.runs.metrics import read_metrics
from jax_transformer.tokenizers import read_byte_pair, read_files, separate, train_byte_pair
from jax_transformer.translation.model_folder import load, read_origin, save
from tests.commands.training import SMALL, TEXT, WORDS, checked, program, refusal
from tests.models import random_params, tiny_model
from tests.runs.runs import quiet, same_bits

pytestmark = pytest.mark.usefixtures("no_pictures")

LOG = "metrics.jsonl"
SHORT = ["--steps=4", "--evaluation-interval=2", "--bucket-count=1", "--max-tokens=60"]
RATE = ["--schedule=constant", "--learning-rate=0.01", "--warmup-steps=1"]
FREEZE = ["--freeze", "encoder/*", "token_embedding/*"]


def same_model(one, other):
    """Return whether two folders hold the same model, parameters bit for bit."""
    models = [load(one), load(other)]
    leaves = zip(*(jax.tree.leaves(model.params) for model in models), strict=True)
    described = [
        (model.config, model.tokenizer.digest(), dict(model.generation), read_origin(Path(folder)))
        for model, folder in zip(models, (one, other), strict=True)
    ]
    equal = all(np.array_equal(*map(np.asarray, pair)) for pair in leaves)
    return equal and described[0] == described[1]


@pytest.mark.exhaustive
def test_a_run_from_an_own_model_goes_on_where_that_has_ended(base, capsys):
    # A learning rate that moves no parameter by a bit that counts.
    still = ["--schedule=constant", "--learning-rate=1e-30", "--steps=1", "--dropout=0.3"]
    program(*TEXT, "--init=base", "--output=on", *SHORT, *still)
    shown = capsys.readouterr().out
    first, last = (
        [one["validation_loss"] for one in read_metrics(folder / LOG) if "validation_loss" in one]
        for folder in (base, Path("on"))
    )
    assert last == [pytest.approx(min(first), rel=1e-6)]
    before, after = load(base), load("on")
    assert after.config == dataclasses.replace(before.config, dropout=0.3)
    assert after.tokenizer.digest() == before.tokenizer.digest()
    assert (after.generation, read_origin(Path("on"))) == (before.generation, None)
    count = sum(leaf.size for leaf in jax.tree.leaves(before.params))
    assert f"{count:,} of {count:,} parameters are trained" in shown
    settings = yaml.safe_load(Path("on/settings.yaml").read_text())
    assert (settings["init"], settings["preset"]) == ("base", None)
    assert settings["vocab_size"] == before.tokenizer.src_vocab_size

    other = shutil.copytree(base, "other")
    line = refusal(capsys, "--output=on", "--resume", f"--init={other}", "--steps=2")
    assert line.startswith(f"error: init={str(Path('other').absolute())!r} is not the run's, which")
    assert str(base.absolute()) in line


def killed_at_its_second_report(*argv):
    """Run until the second report, where a KeyboardInterrupt ends the run without a checkpoint."""
    report, calls = train.loop._report, []

    def interrupted(*call):
        calls.append(call)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return report(*call)

    with mock.patch.object(train.loop, "_report", interrupted), pytest.raises(KeyboardInterrupt):
        program(*argv)


@pytest.mark.exhaustive
def test_a_huggingface_folder_is_trained_on_resumed_without_it_and_kept(toy, monkeypatch, capsys):
    initial, options = load(toy), [*TEXT, "--init=toy", *SHORT, *RATE, *FREEZE]
    translated = []
    monkeypatch.setattr(
        evaluation,
        "translate",
        lambda *some, translate=evaluation.translate, **options: (
            translated.append(options) or translate(*some, **options)
        ),
    )
    program(*options, "--output=one")
    shown = capsys.readouterr().out
    assert "toy: parameters converted from bfloat16 to float32" in shown
    assert "toy: not carried over: flax_model.msgpack" in shown
    assert translated
    assert all(options["beam_size"] == 1 for options in translated)
    assert initial.generation["beam_size"] == 3

    # Frozen parameters keep their bits, and the others move.
    before, after = flatten(initial.params), flatten(load("one").params)
    trained = 0
    for name, leaf in before.items():
        frozen = name.startswith(("encoder/", "token_embedding/"))
        trained += 0 if frozen else leaf.size
        same = np.array_equal(np.asarray(leaf).astype(np.float32), after[name])
        assert same == frozen, name
    assert f"{trained:,} of {sum(leaf.size for leaf in before.values()):,} parameters" in shown
    saved = read_step(Path("one/run"), 4).read()
    moments = flatten(optax.tree.get(saved.state.optimizer_state, "mu"))
    assert {name.split("/")[0] for name in moments} == {"decoder"}

    # The folder's defaults and other files are the model's.
    assert dict(load("one").generation) == dict(initial.generation)
    origin = read_origin(Path("one"))
    assert origin.model_type == "toy"
    assert origin.config == json.loads((toy / "config.json").read_text())
    assert set(origin.files) == {"README.md", "generation_config.json"}
    assert origin.files["README.md"] == b"# toy\n"

    # The settings start the same run again.
    program("--config=one/settings.yaml", "--output=again")
    assert same_model("again", "one")

    # A killed run does not need the folder any more.
    killed_at_its_second_report(*options, "--output=killed")
    shutil.rmtree(toy)
    monkeypatch.delitem(FAMILIES, "toy")
    program("--output=killed", "--resume")
    assert "resumed at step 2 of 4" in capsys.readouterr().out
    assert same_model("killed", "one")
    runs = [read_step(Path(folder, "run"), 4).read() for folder in ("killed", "one")]
    assert same_bits(*runs)


@pytest.mark.exhaustive
def test_a_run_takes_the_tokenizers_that_it_is_given(corpus):
    sides = []
    for name, words in (("en", WORDS), ("de", [*map(str.upper, WORDS), "C"])):
        sides.append(train_byte_pair(words, vocab_size=20))
        Path(f"{name}.json").write_bytes(sides[-1].contents["tokenizer.json"])
    pair = separate(*sides)
    small = [option for option in SMALL if not option.startswith("--vocab")]
    tokenizers = ["--tokenizer=en.json", "--target-tokenizer=de.json"]
    tables = ["--token-embeddings=separate", *SHORT, "--steps=2"]
    program(*TEXT, *small, *tokenizers, *tables, "--output=model")
    model = load("model")
    assert model.tokenizer.digest() == pair.digest()
    sizes = [model.config.src_vocab_size, model.config.tgt_vocab_size]
    assert sizes == [side.src_vocab_size for side in sides]
    assert sizes[0] != sizes[1]
    settings = yaml.safe_load(Path("model/settings.yaml").read_text())
    assert (settings["tokenizer"], settings["target_tokenizer"]) == ("en.json", "de.json")
    saved = read_step(Path("model/run"), 2).settings
    assert saved.tokenizer.digest() == pair.digest()
    assert train.arguments_of_run(saved).target_tokenizer == Path("de.json").absolute()


def started(*argv):
    """Return the settings of a run, without training."""
    found, start = train.new_arguments(named_settings([*TEXT, *argv]))
    return train.read_and_encode_text(found, start, quiet())[0]


def test_one_tokenizer_may_be_a_file_or_a_folder(base):
    tokenizer = read_byte_pair(read_files(base / "model", ["tokenizer.json"]), {}, str(base))
    shutil.copy(base / "model/tokenizer.json", "other.json")
    Path("tokenizer").mkdir()
    shutil.copy(base / "model/tokenizer.json", "tokenizer")
    for path in ("other.json", "tokenizer", "base"):
        settings = started(f"--tokenizer={path}")
        assert settings.tokenizer.digest() == tokenizer.digest()
        assert settings.config.src_vocab_size == settings.config.tgt_vocab_size
        assert settings.config.src_vocab_size == tokenizer.src_vocab_size
    pair = tiny_model(WORDS, 16)._replace(tokenizer=separate(tokenizer, tokenizer))
    sizes = dict.fromkeys(("src_vocab_size", "tgt_vocab_size"), tokenizer.src_vocab_size)
    config = dataclasses.replace(pair.config, **sizes)
    save(Path("pair"), pair._replace(config=config, params=random_params(config)))
    assert started("--tokenizer=pair", "--token-embeddings=separate").tokenizer.kind == "separate"
    with pytest.raises(InputError, match="tokenizer=pair: two tokenizers need token_embeddings="):
        started("--tokenizer=pair")
    # Equal by digest is the tokenizer of --init.
    assert started("--init=base", "--tokenizer=other.json").tokenizer.digest() == tokenizer.digest()


@pytest.mark.exhaustive
def test_number_words_may_be_learnt_by_a_model_that_exists(corpus):
    lines = ["one two " + "".join(map(chr, range(97, 123))) + " -äöüß"]
    model = tiny_model(lines, 60, max_length=200)
    save(Path("model"), model)
    found, start = train.new_arguments(named_settings(["--init=model"]))
    settings, corpora = train.read_and_encode_text(found, start, quiet())
    assert settings.config == model.config
    assert len(corpora.training) > 1000


def test_generation_defaults_that_cannot_be_honoured_can_be_ignored(bad_models):
    options = [*TEXT, "--init=sampling", "--ignore-generation-config"]
    _, start = train.new_arguments(named_settings(options))
    assert start.generation == {}
    assert start.origin.files["generation_config.json"] == b'{"do_sample": true}'


@pytest.mark.exhaustive
def test_a_student_learns_from_its_teacher_and_a_resumed_one_ends_with_the_same_bits(base, capsys):
    student = [*TEXT, "--teacher=base", "--teacher-weight=1", "--d-model=12", *SHORT, *RATE]
    student += ["--num-heads=3", "--d-ff=8", "--num-encoder-layers=2", "--num-decoder-layers=1"]
    program(*student, "--output=whole")
    program(*student, "--output=part", "--steps=2")
    program("--output=part", "--resume", "--steps=4")
    whole = load("whole")
    assert whole.config.d_model == 12
    assert whole.tokenizer.digest() == load("base").tokenizer.digest()
    assert same_model("whole", "part")
    program(*student, "--teacher-weight=0.1", "--output=other")
    assert not same_model("whole", "other")
    line = refusal(capsys, "--output=part", "--resume", "--teacher-weight=0.5", "--steps=5")
    assert line.startswith("error: teacher_weight=0.5 is not the run's, which has 1.0; ")


def moments_and_steps(folder, step):
    """Return Adam's state, the number of the schedule's steps and that of the run's."""
    state = read_step(Path(folder, "run"), step).read().state
    adam = optax.tree.get(state.optimizer_state, "mu"), optax.tree.get(state.optimizer_state, "nu")
    counts = optax.tree.get_all_with_path(state.optimizer_state, "count")
    return adam, sorted(int(count) for _, count in counts), int(state.step)


@pytest.mark.exhaustive
def test_a_new_run_keeps_what_it_is_told_of_the_last_checkpoint_of_another(base, capsys):
    adam, counts, step = moments_and_steps("base", 12)
    assert (counts, step) == ([12, 12], 12)
    other = ["--schedule=constant", "--learning-rate=0.02", "--max-tokens=40", "--bucket-count=1"]
    begin = [*TEXT, "--init=base", *other, "--evaluation-interval=2"]
    for name, parts, expected in (
        ("none", [], ([0, 0], 0)),
        ("moments", ["--init-keeps", "moments"], ([0, 12], 0)),
        ("step", ["--init-keeps", "step"], ([0, 12], 12)),
        ("both", ["--init-keeps", "moments", "step"], ([12, 12], 12)),
    ):
        first = expected[1]
        program(*begin, *parts, f"--output={name}", f"--steps={first + 2}")
        found, counts, step = moments_and_steps(name, first)
        assert (counts, step) == expected
        kept = jax.tree.map(np.array_equal, found, adam)
        assert all(jax.tree.leaves(kept)) == ("moments" in parts)
        assert [one["step"] for one in read_metrics(Path(name, LOG))][-1] == first + 2
    # The parameters, too, are those of the last checkpoint, and the new run can be resumed.
    params = [read_step(Path(name, "run"), 12).read().state.params for name in ("base", "both")]
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, *params)))
    program(*begin, "--init-keeps", "moments", "step", "--output=whole", "--steps=16")
    program("--output=both", "--resume", "--steps=16")
    assert same_model("whole", "both")
    line = refusal(capsys, "--output=both", "--resume", "--init-keeps=step")
    assert line.startswith("error: init_keeps=['step'] is not the run's, which has ")
    assert line.endswith("; for another, start a new run from this one, by --init and --init-keeps")


def test_a_run_starts_from_a_name_of_the_hub_which_it_keeps(base, monkeypatch, capsys):
    monkeypatch.setattr(model_settings, "local_folder", {Path("somebody/a-model"): base}.get)
    options = [*TEXT, *SHORT, "--steps=1", "--schedule=constant", "--warmup-steps=1"]
    program("--init=somebody/a-model", "--output=own", *options)
    shown = capsys.readouterr().out
    assert "WARNING: warmup_steps=1, steps=1: the learning rate does not reach its peak" in shown
    assert yaml.safe_load(Path("own/settings.yaml").read_text())["init"] == "somebody/a-model"
    checked("--output=own", "--resume", "--steps=2")
    assert "resumed at step 1 of 2" in capsys.readouterr().out
