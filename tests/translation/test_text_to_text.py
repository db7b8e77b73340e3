"""Every family on the command line: the strings that transformers generates, in every language.

Folders are written by transformers: a small model of random weights, and a tokenizer of its class.
"""

import functools
import json
import os
import shutil

import numpy as np
import pytest

from jax_transformer.convert.families import FAMILIES
from jax_transformer.convert.huggingface import load_folder, load_tokenizer, to_huggingface
from jax_transformer.convert.origin import read_origin
from jax_transformer.errors import InputError
from jax_transformer.export.readme import as_sources
from jax_transformer.export.stablehlo_folder import export_stablehlo
from jax_transformer.runs.arguments import Arguments
from jax_transformer.runs.initial_model import initial_model
from jax_transformer.translation import model_folder
from jax_transformer.translation.model_folder import TrainedModel, load
from jax_transformer.translation.translate import translate
from jax_transformer.translation.translator import Translator
from tests.convert.families.case import foreign_model, transformers
from tests.export.readme import run_readme
from tests.models import unchecked
from tests.tiers import tiered
from tests.tokenizers import class_folders as write
from tests.tokenizers.sentencepiece_models import text

LINES = [line for line in text(5, 900) if 12 < len(line) < 20][:60]
ODD = ["", "a </s> b", f">>fra<< {LINES[0]}", f"{LINES[1]} >>fra<<"]
LEARNED = {"max_position_embeddings": 40}
BANNED = {"bad_words_ids": [[5, 7], [9]], "length_penalty": 0.8}
# For each folder: the model type, how its tokenizer is written, the arguments of this, rows of the
# table that no token has, the start token and other keys of config.json, generation defaults.
FOLDERS = {
    "marian": (
        *("marian", write.write_marian, {}, 0, {}),
        {"renormalize_logits": True, "early_stopping": True, "min_length": 4, **BANNED},
    ),
    "pegasus": (
        *("pegasus", write.write_pegasus, {}, 0, {"decoder_start_token_id": 0}),
        {"early_stopping": False, "encoder_no_repeat_ngram_size": 3, **BANNED},
    ),
    "bart": (
        *("bart", write.write_bart, {}, 0, {"decoder_start_token_id": 2, **LEARNED}),
        {"forced_bos_token_id": 0, "no_repeat_ngram_size": 3, "early_stopping": True},
    ),
    "mvp": (
        *("mvp", write.write_bart, {"saved": False}, 0, {"decoder_start_token_id": 2, **LEARNED}),
        {"forced_bos_token_id": 0, "num_beams": 2},
    ),
    "blenderbot": (
        *("blenderbot", write.write_blenderbot, {"saved": False}, 0),
        {"decoder_start_token_id": 1, **LEARNED},
        {"encoder_no_repeat_ngram_size": 3, "min_length": 5, "length_penalty": 0.65},
    ),
    "mbart": ("mbart", write.write_mbart, {}, 0, LEARNED, {"early_stopping": True}),
    "mbart-50": (
        *("mbart", write.write_mbart_50, {"saved": False}, 0),
        {"decoder_start_token_id": 2, **LEARNED},
        {"early_stopping": True},
    ),
    "m2m100": (
        *("m2m_100", write.write_m2m100, {}, 8, {"decoder_start_token_id": 2, **LEARNED}),
        {"early_stopping": True},
    ),
    "nllb": (
        *("m2m_100", write.write_nllb, {"legacy_behaviour": True}, 2),
        {"decoder_start_token_id": 2, **LEARNED},
        {"num_beams": 1},
    ),
    "t5": ("t5", write.write_t5, {}, 28, {"decoder_start_token_id": 0}, {"length_penalty": 0.6}),
    "mt5": ("mt5", write.write_t5, {"saved": False}, 5, {"decoder_start_token_id": 0}, {}),
    "umt5": ("umt5", write.write_t5, {}, 0, {"decoder_start_token_id": 0}, {"num_beams": 1}),
}
# Codes of the source and of three targets; the first target is the one that is named.
CODES = {
    "mbart": ("fr_XX", "de_DE", "zh_CN"),
    "mbart-50": ("fr_XX", "af_ZA", "sl_SI"),
    "m2m100": ("fr", "zu", "de"),
    "nllb": ("fra_Latn", "zho_Hans", "deu_Latn"),
}
FIRST = {"mbart": "decoder_start_token_id"}
EXPORTED = ("t5", "mbart-50")  # without languages, and with them
WITH_ODD_LINES = ("marian", "pegasus")


