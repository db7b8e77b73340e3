"""Tokenizers, read from folders: ids and texts of their classes in transformers."""

import dataclasses
import functools
import json
import re
import shutil
from collections import Counter

import numpy as np
import pytest
import sentencepiece
import torch

from jax_transformer import TransformerConfig
from jax_transformer.convert.families import get_family
from jax_transformer.convert.languages import generating, language_files
from jax_transformer.errors import InputError
from jax_transformer.text.batches import make_batch
from jax_transformer.text.denoising import OBJECTIVES, Objective
from jax_transformer.text.encoding import encode_documents, encode_text, special_ids
from jax_transformer.text.parallel_text import Text
from jax_transformer.text.plan import plan_epoch
from jax_transformer.tokenizers import Languages, LineError, describe, from_description
from jax_transformer.tokenizers.readers.classes import read_class, tokenizer_names, written_config
from jax_transformer.tokenizers.tokenizer import TOKENIZER_IDS
from jax_transformer.training.config import TrainingConfig
from tests.tiers import tiered
from tests.tokenizers import class_folders as write
from tests.tokenizers.class_folders import MODEL, came_back, transformers
from tests.tokenizers.sentencepiece_models import odd_strings, text

STRINGS = odd_strings([*text(1), *text(2)])
STRINGS += ["__fr__ de_DE", "fra_Latn x", "<extra_id_3> <mask> y"]
LINES = text(3, 40)

# For each kind of folder: the model's family, how the folder is written, rows of the model's table
# that no token has, the start token, and languages to set.
UNSAVED = {"saved": False}
FOLDERS = {
    "bart": ("bart", write.write_bart, {}, 0, 2),
    "bart without tokenizer.json": ("bart", write.write_bart, UNSAVED, 0, 2),
    "bart whose mask takes the space": (
        *("bart", write.write_bart, UNSAVED | {"mask_takes_space": True}, 0, 2),
    ),
    "blenderbot": ("blenderbot", write.write_blenderbot, {}, 0, 1),
    "blenderbot without tokenizer.json": ("blenderbot", write.write_blenderbot, UNSAVED, 0, 1),
    "blenderbot with a template": (
        *("blenderbot", write.write_blenderbot, {"template": True}, 0, 1),
    ),
    "mbart": ("mbart", write.write_mbart, {}, 0, 0, "fr_XX", "de_DE", "zh_CN"),
    "mbart-50": ("mbart", write.write_mbart_50, {}, 0, 2, "fr_XX", "af_ZA", "sl_SI"),
    "mbart-50 without tokenizer.json": (
        *("mbart", write.write_mbart_50, UNSAVED, 0, 2, "fr_XX", "af_ZA", "sl_SI"),
    ),
    "m2m100": ("m2m_100", write.write_m2m100, {}, 8, 2, "fr", "zu", "af"),
    "nllb": ("m2m_100", write.write_nllb, {}, 2, 2, "fra_Latn", "deu_Latn", "eng_Latn"),
    "nllb with legacy behaviour": (
        *("m2m_100", write.write_nllb, {"legacy_behaviour": True}, 2, 2),
        *("fra_Latn", "zho_Hans", "eng_Latn"),
    ),
    "t5": ("t5", write.write_t5, {}, 28, 0),
    "t5 without tokenizer.json": ("t5", write.write_t5, UNSAVED, 28, 0),
    "pegasus that cleans up": ("pegasus", write.write_pegasus, {"cleans": True}, 0, 0),
    "pegasus without tokenizer.json": ("pegasus", write.write_pegasus, UNSAVED, 0, 0),
    "byte-level t5, as codet5": ("t5", write.write_codet5, {}, 3, 0),
    "bytes, as byt5": ("t5", write.write_byt5, {}, 0, 0),
    "bytes with few sentinels": ("t5", write.write_byt5, {"extra_ids": 3}, 0, 0),
    "word pieces, as bart-base-chinese": ("bart", write.write_bert, {}, 0, 3),
    "word pieces in tokenizer.json": ("bart", write.write_bert, {"saved": True}, 1, 3),
    "word pieces with capitals": ("bart", write.write_bert, {"do_lower_case": False}, 0, 3),
    "the general class without a template": ("bart", write.write_plain, {}, 0, 2),
    "the general class with BOS": ("t5", write.write_plain, {"template": "<s> $A"}, 0, 2),
    "the general class with EOS": ("bart", write.write_plain, {"template": "$A </s>"}, 0, 2),
    "umt5, by its file alone": ("umt5", write.write_t5, {}, 28, 0),
    "gemma": ("t5", write.write_gemma, {"add_bos_token": True}, 3, 2),
    "gemma with EOS": ("t5", write.write_gemma, {"add_eos_token": True}, 0, 2),
    "gemma without ends": ("t5", write.write_gemma, {}, 0, 2),
    "marian": ("marian", write.write_marian, {}, 0, 2),
    "marian with two vocabularies": ("marian", write.write_marian, {"separate": True}, 256, 2),
    "marian that cleans up": ("marian", write.write_marian, write.MARIAN_CLEANS, 0, 2),
}
QUICK = (
    *("bart without tokenizer.json", "blenderbot with a template", "mbart", "m2m100"),
    *("mbart-50 without tokenizer.json", "nllb with legacy behaviour"),
    *("t5 without tokenizer.json", "pegasus that cleans up", "byte-level t5, as codet5"),
    *("bytes with few sentinels", "word pieces, as bart-base-chinese"),
    *("the general class with BOS", "gemma"),
    *("marian with two vocabularies", "marian that cleans up"),
)
PLAIN = [name for name in FOLDERS if name != "marian that cleans up"]  # without added tokens
SURROUNDED = ["bart without tokenizer.json", "mbart", "nllb with legacy behaviour", "m2m100"]
SURROUNDED += ["mbart-50 without tokenizer.json", "nllb", "blenderbot", "bytes, as byt5", "gemma"]
SURROUNDED += ["the general class with BOS", "t5", "word pieces, as bart-base-chinese"]
WITH_LANGUAGES = [name for name, row in FOLDERS.items() if row[5:]]


