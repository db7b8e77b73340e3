"""source.spm, target.spm and vocab.json: language codes, digests and truncated files.

That ids and texts are those of MarianTokenizer, and damaged files refused, is in test_classes.py.
"""

import json
import shutil

import pytest

from jax_transformer import TransformerConfig
from jax_transformer.errors import InputError
from jax_transformer.tokenizers.formats import SENTENCEPIECE_FILES, read_sentencepiece
from jax_transformer.tokenizers.readers.classes import read_marian
from tests.tokenizers.sentencepiece_models import write_marian


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    write_marian(folder)
    return folder


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


def test_whatever_decides_ids_changes_the_digest(shared, tmp_path):
    folder = shutil.copytree(shared, tmp_path / "model")
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


def test_a_truncated_model_is_refused_at_every_length(shared):
    contents = {name: (shared / name).read_bytes() for name in SENTENCEPIECE_FILES["marian"]}
    whole = contents["source.spm"]
    ends = [0]  # of the pieces: a file that ends between two of them is well-formed
    while whole[ends[-1]] == 0x0A:
        ends.append(ends[-1] + 2 + whole[ends[-1] + 1])
    assert len(ends) > 100
    for length in (*ends, *range(1, len(whole), 9973), len(whole) - 1):
        damaged = {"source.spm": whole[:length]}
        with pytest.raises(InputError, match=r"source\.spm: is not a sentencepiece model"):
            read_sentencepiece(contents | damaged, {"rule": "marian"}, "x")
