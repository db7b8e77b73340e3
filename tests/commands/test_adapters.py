"""Adapters in the commands: train --lora-rank, translate, convert and export --adapter."""

import dataclasses
import json
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
import torch

from jax_transformer import InputError, Translator
from jax_transformer.adapters import lora, peft_folder, read_adapter, write_adapter
from jax_transformer.commands import main as cli
from jax_transformer.convert.huggingface import from_huggingface
from jax_transformer.convert.table import flatten
from jax_transformer.storage import weights as weight_files
from jax_transformer.translation.model_folder import load, save
from tests.adapters.test_lora import random_adapter
from tests.commands.training import TEXT, program, refusal, refused
from tests.convert.families.case import foreign_model, forward, write_tokenizer
from tests.models import tiny_model, unchecked
from tests.parity.ladder import ROUNDED, error

SHORT = ["--evaluation-interval=2", "--bucket-count=1", "--max-tokens=60", "--warmup-steps=1"]
SHORT += ["--schedule=constant", "--learning-rate=0.1"]
LORA = ["--lora-rank=2", "--lora-alpha=6", "--lora-targets", "*/query", "*/outer"]


@pytest.mark.exhaustive
def test_a_run_writes_its_adapter_and_the_merged_model_and_is_resumed(base, capsys):
    program(*TEXT, "--init=base", "--output=whole", *SHORT, "--steps=4", *LORA)
    shown = capsys.readouterr().out
    model, before = load("whole"), load(base)
    adapter = read_adapter("whole/adapter", before.config)
    leaves, first = flatten(adapter), flatten(before.params)
    factors = sum(leaf.size for name, leaf in leaves.items() if leaf.ndim)
    whole = sum(leaf.size for leaf in [*first.values(), *leaves.values()])
    said = f"{factors:,} of {whole:,} parameters are trained, in an adapter of */query, */outer"
    assert said in shown
    assert {leaf.item() for name, leaf in leaves.items() if name.endswith("scale")} == {3.0}
    assert any(np.abs(leaf).max() > 0.05 for name, leaf in leaves.items() if name.endswith("_b"))
    merged = flatten(lora.merge(lora.attach(before.params, adapter)))
    for name, leaf in flatten(model.params).items():
        assert error(leaf, merged[name]) < ROUNDED, name
        changed = name.endswith(("query/kernel", "outer/kernel"))
        assert np.array_equal(leaf, first[name]) != changed, name
    settings = json.loads(Path("whole/adapter", peft_folder.SETTINGS).read_text())
    assert (settings["r"], settings["lora_alpha"]) == (2, 6)

    program(*TEXT, "--init=base", "--output=parts", *SHORT, "--steps=2", *LORA)
    line = refusal(capsys, "--output=parts", "--resume", "--steps=4", "--lora-alpha=5")
    assert "lora_alpha=5.0 is not the run's, which has 6.0" in line
    program("--output=parts", "--resume", "--steps=4")
    again = flatten(read_adapter("parts/adapter", before.config))
    assert all(np.array_equal(again[name], leaf) for name, leaf in leaves.items())
    program(*TEXT, "--init=base", "--output=parts", *SHORT, "--steps=2", "--overwrite")
    assert not Path("parts/adapter").exists()


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """A model at own, two adapters of it at one and two, one of another model at other."""
    monkeypatch.chdir(tmp_path)
    model = tiny_model(["abc cab fed dab bead"], vocab_size=16, seed=128, max_length=40)
    model = model._replace(params=jax.tree.map(lambda leaf: 2 * leaf, model.params))
    save("own", model)
    for seed, name in ((1, "one"), (2, "two")):
        write_adapter(name, random_adapter(model.config, seed=seed), model.config)
    wider = dataclasses.replace(model.config, d_ff=10)
    write_adapter("other", random_adapter(wider), wider)
    return model


LINES = ["abba", "", "a", "cab cab cab cab", "b", "bacab"]


def texts(translator):
    return [result.text for result in translator(LINES, max_new_tokens=9)]


def test_translators_of_one_model_have_adapters_of_their_own(folders):
    base = load("own")
    found = {name: Translator(base, adapter=name) for name in (None, "one", "two")}
    translated = {name: texts(translator) for name, translator in found.items()}
    assert translated[None] == texts(Translator("own"))
    assert len(set(map(tuple, translated.values()))) == 3
    assert texts(Translator("own", adapter="two")) == translated["two"]
    kernels = {
        flatten(translator.model.params)[QUERY].unsafe_buffer_pointer()
        for translator in found.values()
    }
    assert len(kernels) == 1  # in memory once
    with pytest.raises(InputError) as refused:
        Translator([base, base], adapter="one")
    assert str(refused.value).startswith("adapter='one' is for one model; give each its own")
    both = Translator([base, base.with_adapter("one")])
    assert texts(both) not in (translated[None], translated["one"])