class Folder:
    def __init__(self, kind, path):
        self.model_type, written, options, padding, start, *self.codes = FOLDERS[kind]
        self.path, self.family = path, get_family(self.model_type)
        self.usual = self.family.tokenizer
        self.theirs = written(path, **options)
        self.is_gemma = written is write.write_gemma
        size = len(self.theirs) + padding
        eos = self.theirs.eos_token_id
        eos = self.theirs.sep_token_id if eos is None else eos  # of word pieces
        ids = {"pad_id": self.theirs.pad_token_id, "eos_id": eos}
        self.config = TransformerConfig(
            src_vocab_size=size, tgt_vocab_size=size, bos_id=start, max_length=64, **ids
        )

        # ByT5Tokenizer ends a line once that ends with EOS, and reads U+FFFD as no text. A line of
        # Marian that begins with an unknown language code is refused here.
        self.strings = [
            string
            for string in STRINGS
            if not ("bytes" in kind and ("\ufffd" in string or string.endswith("</s>")))
            and not ("marian" in kind and write.begins_with_an_unknown_code(self.theirs, string))
        ]

    def read(self, languages=()):
        own = read_class(self.path, self.config, self.usual)
        if languages:
            self.theirs.src_lang, self.theirs.tgt_lang = languages
            own = own.with_languages(*languages, "x")
        return own, self.theirs


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """A function from a kind to its folder, which is written once."""
    return functools.cache(lambda kind: Folder(kind, tmp_path_factory.mktemp("folder")))


@pytest.fixture(params=tiered(FOLDERS, QUICK))
def folder(request, folder_of):
    return folder_of(request.param)


def labels_of(folder, theirs, lines):
    """Return labels of transformers, which may lack the EOS that a target needs.

    Those of Gemma begin with the token that the decoder starts from, which is no label.
    """
    labels = theirs(text_target=lines).input_ids
    if folder.is_gemma:
        labels = [ids[ids[0] == theirs.bos_token_id :] if ids else ids for ids in labels]
    if not folder.codes and labels[0][-1:] != [folder.config.eos_id]:
        labels = [[*ids, folder.config.eos_id] for ids in labels]
    return labels


def test_ids_and_texts_are_those_of_transformers(folder):
    """In every language alike; special tokens in the text are special ids on both sides."""
    pairs = [folder.codes[:2], folder.codes[:0:-1]] if folder.codes else [()]
    for languages in pairs:
        own, theirs = folder.read(languages)
        strings = folder.strings
        sources, targets = own.encode_source(strings), own.encode_target(strings)
        assert sources == theirs(strings).input_ids
        assert targets == labels_of(folder, theirs, strings)
        random = np.random.default_rng(0).integers(0, own.tgt_vocab_size, (200, 12)).tolist()
        ids = [*targets, *random]
        texts = [own.decode(row) for row in ids]
        assert texts == theirs.batch_decode(ids, skip_special_tokens=True)