class Folder:
    """A folder that transformers has written, and what transformers translates from it."""

    def __init__(self, kind, path):
        model_type, written, options, padding, keys, generation = FOLDERS[kind]
        path.mkdir(exist_ok=True)
        self.path, self.codes = path, CODES.get(kind)
        self.key = FIRST.get(kind, "forced_bos_token_id")
        self.architecture = getattr(transformers, FAMILIES[model_type].architecture)
        self.tokenizer = written(path, **options)
        pad, eos = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
        ids = {"pad_token_id": pad, "eos_token_id": eos} | keys
        if model_type == "marian":
            ids["decoder_start_token_id"] = pad
        model = foreign_model(model_type, None, vocab_size=len(self.tokenizer) + padding, **ids)
        for name, leaf in model.named_parameters():  # translations depend on their sources
            if "encoder_attn." in name or "EncDecAttention" in name:
                leaf.data *= 4
        model.save_pretrained(path)
        start = {k: v for k, v in ids.items() if k.endswith("token_id")}
        defaults = {"num_beams": 3, "max_length": 12, "no_repeat_ngram_size": 2}
        defaults |= {"forced_eos_token_id": eos, **start, **generation}
        defaults["bad_words_ids"] = [[pad], *generation.get("bad_words_ids", ())]
        (path / "generation_config.json").write_text(json.dumps(defaults))

    def load(self):
        """Return the model, set to its first two languages where it has several."""
        source, target = self.codes[:2] if self.codes else (None, None)
        return load(self.path, source_lang=source, target_lang=target)

    def theirs(self, path=None, **options):
        """Return the translations of a folder by transformers."""
        model = self.architecture.from_pretrained(path or self.path).eval()
        tokenizer = self.tokenizer
        if path is not None:
            tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        inputs = tokenizer(LINES, return_tensors="pt", padding=True)
        # Rows without a token, which are not generated here.
        absent = [*range(len(tokenizer), model.config.vocab_size)]
        found = model.generate(**inputs, suppress_tokens=absent, **options)
        return tokenizer.batch_decode(found, skip_special_tokens=True)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """A function from a kind to its folder, which is written once."""
    return functools.cache(lambda kind: Folder(kind, tmp_path_factory.mktemp("folder")))


@pytest.fixture
def copied(folder_of, tmp_path):
    """A function that copies the folder of a Marian with other generation defaults."""

    def copied(**values):
        copy = shutil.copytree(folder_of("marian").path, tmp_path / "copy", dirs_exist_ok=True)
        (copy / "generation_config.json").write_text(json.dumps(values))
        return copy

    return copied


@pytest.fixture
def translated(run):
    """Translate the lines; return the refusal, None without one, and the translations."""

    def translated(folder, *flags):
        refusal, printed = run("translate", folder, *flags, lines=LINES)
        return refusal, printed.split("\n")[:-1]

    return translated


def assert_same_strings(found, expected):
    refusal, lines = found
    assert refusal is None
    expected = [line.replace("\n", " ") for line in expected]
    equal = sum(a == b for a, b in zip(lines, expected, strict=True))
    print(f"\n{equal} of {len(LINES)} strings equal, {len({*lines})} different")
    assert lines == expected
    assert len({*lines}) > 20


@pytest.mark.parametrize("kind", tiered([kind for kind in FOLDERS if kind not in CODES], ["t5"]))
def test_the_strings_are_those_of_transformers(folder_of, translated, kind):
    folder = folder_of(kind)
    assert_same_strings(translated(folder.path), folder.theirs())
    refusal, lines = translated(folder.path, "--target-lang", "de_DE")
    assert refusal.endswith("the model has no language codes; leave --target-lang out")
    assert lines == []


