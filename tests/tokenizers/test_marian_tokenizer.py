"""source.spm, target.spm and vocab.json: ids and text of MarianTokenizer, and damaged files."""

import json
import os
import shutil

import numpy as np
import pytest

from jax_transformer import TransformerConfig
from jax_transformer.errors import InputError
from jax_transformer.tokenizers import describe, from_description
from jax_transformer.tokenizers.readers.sentencepiece import FILES, read_marian, read_sentencepiece
from tests.tokenizers.sentencepiece_models import odd_strings, text, write_marian

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

KINDS = {
    "shared": {},
    "separate": {"separate": True},
    "cleaned": {
        "clean_up_tokenization_spaces": True,
        "additional_special_tokens": ["<mask_1>"],
        "added_tokens_decoder": {
            "7": {"content": "e", "special": False},
            "8": {"content": ".", "special": True},  # not listed above: decoding keeps it
        },
    },
}
STRINGS = odd_strings([*text(1), *text(2)])


@pytest.fixture(scope="module", params=KINDS)
def both(request, tmp_path_factory):
    """A folder, the tokenizer that this library reads from it, and that of transformers."""
    folder = tmp_path_factory.mktemp(request.param)
    write_marian(folder, **KINDS[request.param])
    theirs = transformers.MarianTokenizer.from_pretrained(folder)
    return folder, read_marian(folder), theirs


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    write_marian(folder)
    return folder


@pytest.fixture
def folder(shared, tmp_path):
    return shutil.copytree(shared, tmp_path / "model")


def begins_with_an_unknown_code(theirs, line):
    code, _ = theirs.remove_language_code(line)
    return bool(code) and "</s>" not in code[0] and code[0] not in theirs.get_vocab()


def test_ids_and_texts_are_those_of_transformers(both):
    """The one difference: a line that begins with an unknown language code is refused."""
    _, own, theirs = both
    refused = [line for line in STRINGS if begins_with_an_unknown_code(theirs, line)]
    accepted = [line for line in STRINGS if line not in refused]
    for line in refused:
        with pytest.raises(InputError, match=r"^line 1 begins with the language code ['\"]>>"):
            own.encode_source([line])
    sources = own.encode_source(accepted)
    assert sources == [theirs(line).input_ids for line in accepted]
    targets = own.encode_target(STRINGS)
    assert targets == [theirs(text_target=line).input_ids for line in STRINGS]
    # Ids in any order, the special ids among them.
    random = np.random.default_rng(0)
    targets += random.integers(0, own.tgt_vocab_size, (100, 12)).tolist()
    texts = [own.decode(ids) for ids in targets]
    assert texts == [theirs.decode(ids, skip_special_tokens=True) for ids in targets]
    assert len(accepted) >= 1000


def test_the_language_code_is_one_token_at_the_beginning_alone(shared):
    tokenizer = read_marian(shared)
    code, *words = tokenizer.encode_source([">>fra<<abc"])[0]
    assert words == tokenizer.encode_source(["abc"])[0]
    assert tokenizer.source_texts([code]) == [">>fra<<"]
    for later in ("abc>>fra<<", " >>fra<<abc"):
        assert code not in tokenizer.encode_source([later])[0]
    assert tokenizer.encode_source([">>fra<<abc"], 3) == [[code, words[0], tokenizer.eos_id]]


@pytest.mark.parametrize(
    ("codes", "known"),
    [
        ((), "no language codes"),
        ((">>deu<<",), ">>deu<<"),
        ([f">>a{i}<<" for i in range(10)], ">>a6<<, >>a7<< and 2 more"),
    ],
)
def test_an_unknown_language_code_is_refused_with_its_line(tmp_path, codes, known):
    write_marian(tmp_path, codes=codes)
    tokenizer = read_marian(tmp_path)
    with pytest.raises(InputError) as refused:
        tokenizer.encode_source(["abc", "", ">>fra<< abc\n", ">>x<<"])
    message = str(refused.value)
    assert message.startswith("line 3 begins with the language code '>>fra<<', but the model knows")
    assert message.endswith(known)
    unknown = [tokenizer.unk_id, *tokenizer.encode_target(["abc"])[0]]
    assert tokenizer.encode_target([">>fra<<abc"]) == [unknown]  # as in transformers