def test_the_sentencepiece_model_of_mbart_normalises(tmp_path):
    """transformers does not; apart from that the ids are the same."""
    theirs = write.write_mbart(tmp_path, saved=False)
    theirs.tgt_lang = "de_DE"
    ids = {"bos_id": 0, "eos_id": 2, "pad_id": 1}
    config = TransformerConfig(src_vocab_size=135, tgt_vocab_size=135, **ids)
    own = read_class(tmp_path, config, "MBartTokenizer").with_languages("fr_XX", "de_DE", "x")
    theirs.src_lang = "fr_XX"
    plain = [*text(1), *text(4)]
    assert own.encode_source(plain) == theirs(plain).input_ids
    assert own.encode_target(plain) == theirs(text_target=plain).input_ids
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / MODEL))
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "de_DE"]
    odd = [line for line in STRINGS if not any(token in line for token in special)]
    eos, code = 2, theirs.convert_tokens_to_ids("fr_XX")
    ids = [[i + 1 if i else 3 for i in model.encode(line)] + [eos, code] for line in odd]
    assert own.encode_source(odd) == ids
    assert sum(a != b for a, b in zip(ids, theirs(odd).input_ids, strict=True)) > 50
    assert own.encode_source(["\uff41\uff42"]) == own.encode_source(["ab"])
    texts = [own.decode(row) for row in ids]
    assert texts == theirs.batch_decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("folder", QUICK, indirect=True)
def test_decoder_inputs_and_labels_are_those_of_transformers(folder):
    """The start id first, or the last token of the target rotated to the front."""
    languages = folder.codes[:2]
    own, theirs = folder.read(languages)
    encoded = encode_text(Text(tuple(LINES), tuple(LINES)), own, 64)
    settings = TrainingConfig(batching="packed", pack_length=64)
    plan = plan_epoch(encoded, settings, epoch=0)
    members = np.arange(len(LINES))
    planned = plan[0]._replace(rows=len(LINES), members=members, member_rows=members)
    batch = make_batch(encoded, planned)
    rows = labels_of(folder, theirs, LINES)
    assert len(encoded) == len(rows)
    labels = np.full((len(rows), 64), folder.config.pad_id)
    for row, ids in zip(labels, rows, strict=True):
        row[: len(ids)] = ids
    shifted = decoder_inputs(folder, labels)
    used = labels != folder.config.pad_id
    np.testing.assert_array_equal(batch.tgt_out, labels)
    np.testing.assert_array_equal(batch.tgt_in[used], shifted[used])
    starts = {*batch.tgt_in[:, 0].tolist()}
    assert starts == {own.bos_id}
    if folder.usual == "MBartTokenizer" and own.languages.starts:
        assert starts == {theirs.convert_tokens_to_ids(languages[1])}
        assert generating(folder.config, {}, own, "x")[0].bos_id in starts


def decoder_inputs(folder, labels):
    """Return what the decoder of the family's model in transformers reads for labels."""
    model_class = getattr(transformers, folder.family.architecture)
    config, read = folder.config, []
    sizes = {"vocab_size": config.src_vocab_size, "d_model": 4, "pad_token_id": config.pad_id}
    sizes |= dict.fromkeys(("encoder_layers", "decoder_layers", "num_layers"), 1)
    sizes |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 1)
    sizes |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "num_heads", "d_kv"), 4)
    model = model_class(model_class.config_class(**sizes, decoder_start_token_id=config.bos_id))
    model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"]), with_kwargs=True
    )
    with torch.no_grad():
        model(input_ids=torch.full((len(labels), 1), config.eos_id), labels=torch.tensor(labels))
    return read[0].numpy()