@pytest.mark.exhaustive
def test_flags_win_over_the_defaults_and_the_defaults_can_be_ignored(folder_of, run, copied):
    marian = folder_of("marian").path
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
def test_without_a_limit_that_of_transformers_holds_and_is_said(folder_of, run, copied):
    marian = folder_of("marian")
    values = json.loads((marian.path / "generation_config.json").read_text())
    del values["max_length"]
    other = copied(**values)
    refusal, printed = run("translate", other, lines=LINES)
    assert refusal is None
    assert printed.split("\n")[:-1] == marian.theirs(other)
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
def test_bad_input_is_one_line_and_nothing_is_written(folder_of, run, tmp_path, damage, message):
    copy = shutil.copytree(folder_of("marian").path, tmp_path / "copy")
    damage(copy)
    (tmp_path / "out").mkdir()
    lines = ["abc", ">>xyz<< abc"]
    refusal, printed = run("translate", copy, f"--output={tmp_path}/out/text", lines=lines)
    assert refusal.startswith("error: ")
    assert message in refusal
    assert "\n" not in refusal
    assert printed == ""
    assert os.listdir(tmp_path / "out") == []


def test_padding_that_a_line_spells_is_left_out(folder_of):
    """transformers attends to it."""
    folder = folder_of("t5")
    tokenizer, pad_id = load_tokenizer(folder.path)[1], folder.tokenizer.pad_token_id
    plain, spelt = "tlx k tlx", ["<pad>tlx k tlx", "tlx<pad> k<pad><pad> tlx", "tlx k tlx<pad>"]
    (wanted,) = tokenizer.encode_source([plain])
    for ids in tokenizer.encode_source(spelt):
        assert pad_id in ids
        assert [i for i in ids if i != pad_id] == wanted
    results = list(Translator(folder.path)([plain, *spelt, "<pad>"], alignments=True))
    for result in results[1:4]:
        assert result.tokens.tolist() == results[0].tokens.tolist()
        assert result.alignment.source == results[0].alignment.source
    assert results[4].text == ""
    settings = {"pad_id": pad_id, "prefix": [], "suffix": wanted[-1:], "longest": 64}
    encode = folder.tokenizer.backend_tokenizer.encode
    found = as_sources(spelt, lambda line: encode(line, add_special_tokens=False).ids, settings)
    assert found == [wanted] * 3


@pytest.mark.exhaustive
def test_a_t5_has_no_longest_text(folder_of, translated):
    """transformers ignores n_positions; here it is the limit until another one is named."""
    folder = folder_of("t5")
    tokenizer, words = folder.tokenizer, " ".join(LINES * 40).split()
    lengths = [len(ids) for ids in tokenizer(words, add_special_tokens=False).input_ids]
    counts = np.cumsum(lengths) + 1  # and EOS
    starts = (0, 7, 11, 20)
    lines = [
        " ".join(words[start : np.searchsorted(counts, counts[start] + length)])
        for start, length in zip(starts, (520, 700, 1024, 1450), strict=True)
    ]
    longest = [len(ids) for ids in tokenizer(lines).input_ids]
    assert min(longest) > 512
    assert 1400 < max(longest) <= 1500
    model = folder.architecture.from_pretrained(folder.path).eval()
    inputs = folder.tokenizer(lines, return_tensors="pt", padding=True)
    expected = model.generate(**inputs).tolist()
    results = list(Translator(folder.path, max_length=1500)(lines))
    for result, ids in zip(results, expected, strict=True):
        padded = [ids[0], *result.tokens.tolist()]
        assert padded == ids[: len(padded)]
        assert {*ids[len(padded) :]} <= {folder.tokenizer.pad_token_id}
    assert len({result.text for result in results}) > 2
    with pytest.raises(InputError, match=r"takes max_length=512; raise max_length, split"):
        Translator(folder.path)(lines[0])


@pytest.mark.parametrize("kind", tiered(CODES, [], ["mbart-50", "nllb"]))
def test_flags_set_the_languages(folder_of, translated, kind):
    folder = folder_of(kind)
    source, target, other = folder.codes
    flags = ["--source-lang", source, "--target-lang"]
    translations = []
    for code in (target, other):
        folder.tokenizer.src_lang = source
        first = load_tokenizer(folder.path)[1].languages.ids[code]
        expected = folder.theirs(**{folder.key: first})
        translations.append(translated(folder.path, *flags, code))
        assert_same_strings(translations[-1], expected)
    assert translations[0] != translations[1]
    refusal, lines = translated(folder.path)
    assert "the model needs the language of its targets: name its code by --target-lang" in refusal
    assert lines == []
    refusal, _ = translated(folder.path, "--target-lang", target + "x")
    assert refusal.startswith(f"error: {folder.path}: target_lang='{target}x' is none of the model")
    assert target in refusal.replace(target + "x", "")