def test_it_comes_back_the_same(both):
    folder, tokenizer, _ = both
    assert all((folder / name).read_bytes() == c for name, c in tokenizer.contents.items())
    description = json.loads(json.dumps(describe(tokenizer)))
    back = from_description(description, tokenizer.contents, "x")
    assert back.digest() == tokenizer.digest()
    assert back.encode_target(STRINGS[:100]) == tokenizer.encode_target(STRINGS[:100])
    assert (back.pad_id, back.bos_id, back.eos_id, back.unk_id) == (tokenizer.pad_id,) * 2 + (0, 1)
    texts = tokenizer.target_texts(tokenizer.encode_target(["tlx abc"])[0])
    assert "".join(texts) == " tlx abc</s>"
    whole = tokenizer.encode_target(["tlx abc"])[0]
    assert tokenizer.encode_target(["tlx abc"], 2) == [[whole[0], 0]]


def test_whatever_decides_ids_changes_the_digest(folder):
    digest = read_marian(folder).digest()
    vocabulary = json.loads((folder / "vocab.json").read_text())
    (folder / "vocab.json").write_text(json.dumps(vocabulary, indent=1))
    assert read_marian(folder).digest() == digest  # the same vocabulary
    size = read_marian(folder).src_vocab_size
    config = TransformerConfig(src_vocab_size=size, tgt_vocab_size=size, bos_id=3)
    digests = {digest, read_marian(folder, config).digest()}
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    digests.add(read_marian(folder).digest())
    shutil.copy(folder / "target.spm", folder / "source.spm")
    digests.add(read_marian(folder).digest())
    assert len(digests) == 4


def change(name, edit):
    def damage(folder):
        path = folder / name
        values = json.loads(path.read_text()) if path.exists() else {}
        edit(values)
        path.write_text(json.dumps(values))

    return damage


def write(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def configure(**values):
    return change("tokenizer_config.json", lambda v: v.update(values))


LSTRIP = {"5": {"content": "x", "lstrip": True}}
DAMAGE = {
    "missing": (
        lambda folder: (folder / "target.spm").unlink(),
        "target.spm cannot be read; a tokenizer file must be there",
    ),
    "text as model": (write("target.spm", b"hello"), "target.spm: is not a sentencepiece model"),
    "no JSON": (write("vocab.json", b"{"), "vocab.json is no readable JSON"),
    "text as id": (change("vocab.json", lambda v: v.update(a="1")), "the id of 'a' is '1'"),
    "no padding": (change("vocab.json", lambda v: v.pop("<pad>")), "lacks the special token '<p"),
    "second vocabulary": (
        configure(separate_vocabs=True),
        "target_vocab.json cannot be read; a tokenizer file must be there",
    ),
    "other ids": (
        lambda folder: (
            configure(separate_vocabs=True)(folder),
            shutil.copy(folder / "vocab.json", folder / "target_vocab.json"),
            change("target_vocab.json", lambda v: v.update({"</s>": 1, "<unk>": 0}))(folder),
        ),
        "'</s>' must have one id, but has 0 in vocab.json and 1 in target_vocab.json",
    ),
    "sampling": (configure(sp_model_kwargs={"alpha": 0.1}), "sp_model_kwargs=.* is not supported"),
    "stripping": (configure(added_tokens_decoder=LSTRIP), "the token 'x' has lstrip"),
    "settings": (configure(added_tokens_decoder=[1]), "tokenizer_config.json is damaged"),
    "a token that is no text": (
        configure(added_tokens_decoder={"7": {"content": 3}}),
        "tokenizer_config.json is damaged",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_files_are_refused_in_one_line(folder, damage, message):
    damage(folder)
    with pytest.raises(InputError, match=message) as refused:
        read_marian(folder)
    assert str(refused.value).startswith(str(folder))


def test_a_truncated_model_is_refused_at_every_length(shared):
    contents = {name: (shared / name).read_bytes() for name in FILES["marian"]}
    whole = contents["source.spm"]
    ends = [0]  # of the pieces: a file that ends between two of them is well-formed
    while whole[ends[-1]] == 0x0A:
        ends.append(ends[-1] + 2 + whole[ends[-1] + 1])
    assert len(ends) > 100
    for length in (*ends, *range(1, len(whole), 9973), len(whole) - 1):
        damaged = {"source.spm": whole[:length]}
        with pytest.raises(InputError, match=r"source\.spm: is not a (whole )?sentencepiece model"):
            read_sentencepiece(contents | damaged, {"rule": "marian"}, "x")


def test_a_setting_of_another_version_is_refused(shared):
    tokenizer = read_marian(shared)
    description = describe(tokenizer) | {"moses": True}
    with pytest.raises(InputError, match="the setting 'moses', which this version does not know"):
        from_description(description, tokenizer.contents, "x")