def test_it_comes_back_the_same(folder):
    own, _ = folder.read(folder.codes[:2])
    assert own.src_vocab_size == own.tgt_vocab_size == folder.config.src_vocab_size
    names = {*own.contents} - {"target_vocab.json"}  # an origin carries it
    assert names == {*tokenizer_names(folder.path, folder.usual)}
    for name, content in own.contents.items():
        assert (folder.path / name).read_bytes() == content
    back = came_back(own)
    assert back.digest() == own.digest()
    assert back.languages == own.languages
    assert all(getattr(back, name) == getattr(own, name) for name in TOKENIZER_IDS)
    assert back.encode_target(STRINGS[:90]) == own.encode_target(STRINGS[:90])
    line = "tlx 6r5 tlx"
    ids = own.encode_source([line])[0]
    assert line in "".join(own.source_texts(ids))
    most = len(own.encode_source([""])[0]) + 2
    (cut,) = own.encode_source([line], most)
    (empty,) = own.encode_source([""])
    assert len(cut) == most
    assert [i for i in cut if i in empty] == empty


@pytest.mark.parametrize("older", [False, True], ids=["today", "older"])
@pytest.mark.parametrize("kind", tiered(PLAIN, ("m2m100", "t5 without tokenizer.json")))
def test_added_tokens_are_read_whatever_file_names_them(tmp_path, kind, older):
    folder = Folder(kind, tmp_path)
    before, folder.theirs = folder.theirs, write.add_tokens(tmp_path, folder.theirs, older)
    if kind == "m2m100" and older:  # there the codes of transformers 5.24 move
        shutil.copytree(tmp_path, tmp_path / "today")
        (tmp_path / "today" / "added_tokens.json").unlink()
        folder.theirs = write.add_tokens(tmp_path / "today", before, older=False)
    size = max(folder.config.src_vocab_size, len(before) + 2)
    folder.config = dataclasses.replace(folder.config, src_vocab_size=size, tgt_vocab_size=size)
    own, theirs = folder.read(folder.codes[:2])
    lines = ["ab xq", "tlx<zz>xq 6r5", "xqxq <zz>", *folder.strings[:40]]
    ids = own.encode_source(lines)
    assert ids == theirs(lines).input_ids
    special, ordinary = theirs.convert_tokens_to_ids(["<zz>", "xq"])
    assert special in ids[1]
    assert ordinary in ids[1]
    assert own.unk_id not in (special, ordinary)
    shown = [*own.target.segmenter.encode(["tlx"])[0], special, ordinary]
    assert own.decode(shown) == theirs.decode(shown, skip_special_tokens=True)
    assert "xq" in own.decode(shown)
    assert came_back(own).encode_source(lines) == ids


def test_a_padded_table_decodes_ids_that_no_token_has(folder_of):
    own, theirs = folder_of("t5").read()
    assert (above := folder_of("t5").config.tgt_vocab_size - 1) >= len(theirs)
    assert own.decode([20, above, 21]) == theirs.decode([20, above, 21], skip_special_tokens=True)
    assert own.target_texts([above]) == [""]


@pytest.mark.parametrize("kind", ["bart", "bart without tokenizer.json"])
def test_a_table_may_lack_the_last_special_token(folder_of, kind):
    """As bart-large-cnn, which has no row for <mask>: a line with this token is refused."""
    folder = folder_of(kind)
    content, mask = folder.read()[0].contents, folder.theirs.mask_token_id

    def read(size):
        config = dataclasses.replace(folder.config, src_vocab_size=size, tgt_vocab_size=size)
        return read_class(folder.path, config, folder.usual)

    own = read(mask)
    assert own.src_vocab_size == mask == len(folder.theirs) - 1
    assert own.encode_source(["tlx"]) == folder.theirs(["tlx"]).input_ids
    with pytest.raises(LineError, match=r"^line 2 has the token '<mask>', which the model lacks$"):
        own.encode_source(["tlx", "a <mask> b"])
    assert own.contents == content
    with pytest.raises(InputError, match=f"has {mask + 1} ids, but the model {mask - 1}; use the"):
        read(mask - 1)


@pytest.mark.parametrize("kind", tiered(WITH_LANGUAGES, QUICK))
def test_languages_are_settings_that_count(folder_of, kind):
    folder = folder_of(kind)
    first, second, third = folder.codes
    own, _ = folder.read((first, second))
    assert (own.languages.source, own.languages.target) == (first, second)
    assert own.with_languages(None, None, "x") is own
    other = own.with_languages(None, third, "x")
    assert (other.languages.source, other.languages.target) == (first, third)
    assert own.languages.target == second  # as it was
    swapped = own.with_languages(second, first, "x")
    assert len({own.digest(), other.digest(), swapped.digest()}) == 3
    sources = [each.encode_source(["tlx"]) for each in (own, other, swapped)]
    assert sources[0] == sources[1] != sources[2]
    assert own.encode_target(["tlx"]) != other.encode_target(["tlx"])
    with pytest.raises(InputError, match=r"^folder: source_lang='xx_XX' is none of the model's "):
        own.with_languages("xx_XX", None, "folder")
    with pytest.raises(InputError, match=rf"^folder: target_lang='.*\?' is none .*{first}"):
        own.with_languages(None, f"{first[:-1]}?", "folder")  # the message has the nearest code


