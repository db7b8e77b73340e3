"""A Hugging Face folder on the command line: the strings that transformers generates from it."""

import json
import os
import shutil

import pytest

from jax_transformer import Translator
from jax_transformer.export.stablehlo_folder import export_stablehlo
from tests.convert.families.case import FAMILIES, foreign_model, transformers, write_tokenizer
from tests.export.readme import run_readme
from tests.models import unchecked
from tests.tiers import tiered
from tests.tokenizers.sentencepiece_models import text

LINES = [line for line in text(5, 400) if len(line) < 24][:120]
COMMON = {"num_beams": 3, "max_length": 14, "length_penalty": 0.8, "no_repeat_ngram_size": 2}
GENERATION = {
    "marian": {"renormalize_logits": True, "early_stopping": True, "min_length": 4},
    "pegasus": {"early_stopping": False, "encoder_no_repeat_ngram_size": 3},
}


@pytest.fixture(scope="module", params=tiered(GENERATION, ["marian"]))
def folder(request, tmp_path_factory):
    return write_folder(request.param, tmp_path_factory.mktemp(request.param) / "model")


@pytest.fixture(scope="module")
def marian(tmp_path_factory):
    return write_folder("marian", tmp_path_factory.mktemp("marian") / "model")


def write_folder(family, folder):
    """Write a model of random weights with generation defaults of its own."""
    changes = write_tokenizer(family, folder)
    model = foreign_model(family, None, **changes)
    model.save_pretrained(folder)
    pad, start, eos = (
        getattr(model.config, f"{name}_token_id") for name in ("pad", "decoder_start", "eos")
    )
    ids = {"pad_token_id": pad, "decoder_start_token_id": start, "eos_token_id": eos}
    ids |= {"forced_eos_token_id": eos, "bad_words_ids": [[pad], [5, 7], [9]]}
    defaults = COMMON | ids | GENERATION[family]
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    return folder


@pytest.fixture
def copied(marian, tmp_path):
    """A function that copies the folder with other generation defaults."""

    def copied(**values):
        copy = shutil.copytree(marian, tmp_path / "copy", dirs_exist_ok=True)
        (copy / "generation_config.json").write_text(json.dumps(values))
        return copy

    return copied


def theirs(folder, lines):
    """Return what transformers translates by the folder's own defaults."""
    family = json.loads((folder / "config.json").read_text())["model_type"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = getattr(transformers, FAMILIES[family].architecture).from_pretrained(folder).eval()
    inputs = tokenizer(lines, return_tensors="pt", padding=True)
    return tokenizer.batch_decode(model.generate(**inputs), skip_special_tokens=True)


@pytest.mark.exhaustive
def test_the_strings_are_those_of_transformers(folder, run):
    refusal, printed = run("translate", folder, lines=LINES)
    assert refusal is None
    ours, expected = printed.split("\n")[:-1], theirs(folder, LINES)
    equal = sum(a == b for a, b in zip(ours, expected, strict=True))
    print(f"\n{equal} of {len(LINES)} strings equal, {len({*ours})} different")
    assert ours == expected
    assert len({*ours}) > 20


@pytest.mark.exhaustive
def test_flags_win_over_the_defaults_and_the_defaults_can_be_ignored(marian, run, copied):
    printed = run("translate", marian, lines=LINES[:9])[1]
    ignored = run("translate", marian, "--ignore-generation-config", lines=LINES[:9])[1]
    flags = ["--beam=1", "--max-new-tokens=5"]
    greedy = run("translate", marian, *flags, lines=LINES[:9])[1]
    assert len({printed, ignored, greedy}) == 3
    values = json.loads((marian / "generation_config.json").read_text())
    other = copied(**values, do_sample=True)
    refusal, printed = run("translate", other, lines=LINES[:9])
    assert refusal == (
        f"error: {other}/generation_config.json: do_sample=True cannot be honoured; "
        "--ignore-generation-config ignores the file's generation defaults"
    )
    assert printed == ""
    assert run("translate", other, "--ignore-generation-config", lines=LINES[:9])[1] == ignored


@pytest.mark.exhaustive
def test_without_a_limit_that_of_transformers_holds_and_is_said(marian, run, copied):
    values = json.loads((marian / "generation_config.json").read_text())
    del values["max_length"]
    other = copied(**values)
    refusal, printed = run("translate", other, lines=LINES[:20])
    assert refusal is None
    assert printed.split("\n")[:-1] == theirs(other, LINES[:20])
    assert run.error.startswith(f"{other} limits no length, so a translation ends after 20 tokens")
    run("translate", other, "--max-new-tokens=9", lines=LINES[:2])
    assert run.error == ""


def cut_off(name, share):
    def damage(folder):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(share * len(content))])

    return damage


def changed(name, **values):
    def damage(folder):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | values))

    return damage


BAD = {
    "no tokenizer": (
        lambda folder: (folder / "vocab.json").unlink(),
        "vocab.json cannot be read; a tokenizer file must be there",
    ),
    "a larger tokenizer": (
        changed("vocab.json", more=5000),
        "has 5001 ids, but the model 410; use the tokenizer that the model was trained with",
    ),
    "half a sentencepiece model": (cut_off("source.spm", 0.5), "source.spm: is no"),
    "half a vocabulary": (cut_off("vocab.json", 0.5), "vocab.json is no readable JSON"),
    "no vocabulary": (changed("vocab.json", a=[1]), "vocab.json: is not a vocabulary"),
    "half a config": (cut_off("config.json", 0.5), "config.json: is damaged"),
    "half the defaults": (cut_off("generation_config.json", 0.5), "generation_config.json"),
    "a key that cannot be honoured": (
        changed("generation_config.json", num_beam_groups=2),
        "num_beam_groups=2 cannot be honoured; --ignore-generation-config ignores",
    ),
    "an id outside the vocabulary": (
        changed("generation_config.json", forced_bos_token_id=9999),
        "forced_bos_token_id=9999 must be a whole number, at least 0",
    ),
    "an unknown language": (
        lambda folder: None,
        "line 2 begins with the language code '>>xyz<<', but the model knows >>fra<<, >>deu<<",
    ),
}


@pytest.mark.parametrize(("damage", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line_and_nothing_is_written(marian, run, tmp_path, damage, message):
    copy = shutil.copytree(marian, tmp_path / "copy")
    damage(copy)
    (tmp_path / "out").mkdir()
    lines = ["abc", ">>xyz<< abc"]
    refusal, printed = run("translate", copy, f"--output={tmp_path}/out/text", lines=lines)
    assert refusal.startswith("error: ")
    assert message in refusal
    assert "\n" not in refusal
    assert printed == ""
    assert os.listdir(tmp_path / "out") == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", GENERATION)
def test_a_folder_goes_to_stablehlo(family, tmp_path):
    translator = Translator(write_folder(family, tmp_path / "model"))
    with unchecked():  # lengths are symbolic
        assert export_stablehlo(translator.model, tmp_path / "out").count("16 of 16") == 2
    lines = [*LINES[:40], "", "a </s> b", ">>fra<< " + LINES[0], LINES[1] + " >>fra<<"]
    for search, beam_size in (("greedy", 1), ("beam", 3)):
        expected = [result.text for result in translator(lines, beam_size=beam_size)]
        assert run_readme(tmp_path / "out", lines, search) == expected
