"""source.spm, target.spm and vocab.json: language codes, digests and damaged files.

That ids and texts are those of MarianTokenizer is in test_classes.py.
"""

import json
import shutil

import pytest

from jax_transformer import TransformerConfig
from jax_transformer.errors import InputError
from jax_transformer.tokenizers import describe, from_description
from jax_transformer.tokenizers.readers.sentencepiece import FILES, read_marian, read_sentencepiece
from tests.tokenizers.sentencepiece_models import write_marian


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    write_marian(folder)
    return folder


@pytest.fixture
def folder(shared, tmp_path):
    return shutil.copytree(shared, tmp_path / "model")


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


def test_tokens_are_shown_and_cut_and_padding_starts_without_a_config(shared):
    tokenizer = read_marian(shared)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id) == (tokenizer.pad_id, 0, 1)
    whole = tokenizer.encode_target(["tlx abc"])[0]
    assert "".join(tokenizer.target_texts(whole)) == " tlx abc</s>"
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
