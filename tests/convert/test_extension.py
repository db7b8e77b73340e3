"""Folders of transformers with more languages, characters and words, against transformers."""

import dataclasses
import json
import random
import warnings
from itertools import chain

import numpy as np
import pytest

from jax_transformer import Translator
from jax_transformer.adapters import lora, read_adapter
from jax_transformer.commands import main as cli
from jax_transformer.convert.extension import extend
from jax_transformer.convert.huggingface import from_huggingface, load_tokenizer
from jax_transformer.errors import InputError
from jax_transformer.tokenizers import extended
from tests.convert.families.case import (
    foreign_class,
    foreign_model,
    logits_error,
    read_values,
    strictly_loaded,
    transformers,
    weights_of,
)
from tests.parity.ladder import bound
from tests.tiers import tiered
from tests.tokenizers import class_folders as writers
from tests.tokenizers import sentencepiece_models
from tests.tokenizers.sentencepiece_models import text

TIFINAGH = "".join(map(chr, range(0x2D30, 0x2D48)))
# A language of new letters, with words that have old letters, digits and marks beside them.
peft = pytest.importorskip("peft")
NEW = text(5, 400, f"{TIFINAGH}abc1")
OLD = text(1, 1000)
TOKENS = ["Zürich Gare", "qqz", "xⵣq"]
# By name: writes the tokenizer; the family; a new code, a relative and another code, as the command
# takes them; the tokens that these are.
FOLDERS = {
    "nllb": (writers.write_nllb, "m2m_100", ("tzm_Tfng", "fra_Latn", "zgh_Tfng"), "{}"),
    "m2m100": (writers.write_m2m100, "m2m_100", ("tzm", "ar", "zgh"), "__{}__"),
    "mbart_50": (writers.write_mbart_50, "mbart", ("tz_MA", "ar_AR", "zg_MA"), "{}"),
    "mbart": (writers.write_mbart, "mbart", ("tz_MA", "ar_AR", "zg_MA"), "{}"),
    "t5": (writers.write_t5, "t5", None, ""),
    "mt5": (lambda folder: writers.write_t5(folder, saved=False), "mt5", None, ""),
    "bart": (lambda folder: writers.write_bart(folder, saved=False), "bart", None, ""),
    "marian": (writers.write_marian, "marian", ("tzm", "fra", "zgh"), ">>{}<<"),
}
TAKES_PIECES = FOLDERS.keys() - {"m2m100", "mbart", "bart"}


def write_folder(name, folder):
    """Write a model and its tokenizer; return the number of its tokens."""
    write, family, *_ = FOLDERS[name]
    folder.mkdir()
    tokenizer = write(folder)
    # M2M100 and T5 have more rows than tokens.
    size = len(tokenizer) + (3 if name in ("m2m100", "t5") else 0)
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    if family == "marian":
        ids |= {"decoder_start_token_id": ids["pad_token_id"], "forced_eos_token_id": 0}
    foreign_model(family, None, vocab_size=size, **ids).save_pretrained(folder)
    return len(tokenizer)


@pytest.fixture(scope="module", params=tiered([*FOLDERS], ["nllb", "mt5"]))
def both(request, tmp_path_factory):
    """The name of a folder, the folder, and what it becomes."""
    name, path = request.param, tmp_path_factory.mktemp(request.param)
    write_folder(name, path / "old")
    command = ["extend", str(path / "old"), str(path / "new")]
    (path / "tokens").write_text("\n".join(TOKENS) + "\n")
    (path / "text").write_text("\n".join(NEW) + "\n")
    command += ["--tokens", str(path / "tokens")]
    if FOLDERS[name][2]:
        code, relative, other = FOLDERS[name][2]
        command += ["--language", f"{code}={relative}", other]
    if name in TAKES_PIECES:
        command += ["--characters", str(path / "text"), "--sentencepiece", "200"]
    cli.command_call(*command)()
    return name, path / "old", path / "new"