@pytest.mark.parametrize("kind", tiered(WITH_LANGUAGES, QUICK))
def test_a_target_language_that_nobody_names_is_asked_for(folder_of, kind):
    folder = folder_of(kind)
    own = read_class(folder.path, folder.config, folder.usual)
    assert own.languages.target is None
    theirs = transformers.AutoTokenizer.from_pretrained(folder.path)
    assert own.encode_source(["tlx"]) == theirs(["tlx"]).input_ids
    with pytest.raises(InputError, match="name its code by --target-lang"):
        own.encode_target(["tlx"])
    with pytest.raises(InputError, match="name its code by --target-lang"):
        generating(folder.config, {}, own, "folder")


def test_a_family_without_languages_takes_none(folder_of):
    own, _ = folder_of("bart without tokenizer.json").read()
    message = "folder: target_lang='de_DE': the model has no language codes; leave --target-lang"
    with pytest.raises(InputError, match=f"^{message} out$"):
        own.with_languages(None, "de_DE", "folder")


@pytest.mark.parametrize("kind", tiered(WITH_LANGUAGES, QUICK))
def test_files_say_the_languages_and_keep_their_bytes_otherwise(folder_of, kind):
    folder = folder_of(kind)
    first, second, third = folder.codes
    own, _ = folder.read((first, second))
    ids = own.languages.ids
    key = "decoder_start_token_id" if own.languages.starts else "forced_bos_token_id"
    said = json.dumps({"mine": 1, "src_lang": first, "tgt_lang": second}, indent=7).encode()
    generation = json.dumps({key: ids[second], "mine": 2}, indent=7).encode()
    contents = {"tokenizer_config.json": said, "generation_config.json": generation}
    contents["config.json"] = b"{}"
    assert language_files(contents, own) == contents
    changed = language_files(contents, own.with_languages(third, first, "x"))
    languages = {"src_lang": third, "tgt_lang": first}
    assert json.loads(changed["tokenizer_config.json"]) == {"mine": 1, **languages}
    assert json.loads(changed["generation_config.json"]) == {key: ids[first], "mine": 2}
    del contents["generation_config.json"]
    assert json.loads(language_files(contents, own)["config.json"]) == {key: ids[second]}


def test_the_class_tells_mbart_from_mbart_50(folder_of, tmp_path):
    """The name in tokenizer_config.json, else that in config.json, else the codes."""
    for kind, starts in (("mbart", True), ("mbart-50", False)):
        folder = folder_of(kind)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (tmp_path / name).write_bytes((folder.path / name).read_bytes())
        values = json.loads((tmp_path / "tokenizer_config.json").read_text())
        for config in ({"tokenizer_class": values["tokenizer_class"] + "Fast"}, {}):
            del values["tokenizer_class"]
            (tmp_path / "config.json").write_text(json.dumps(config))
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
            own = read_class(tmp_path, folder.config, folder.usual)
            assert own.languages.starts is starts
            values["tokenizer_class"] = None


# What damages a folder.


def remove(name):
    return lambda folder: (folder / name).unlink()


def put(name, content):
    return lambda folder: (folder / name).write_text(content)


def replace(name, before, after):
    def damage(folder):
        content = (folder / name).read_bytes()
        assert before in content
        (folder / name).write_bytes(content.replace(before, after, 1))

    return damage


def change(name, edit):
    def damage(folder):
        path = folder / name
        values = json.loads(path.read_text()) if path.exists() else {}
        edit(values)
        path.write_text(json.dumps(values))

    return damage


def configure(**values):
    return change("tokenizer_config.json", lambda config: config.update(values))


def damaged(key, value):
    """Return a damage of the settings, and the message that names it."""
    fault = re.escape(f"tokenizer_config.json: {key!r} is {value!r}: Expected ")
    return configure(**{key: value}), f"{fault}.*; the file is damaged, copy it again"


def without_codes(values):
    values["added_tokens"] = [t for t in values["added_tokens"] if "_" not in t["content"]]