@pytest.mark.exhaustive
def test_a_thousand_lines_have_the_ids_of_the_merged_model(folders):
    random = np.random.default_rng(0)
    lines = ["".join(random.choice([*"abcdef "], 12)) for _ in range(1000)]
    model = load("own").with_adapter("one")
    merged = model._replace(params=lora.merge(model.params))
    found = [
        [result.tokens.tolist() for result in Translator(each)(lines)] for each in (model, merged)
    ]
    assert found[0] == found[1]
    assert len({str(ids) for ids in found[0]}) > 200


QUERY = "encoder/layers_0/self_attention/query/kernel"


@pytest.mark.exhaustive
def test_commands_add_and_merge_the_adapter(folders, run):
    Path("lines").write_text("".join(f"{line}\n" for line in LINES))
    options = ("--input=lines", "--max-new-tokens=9")
    for output, some in (("plain", ()), ("with", ("--adapter=one",))):
        assert run("translate", "own", *options, f"--output={output}", *some)[0] == 0
    assert Path("with").read_text().splitlines() == texts(Translator("own", adapter="one"))
    assert Path("with").read_text() != Path("plain").read_text()

    assert run("convert", "own", "merged.safetensors", "--adapter=one")[0] == 0
    tensors = weight_files.read("merged.safetensors")
    expected = flatten(lora.merge(load("own").with_adapter("one").params))[QUERY]
    assert np.array_equal(tensors["encoder.layers.0.self_attention.query.weight"].T, expected)
    code, printed = run("export", "own", "exported", "--to=torch", "--adapter=one")
    assert code == 0, printed
    assert texts(Translator("exported")) == texts(Translator("own", adapter="one"))
    for command in (("translate", "own"), ("convert", "own", "no"), ("export", "own", "no")):
        line = refused(*command, "--adapter=other")
        found = "other: the factors of decoder.layers.0.feed_forward.inner are [(3, 8), (10, 3)]"
        assert found in line
        assert not Path("no").exists()
    line = refused("translate", "one")
    assert "one: is an adapter; name its model, and this folder by --adapter or adapter=" in line


@pytest.mark.exhaustive
@pytest.mark.parametrize("to", ["ctranslate2", "onnx", "stablehlo"])
def test_every_program_gets_the_merged_model(folders, run, to):
    with unchecked():  # lengths are symbols
        code, printed = run("export", "own", "exported", f"--to={to}", "--adapter=one")
    assert code == 0, printed
    assert "sources have the same translation" in printed


@pytest.mark.exhaustive
def test_a_run_from_a_marian_writes_an_adapter_that_peft_loads(corpus, no_pictures):
    peft = pytest.importorskip("peft")
    ids = write_tokenizer("marian", Path("marian"))
    model = foreign_model("marian", **ids, max_position_embeddings=40)
    model.save_pretrained("marian")
    options = [*SHORT, "--steps=3", "--lora-rank=2", "--lora-targets", "*/value", "*/inner"]
    program(*TEXT, "--init=marian", "--output=on", *options)
    settings = json.loads(Path("on/adapter", peft_folder.SETTINGS).read_text())
    assert settings["base_model_name_or_path"] == "marian"  # as it was named
    assert "max_new_tokens" not in load("on").generation  # transformers' 20, which nobody named
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.AutoPeftModelForSeq2SeqLM.from_pretrained("on/adapter").eval()
    cli.main(["convert", "marian", "merged", "--output-layout=marian", "--adapter=on/adapter"])
    src = np.array([[5, 9, 7, 0], [8, 0, ids["pad_token_id"], ids["pad_token_id"]]], np.int32)
    tgt = np.array([[ids["pad_token_id"], 4, 6], [ids["pad_token_id"], 9, 5]], np.int32)
    theirs = adapted(
        input_ids=torch.tensor(src).long(),
        attention_mask=torch.tensor(src != ids["pad_token_id"]).long(),
        decoder_input_ids=torch.tensor(tgt).long(),
    ).logits.detach()
    mine = load("on")
    merged_config, merged = from_huggingface("merged")
    tgt_mask = np.tril(np.ones((1, 1, 3, 3), bool))
    for config, params in ((mine.config, mine.params), (merged_config, merged)):
        logits = forward(params, config=config, src=src, tgt=tgt, tgt_mask=tgt_mask)
        assert error(logits, theirs) < 1e-5