def read(folder):
    return transformers.AutoTokenizer.from_pretrained(folder)


def test_earlier_ids_stay_and_new_ones_are_those_of_transformers(both):
    name, old, new = both
    tokenizers = [read(folder) for folder in (old, new)]
    assert type(tokenizers[0]) is type(tokenizers[1])
    ours = [load_tokenizer(folder)[1] for folder in (old, new)]
    assert ours[1].encode_text(OLD) == ours[0].encode_text(OLD)
    assert tokenizers[1](OLD).input_ids == tokenizers[0](OLD).input_ids
    chance = random.Random(3)
    mixed = [f"{a} {chance.choice(TOKENS)} {b}" for a, b in zip(OLD[:400], NEW, strict=False)]
    for lines in (NEW, mixed, [f"{token}." for token in TOKENS]):
        theirs = tokenizers[1](lines, add_special_tokens=False).input_ids
        assert ours[1].encode_text(lines) == theirs
        assert [ours[1].decode(ids) for ids in theirs] == tokenizers[1].batch_decode(
            theirs, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    if name in TAKES_PIECES:
        ids = ours[1].encode_text(NEW)
        assert ours[0].unk_id in chain(*ours[0].encode_text(NEW))
        assert ours[1].unk_id not in chain(*ids)
        assert [ours[1].decode(row) for row in ids] == NEW
        assert sum(map(len, ids)) < sum(len(line.replace(" ", "")) for line in NEW)  # pieces


def test_the_model_is_the_same_with_more_rows(both):
    name, old, new = both
    (config, _), (larger, grown) = (from_huggingface(folder) for folder in (old, new))
    assert larger.tgt_vocab_size > config.tgt_vocab_size
    sizes = {"src_vocab_size": config.src_vocab_size, "tgt_vocab_size": config.tgt_vocab_size}
    assert dataclasses.replace(larger, **sizes) == config
    model = strictly_loaded(foreign_class(FOLDERS[name][1]), new)
    assert logits_error(grown, larger, model) <= bound("logits", "float32")


def test_new_rows_are_means_of_the_rows_that_wrote_them(both):
    name, old, new = both
    before, after = (load_tokenizer(folder)[1] for folder in (old, new))
    tables = [weights_of(folder) for folder in (old, new)]
    known, form = before.source.segmenter.size, FOLDERS[name][3]
    unwritten = {before.unk_id, before.token_id("▁")}

    def mean_of(ids):
        rows = [i for i in ids if i not in unwritten]
        return lambda table: table[rows or slice(known)].mean(axis=0, dtype=np.float64)

    expected = {token: mean_of(before.encode_text([token])[0]) for token in TOKENS}
    if FOLDERS[name][2]:
        code, relative, other = (form.format(each) for each in FOLDERS[name][2])
        codes = list(extended.known_codes(before).values())
        counts = {"nllb": 4, "m2m100": 100, "mbart_50": 52, "mbart": 25, "marian": 2}
        assert len(codes) == counts[name]
        expected[code] = lambda table: table[before.source.segmenter.token_id(relative)]
        expected[other] = lambda table: table[codes].mean(axis=0, dtype=np.float64)
    if name in TAKES_PIECES:
        expected[TIFINAGH[0]] = mean_of([])
        pieces = [after.source.segmenter.token(i) for i in chain(*after.encode_text(NEW))]
        expected[max(pieces, key=len)] = mean_of([])
    grown = 0
    for name, table in tables[0].items():
        larger = tables[1][name]
        axes = [axis for axis in range(table.ndim) if table.shape[axis] < larger.shape[axis]]
        if not axes:
            np.testing.assert_array_equal(larger, table)
            continue
        table, larger = (np.moveaxis(each, axes[0], 0) for each in (table, larger))
        np.testing.assert_array_equal(larger[:known], table[:known])
        for token, row in expected.items():
            found = larger[after.source.segmenter.token_id(token)]
            np.testing.assert_array_equal(found, row(table).astype(table.dtype), token)
        grown += 1
    assert grown >= 1


def test_it_translates_as_transformers_does(both):
    name, _, new = both
    tokenizer, languages, options = read(new), {}, {}
    if FOLDERS[name][2] and name != "marian":
        code, _, other = FOLDERS[name][2]
        languages = {"source_lang": other, "target_lang": code}
        if name == "m2m100":  # it knows a list of sources, as the page about new languages says
            tokenizer.lang_code_to_token[other] = token = f"__{other}__"
            tokenizer.lang_token_to_id[token] = tokenizer.convert_tokens_to_ids(token)
        tokenizer.src_lang = languages["source_lang"]
        key = "decoder_start_token_id" if name == "mbart" else "forced_bos_token_id"
        options[key] = tokenizer.convert_tokens_to_ids(FOLDERS[name][3].format(code))
    lines = [f"{a[:9]} {b[:5]}" for a, b in zip(NEW[:100], OLD[100:200], strict=True)]
    if name == "marian":
        lines = [f">>{FOLDERS[name][2][0]}<< {line}" for line in lines]
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(new)
    absent = sorted({*range(model.config.vocab_size)} - {*tokenizer.get_vocab().values()})
    if absent:
        options["suppress_tokens"] = absent
    batch = tokenizer(lines, padding=True, return_tensors="pt")
    theirs = model.generate(**batch, **options, max_new_tokens=9, num_beams=1)
    theirs = tokenizer.batch_decode(theirs, skip_special_tokens=True)
    results = Translator(new, **languages)(lines, beam_size=1, max_new_tokens=9)
    assert [result.text for result in results] == theirs


def test_all_else_of_a_folder_stays(tmp_path):
    write_folder("nllb", tmp_path / "old")
    (tmp_path / "old" / "README.md").write_bytes(b"a card\r\n")
    extend(tmp_path / "old", tmp_path / "new", tokens=["qqz"])
    changed = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    names = {path.name for path in (tmp_path / "old").iterdir()}
    assert {path.name for path in (tmp_path / "new").iterdir()} == names
    for name in names - changed:
        assert (tmp_path / "new" / name).read_bytes() == (tmp_path / "old" / name).read_bytes()
    values = read_values(tmp_path / "old")
    assert read_values(tmp_path / "new") == values | {"vocab_size": values["vocab_size"] + 1}


REFUSALS = {
    "a code that is there": (
        "nllb",
        {"languages": {"fra_Latn": None}},
        r"language 'fra_Latn' is there: its id is 13\d; name a new one",
    ),
    "a relative that is not": (
        "nllb",
        {"languages": {"tzm_Tfng": "xxx_Latn"}},
        r"language 'xxx_Latn': is no code of the model; name one of its 4, such as deu_Latn",
    ),
    "a code of another form": (
        "nllb",
        {"languages": {"tamazight": None}},
        r"language 'tamazight': a code of this model looks like deu_Latn",
    ),
    "a model without codes": ("t5", {"languages": {"xx": None}}, "the model has no language codes"),
    "a text that is known": ("t5", {"text": ["ab"]}, r"nothing would be added"),
    "a token that is there": (
        "t5",
        {"tokens": ["▁"]},
        r"the token '.u2581' is there already: its id is \d+; remove it",
    ),
    "a token named twice": ("t5", {"tokens": ["qz", "qz"]}, r"the token 'qz' is named twice"),
    "a token with a space": ("t5", {"tokens": [" qz"]}, r"must not begin or end with a space"),
    "characters of M2M100": (
        "m2m100",
        {"text": ["ⴰ"]},
        r"the vocabulary of a M2M100Tokenizer takes no characters; name them as tokens",
    ),
    "too few pieces": (
        "t5",
        {"text": NEW, "sentencepiece": 5},
        r"vocab_size=5 must be at least \d+: 0 special tokens and each character",
    ),
    "bytes": ("byt5", {"text": NEW}, "writes every text as bytes, so it lacks no token"),
    "two vocabularies": ("two", {"tokens": ["qz"]}, "the languages have a vocabulary each"),
    "no folder": ("none", {"tokens": ["qz"]}, "is no folder of transformers"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    path = tmp_path_factory.mktemp("refused")
    for name in ("nllb", "m2m100", "t5"):
        write_folder(name, path / name)
    (path / "byt5").mkdir()
    writers.write_byt5(path / "byt5")
    foreign_model("t5", None, vocab_size=384).save_pretrained(path / "byt5")
    size = sentencepiece_models.write_marian(path / "two", separate=True)
    ids = {"pad_token_id": size - 1, "eos_token_id": 0, "decoder_start_token_id": size - 1}
    foreign_model("marian", None, vocab_size=size, **ids).save_pretrained(path / "two")
    return path


@pytest.mark.parametrize(("name", "options", "message"), REFUSALS.values(), ids=REFUSALS)
def test_bad_input_is_refused_in_one_line(name, options, message, folders, tmp_path):
    with pytest.raises(InputError, match=message) as caught:
        extend(folders / name, tmp_path / "new", **options)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_character_that_is_a_space_is_refused(tmp_path):
    write_folder("nllb", tmp_path / "old")
    path = tmp_path / "old" / "tokenizer.json"
    values = json.loads(path.read_text())  # the usual normalizer writes an ordinary space for it
    path.write_text(json.dumps(values | {"normalizer": None}))
    with pytest.raises(
        InputError, match=r"the character '\\u2003' is a space and cannot be a token"
    ):
        extend(tmp_path / "old", tmp_path / "new", text=["ⴰ\u2003ⴱ"])
    assert not (tmp_path / "new").exists()


def test_files_of_the_command_must_have_text(tmp_path, folders):
    (tmp_path / "empty").write_text(" \n\n")
    arguments = [str(folders / "t5"), str(tmp_path / "new")]
    for option in ("--tokens", "--characters"):
        with pytest.raises(InputError, match="empty: has no line of text; name another file"):
            cli.command_call("extend", *arguments, option, str(tmp_path / "empty"))()
    with pytest.raises(InputError, match="name it by --characters"):
        cli.command_call("extend", *arguments, "--sentencepiece", "50")()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "rows"),
    [("nllb", "token_embedding/*"), ("t5", "token_embedding/*"), ("mt5", "*embedding/*")],
)
def test_an_adapter_with_whole_tables_is_trained_and_is_what_peft_loads(name, rows, tmp_path):
    known = write_folder(name, tmp_path / "old")
    extend(tmp_path / "old", tmp_path / "new", text=NEW)
    for side, lines in (("source", NEW), ("target", OLD)):  # short ones: a model has 37 positions
        (tmp_path / side).write_text("\n".join(line[:9] for line in lines[:60]) + "\n")
    options = {"init": "new", "output": "run", "source": "source", "target": "target"}
    command = [f"--{key}={tmp_path / value}" for key, value in options.items()]
    command += ["--steps=3", "--warmup-steps=1", "--schedule=constant", "--learning-rate=0.01"]
    command += ["--lora-rank=2", f"--lora-whole={rows}", "--max-tokens=800", "--bucket-count=1"]
    command += [f"--freeze-rows={known}"]
    if name == "nllb":
        command += ["--source-lang=deu_Latn", "--target-lang=eng_Latn"]
    cli.main(["train", *command, "--evaluation-interval=3"])
    config, params = from_huggingface(tmp_path / "new")
    adapter = read_adapter(tmp_path / "run" / "adapter", config)
    found, before = (each["token_embedding"]["embedding"] for each in (adapter, params))
    np.testing.assert_array_equal(found[:known], before[:known])
    assert (found[known:] != before[known:]).any()
    base = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "new")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.PeftModel.from_pretrained(base, tmp_path / "run" / "adapter").eval()
    assert logits_error(lora.attach(params, adapter), config, theirs) <= bound("logits", "float32")