def in_turn(*damages):
    return lambda folder: [damage(folder) for damage in damages]


def vocabularies_that_disagree(folder):
    shutil.copy(folder / "vocab.json", folder / "target_vocab.json")
    change("target_vocab.json", lambda ids: ids.update({"</s>": 1, "<unk>": 0}))(folder)


RWKV = json.dumps({"tokenizer_class": "RwkvTokenizerFast"})
LSTRIP = {"5": {"content": "x", "lstrip": True}}
HAS_LSTRIP = r"tokenizer_config\.json: the token 'x' has lstrip"
NO_FILE = "cannot be read; a tokenizer file must be there"
NO_MODEL = r"is not a sentencepiece model"
SEVERAL = configure(separate_vocabs=True)
REFUSED = {
    "t5 without tokenizer.json": [
        (
            put("tokenizer_config.json", RWKV),
            r"has no tokenizer\.json, and .* cannot read the other files of RwkvTokenizer; write",
        ),
    ],
    "mbart-50 without tokenizer.json": [
        (replace(MODEL, "é".encode(), b"\xff\xa9"), rf"{MODEL}: {NO_MODEL}, or is damaged"),
        (replace(MODEL, "アパート".encode(), 12 * b"\xff"), rf"{MODEL}: is damaged"),
    ],
    "nllb": [
        (
            remove("tokenizer.json"),
            r"no tokenizer\.json, which lists the ids of the language codes; fetch this file too",
        ),
        (
            in_turn(change("tokenizer.json", without_codes), configure(extra_special_tokens=[])),
            r"tokenizer\.json: has no language code among its added tokens",
        ),
    ],
    "mbart-50": [
        (
            configure(src_lang="x"),
            r"tokenizer_config\.json: source_lang='x' is none of the model's 52 language codes",
        ),
    ],
    "m2m100": [
        (configure(language_codes="x"), "language_codes='x' must be one of m2m100, wmt21"),
        (configure(added_tokens_decoder=LSTRIP), HAS_LSTRIP),
    ],
    "bart without tokenizer.json": [
        (put("merges.txt", "#version: 0.2\na\n"), r"merges\.txt:2: 'a' is not a pair"),
        (put("merges.txt", "漢 字\n"), r"merges\.txt: does not belong to vocab\.json"),
    ],
    "bytes with few sentinels": [
        damaged("extra_ids", "3"),
        damaged("extra_ids", -1),
        damaged("added_tokens_decoder", {"x": {"content": "y"}}),
    ],
    "marian": [
        (remove("target.spm"), f"target.spm {NO_FILE}"),
        (put("target.spm", "hello"), f"target.spm: {NO_MODEL}"),
        (put("vocab.json", "{"), "vocab.json is no readable JSON"),
        (change("vocab.json", lambda ids: ids.update(a="1")), "the id of 'a' is '1'"),
        (change("vocab.json", lambda ids: ids.pop("<pad>")), "lacks the special token '<pad>'"),
        (SEVERAL, f"target_vocab.json {NO_FILE}"),
        (
            in_turn(SEVERAL, vocabularies_that_disagree),
            "'</s>' must have one id, but has 0 in vocab.json and 1 in target_vocab.json",
        ),
        (configure(sp_model_kwargs={"alpha": 0.1}), "sp_model_kwargs=.* is not supported"),
        (configure(added_tokens_decoder=LSTRIP), HAS_LSTRIP),
        damaged("added_tokens_decoder", [1]),
        damaged("added_tokens_decoder", {"7": {"content": 3}}),
        damaged("extra_special_tokens", 1),
        (
            put("special_tokens_map.json", '{"additional_special_tokens": 2}'),
            r"special_tokens_map\.json: 'additional_special_tokens' is 2: Expected",
        ),
        (put("added_tokens.json", '{"x": -1}'), r"added_tokens\.json: 'x' is -1: Expected"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "damage", "message"),
    [(kind, *row) for kind in REFUSED for row in REFUSED[kind]],
    ids=lambda value: str(value)[:20] if isinstance(value, str) else "",
)
def test_damaged_folders_are_refused_in_one_line(tmp_path, kind, damage, message):
    folder = Folder(kind, tmp_path)
    damage(tmp_path)
    with pytest.raises(InputError, match=message) as refused:
        read_class(tmp_path, folder.config, folder.usual)
    assert str(refused.value).startswith(str(tmp_path))
    assert "\n" not in str(refused.value)


def test_a_code_that_is_not_a_text_is_refused_in_one_line():
    for code in (10_000_000, ["fr_XX"], {"fr_XX": 1}):
        with pytest.raises(InputError, match=r"target_lang=.* is none of the model's 1 language"):
            Languages({"fr_XX": 3}, "before").changed(None, code)


LANGUAGES = {"ids": {"fr": 9}, "placement": "before", "source": "fr", "target": None}
NO_LANGUAGES, NO_SPLITTING = "damaged languages", "(is|an added token is) damaged"


@pytest.mark.parametrize(
    ("kind", "damage", "message"),
    [
        ("m2m100", {"languages": LANGUAGES | {"target": "x"}}, NO_LANGUAGES),
        ("m2m100", {"languages": LANGUAGES | {"placement": "x"}}, NO_LANGUAGES),
        ("m2m100", {"languages": LANGUAGES | {"ids": {"fr": "1"}}}, NO_LANGUAGES),
        ("m2m100", {"languages": LANGUAGES | {"ids": {"fr": -1}}}, "languages=.* must be ids"),
        ("m2m100", {"moses": True}, "the setting 'moses', which this version does not know"),
        ("byte-level t5, as codet5", {"options": {}}, NO_SPLITTING),
        ("byte-level t5, as codet5", {"rule": []}, NO_SPLITTING),
        ("byte-level t5, as codet5", {"tokens": [{"special": 1}]}, NO_SPLITTING),
        ("bytes with few sentinels", {"rule": "byte_level", "options": {}}, "is damaged"),
    ],
)
def test_damaged_settings_are_refused(folder_of, kind, damage, message):
    own, _ = folder_of(kind).read()
    with pytest.raises(InputError, match=rf"^x.*: .*{message}"):
        from_description(describe(own) | damage, own.contents, "x")


@pytest.mark.parametrize("kind", tiered(FOLDERS, ("bytes with few sentinels", "m2m100")))
def test_transformers_reads_the_files_that_are_written_without_a_folder(folder_of, tmp_path, kind):
    folder = folder_of(kind)
    own, theirs = folder.read(folder.codes[:2])
    for name, content in own.contents.items():
        (tmp_path / name).write_bytes(content)
    values = written_config(own, folder.config, folder.usual)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": folder.model_type}))
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert again(folder.strings).input_ids == theirs(folder.strings).input_ids
    ids = own.encode_target(folder.strings[:200])
    expected = theirs.batch_decode(ids, skip_special_tokens=True)
    assert again.batch_decode(ids, skip_special_tokens=True) == expected


@pytest.mark.parametrize("kind", tiered(SURROUNDED, SURROUNDED[:4]))
def test_examples_of_an_objective_have_the_ids_around_them_that_pairs_have(kind, folder_of):
    folder = folder_of(kind)
    own, _ = folder.read(folder.codes[:2])
    chosen = OBJECTIVES["prefix_lm"]
    objective = Objective(chosen, ((),), special_ids(own, "prefix_lm", chosen), 64, 0)
    (before, after), (first, last) = own.affixes("source"), own.affixes("target")
    for key, (line, ids) in enumerate(zip(LINES, own.encode_text(LINES), strict=True)):
        source, target = (side.tolist() for side in objective.example(np.array(ids), (key,)))
        begin = len(source) - len(before) - len(after)
        assert source == [*before, *ids[:begin], *after]
        assert target == [own.bos_id, *first, *ids[begin:], *last]
        assert own.encode_source([line]) == [[*before, *ids, *after]]
        assert own.encode_target([line]) == [[*first, *ids, *last]]
        length = len(ids)
        assert objective.fit(length, (99, 99), (key,)) == (length, len(source), len(target) - 1)


def test_the_sentinels_of_byt5_are_its_last_bytes(folder_of):
    """Xue et al. 2022, section 3.1: the last 100 bytes, from 258 down; a text may have them."""
    own, _ = folder_of("bytes, as byt5").read()
    special = special_ids(own, "span_corruption", OBJECTIVES["span_corruption"])
    assert special.sentinels == tuple(range(258, 158, -1))
    kept, spelled = (
        encode_documents([(line, "1")], own, "lines", Counter(), []).counts
        for line in ("Straße in Köln, älter", "a <extra_id_0> b")
    )
    assert kept.pairs == 1
    assert spelled.bad_lines == ("1",)
