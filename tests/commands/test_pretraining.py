"""`jax-transformer train --text`: to a folder that transformers reads; resumed; mixed."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jax_transformer import load
from jax_transformer.runs.metrics import read_metrics
from tests.commands.training import PLAIN, program
from tests.runs.kill_resume import losses

pytestmark = pytest.mark.usefixtures("plain_text")


def small(*options, objective="span_corruption", text="plain.txt"):
    return [f"--text={text}", f"--objective={objective}", *PLAIN, *options]


@pytest.mark.exhaustive
@pytest.mark.parametrize("objective", ["span_corruption", "ul2", "infilling", "prefix_lm"])
def test_each_objective_trains_and_reports_its_denoisers(objective, capsys):
    program(*small("--output=run", objective=objective))
    shown = capsys.readouterr().out
    assert "tokens restored exactly: " in shown
    reports = read_metrics(Path("run/metrics.jsonl"))
    last = reports[-1]
    restored = [name for name in last if name.startswith("validation_restored_")]
    assert len(restored) == (7 if objective == "ul2" else 1)
    assert all(0 <= last[name] <= 1 for name in restored)
    by_denoiser = [name for name in last if name.startswith("validation_loss_")]
    assert len(by_denoiser) == (7 if objective == "ul2" else 1)
    mean = np.mean([last[name] for name in by_denoiser])
    assert last["validation_loss"] == pytest.approx(mean)
    counts = [name for name in reports[0] if name.startswith("examples_")]
    assert len(counts) == (7 if objective == "ul2" else 0)


@pytest.mark.exhaustive
def test_a_run_becomes_a_folder_that_transformers_loads_and_trains_on(run):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    program(*small("--output=run", "--optimizer=adafactor", "--schedule=t5"))
    assert run("convert", "run", "folder", "--output-layout=t5")[0] == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained("folder")
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained("folder")
    config, _, ours, _ = load("run")
    line = "eins <extra_id_0> drei"
    assert tokenizer(line)["input_ids"] == ours.encode_source([line])[0]
    assert tokenizer.decode(ours.encode_source(["elf zwei"])[0][:-1]) == "elf zwei"
    batch = tokenizer([line], text_target=["<extra_id_0> zwei"], return_tensors="pt")
    loss = model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert model.config.decoder_start_token_id == config.bos_id == 0
    # And home again, to go on from: with its weights, which so small a rate leaves as they are
    # in float32, and with fresh ones.
    options = ["--text=plain.txt", "--objective=ul2", "--steps=2", "--valid-pairs=9"]
    options += ["--pack-length=64", "--max-tokens=128", "--prepared=store"]
    options += ["--learning-rate-factor=1e-30"]
    program(*options, "--init=folder", "--output=further")
    program(*options, "--init=folder", "--fresh-weights", "--seed=1", "--output=fresh")
    trained, further, fresh = (
        jax.tree.leaves(load(name).params) for name in ("run", "further", "fresh")
    )
    for before, after in zip(trained, further, strict=True):
        np.testing.assert_allclose(after, before, rtol=0, atol=1e-25)
    assert any(np.max(np.abs(a - b)) > 0.1 for a, b in zip(trained, fresh, strict=True))
    assert load("fresh").config == load("further").config
    assert json.loads(Path("folder/config.json").read_text())["model_type"] == "t5"


@pytest.mark.exhaustive
def test_a_resumed_run_ends_as_one_that_was_not_stopped():
    options = ["--optimizer=muon", "--learning-rate=0.01", "--schedule=constant"]
    program(*small("--output=whole", *options, objective="ul2"))
    program(*small("--output=parts", *options, "--steps=4", objective="ul2"))
    program("--output=parts", "--resume", "--steps=8")
    assert losses(Path("whole"))[-1] == losses(Path("parts"))[-1]


@pytest.mark.exhaustive
def test_pairs_and_plain_text_are_mixed_by_weight_with_their_prefixes():
    options = [option for option in PLAIN if "valid-pairs" not in option]
    program(
        *("--text=plain.txt", "--objective=span_corruption", *options, "--output=run"),
        *("--source=pairs.tsv", "--weights", "1", "3"),
        *("--prefixes", "capitals: ", "fill: ", "--valid-source=pairs.tsv"),
        *("--valid-text=plain.txt", "--bleu-tokenization=none"),
    )
    first, *_, last = read_metrics(Path("run/metrics.jsonl"))
    assert 2 < first["examples_span_corruption"] / first["examples_translation"] < 6
    assert {"validation_loss_translation", "validation_restored_span_corruption"} <= last.keys()
    assert "validation_bleu" in last