@pytest.mark.parametrize("kind", tiered(CODES, [], ["mbart-50", "nllb"]))
def test_a_model_keeps_its_languages_and_takes_them_home(folder_of, translated, tmp_path, kind):
    """As a run that starts from the folder leaves it: no command after it needs a flag."""
    folder = folder_of(kind)
    source, target, other = folder.codes
    arguments = Arguments(init=folder.path, source_lang=source, target_lang=target)
    start = initial_model(arguments)
    code = start.tokenizer.languages.ids[target]
    assert start.tokenizer.bos_id == start.config.bos_id
    assert (start.config.bos_id == code) is start.tokenizer.languages.starts
    model = TrainedModel(start.config, start.params, start.tokenizer, start.generation)
    model_folder.write(tmp_path / "own", model, start.origin)
    flags = ["--source-lang", source, "--target-lang", target]
    refusal, expected = translated(folder.path, *flags)
    assert refusal is None
    assert translated(tmp_path / "own") == (None, expected)
    changed = translated(tmp_path / "own", "--target-lang", other)
    assert changed == translated(folder.path, *flags[:3], other)
    assert changed[1] != expected
    family = {"family": start.origin.model_type, "tokenizer": start.tokenizer}
    theirs = transformers.AutoTokenizer.from_pretrained(folder.path)
    for name, options in (("home", {"origin": start.origin}), ("new", {})):
        to_huggingface(start.params, start.config, tmp_path / name, **family, **options)
        again = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        assert type(again) is type(theirs)
        assert (again.src_lang, again.tgt_lang) == (source, target)
        assert again(text_target=LINES).input_ids == start.tokenizer.encode_target(LINES)
        assert again(LINES).input_ids == start.tokenizer.encode_source(LINES)
    assert translated(tmp_path / "home") == (None, expected)
    assert folder.theirs(tmp_path / "home") == expected
    generation = json.loads((tmp_path / "new" / "generation_config.json").read_text())
    assert generation[folder.key] == code


@pytest.mark.parametrize("kind", tiered([kind for kind in FOLDERS if kind not in CODES], []))
def test_a_tokenizer_goes_home_with_an_origin_and_without(folder_of, tmp_path, kind):
    folder = folder_of(kind)
    config, params, tokenizer, _ = load_folder(folder.path)
    origin, _ = read_origin(folder.path)
    family = {"family": origin.model_type, "tokenizer": tokenizer}
    to_huggingface(params, config, tmp_path / "home", **family, origin=origin)
    to_huggingface(params, config, tmp_path / "new", **family)
    names = [path.name for path in folder.path.iterdir() if path.name != "model.safetensors"]
    for name in names:
        assert (tmp_path / "home" / name).read_bytes() == (folder.path / name).read_bytes(), name
    for path in (tmp_path / "home", tmp_path / "new"):
        theirs = transformers.AutoTokenizer.from_pretrained(path)
        assert len(theirs) == len(folder.tokenizer)
        assert theirs(LINES).input_ids == tokenizer.encode_source(LINES)


def test_the_folder_names_the_languages_where_no_flag_does(tmp_path):
    """src_lang and tgt_lang, the forced or the first token; one that contradicts is refused."""
    folder = Folder("nllb", tmp_path / "model")
    code = load_tokenizer(folder.path)[1].languages.ids["deu_Latn"]

    def languages(generation=(), **values):
        for name, changes in (
            ("tokenizer_config.json", values),
            ("generation_config.json", dict(generation)),
        ):
            content = json.loads((folder.path / name).read_text()) | changes
            (folder.path / name).write_text(json.dumps(content))
        found = load_tokenizer(folder.path)[1].languages
        return found.source, found.target

    assert languages() == ("eng_Latn", None)
    assert languages(src_lang="fra_Latn", tgt_lang="zho_Hans") == ("fra_Latn", "zho_Hans")
    assert load(folder.path).generation["forced_first_token"] != code
    assert languages(tgt_lang=None, generation={"forced_bos_token_id": code}) == (
        *("fra_Latn", "deu_Latn"),
    )
    assert load(folder.path).generation["forced_first_token"] == code
    with pytest.raises(InputError) as refused:
        languages(tgt_lang="zho_Hans")
    assert str(refused.value) == (
        f"{folder.path}: tgt_lang='zho_Hans', but forced_bos_token_id={code} is 'deu_Latn'; name "
        "the target's code by --target-lang (in Python target_lang)"
    )
    named = load(folder.path, target_lang="fra_Latn")
    assert named.tokenizer.languages.target == "fra_Latn"
    ignored = load(folder.path, ignore_generation_config=True)
    code = ignored.tokenizer.languages.ids["zho_Hans"]
    absent = tuple(range(len(folder.tokenizer), ignored.config.tgt_vocab_size))
    assert ignored.generation == {"forced_first_token": code, "banned_tokens": absent}


def test_languages_need_a_model_or_a_tokenizer_with_codes(folder_of):
    with pytest.raises(InputError) as refused:
        initial_model(Arguments(target_lang="de_DE"))
    assert str(refused.value) == (
        "source_lang=None and target_lang='de_DE' need a model or a tokenizer that has language "
        "codes: name it by --init or --tokenizer"
    )
    folder = folder_of("mbart-50")
    languages = {"source_lang": "fr_XX", "target_lang": "sl_SI"}
    by_tokenizer = initial_model(Arguments(tokenizer=folder.path, **languages))
    by_model = initial_model(Arguments(tokenizer=folder.path, init=folder.path, **languages))
    assert by_tokenizer.tokenizer.digest() == by_model.tokenizer.digest()
    assert by_tokenizer.tokenizer.languages.target == "sl_SI"


@pytest.mark.parametrize("kind", tiered(["mbart-50", "nllb"], ["mbart-50"]))
def test_a_translator_speaks_each_language_that_a_call_names(folder_of, tmp_path, kind):
    folder = folder_of(kind)
    source, *targets = folder.codes
    translator = Translator(folder.path, source_lang=source)
    with pytest.raises(InputError, match="needs the language of its targets"):
        translator(LINES)
    for target in targets:
        model = load(folder.path, source_lang=source, target_lang=target)
        expected = [best.text for best, *_ in translate(model, LINES[:9])]
        model_folder.save(tmp_path / target, translator.model.with_languages(None, target, ""))
        named = Translator(tmp_path / target, target_lang=targets[0])  # an own folder names another
        for results in (
            translator(LINES[:9], target_lang=target),
            Translator(tmp_path / target)(LINES[:9]),
            named(LINES[:9], target_lang=target),
        ):
            assert [result.text for result in results] == expected
        assert named.model.tokenizer.languages.target == targets[0]


@pytest.mark.parametrize("kind", tiered(FOLDERS, [], EXPORTED))
def test_every_family_goes_to_ctranslate2(folder_of, tmp_path, kind):
    ctranslate2_folder = pytest.importorskip("jax_transformer.export.ctranslate2_folder")
    model = folder_of(kind).load()
    assert ctranslate2_folder.export_ctranslate2(model, tmp_path / "out").startswith("16 of 16")


@pytest.mark.parametrize("kind", tiered(FOLDERS, [], EXPORTED + WITH_ODD_LINES))
def test_every_family_goes_to_stablehlo(folder_of, tmp_path, kind):
    model = folder_of(kind).load()
    lines = [*LINES, *ODD] if kind in WITH_ODD_LINES else LINES
    with unchecked():  # lengths are symbolic
        assert export_stablehlo(model, tmp_path / "out", beam_size=3).count("16 of 16") == 2
    for search, beam_size in (("greedy", 1), ("beam", 3)):
        results = Translator(model)(lines, beam_size=beam_size)
        assert run_readme(tmp_path / "out", lines, search) == [result.text for result in results]


@pytest.mark.parametrize("kind", tiered(FOLDERS, [], EXPORTED))
def test_every_family_goes_to_onnx_and_to_torch(folder_of, tmp_path, kind):
    onnx_folder = pytest.importorskip("jax_transformer.export.onnx_folder")
    torch_folder = pytest.importorskip("jax_transformer.export.torch_folder")
    model = folder_of(kind).load()
    options = {"max_new_tokens": 12}  # and those that the program of the README honours
    for name in ("start_token", "forced_first_token"):
        options |= {name: model.generation[name]} if name in model.generation else {}
    model = model._replace(generation=options)
    with unchecked():
        assert torch_folder.export_torch(model, tmp_path / "torch").startswith("16 of 16")
        assert onnx_folder.export_onnx(model, tmp_path / "onnx").startswith("16 of 16")
    found = run_readme(tmp_path / "onnx", LINES, without=["jax", "torch"])
    assert found == [result.text for result in Translator(model)(LINES)]
    assert len({*found}) > 10  # without its rules, a search repeats itself
