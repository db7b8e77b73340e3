"""An existing tokenizer for a new model: from files and folders of every known kind."""

import json

import pytest
import tokenizers

from jax_transformer.errors import InputError
from jax_transformer.runs.model_settings import read_tokenizer
from jax_transformer.tokenizers import separate, write_files
from jax_transformer.translation.model_folder import save
from tests.models import tiny_model
from tests.tokenizers.sentencepiece_models import write_marian

LINES = ["abc cab", ""]


@pytest.fixture(scope="module")
def trained():
    return tiny_model(["abc cab üß"], vocab_size=12)


@pytest.fixture
def foreign(tmp_path):
    """A tokenizer.json of another program."""
    vocab = {"<pad>": 0, "</s>": 1, "<unk>": 2, "abc": 3, "cab": 4}
    model = tokenizers.models.WordLevel(vocab, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_a_file_or_a_folder_of_a_byte_pair_tokenizer(trained, tmp_path):
    write_files(tmp_path, trained.tokenizer)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        tokenizer = read_tokenizer(path)
        assert tokenizer.kind == "byte_pair"
        assert tokenizer.digest() == trained.tokenizer.digest()


def test_a_file_of_another_program(foreign):
    (foreign.parent / "other.json").write_bytes(foreign.read_bytes())
    for path in (foreign, foreign.parent, foreign.parent / "other.json"):
        tokenizer = read_tokenizer(path)
        assert tokenizer.kind == "tokenizer_json"
        assert tokenizer.encode_source(LINES) == [[3, 4, 1], [1]]
        assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 0, 1)


def test_the_folder_of_an_own_model_of_one_tokenizer_or_two(trained, tmp_path):
    both = separate(trained.tokenizer, trained.tokenizer)
    for name, tokenizer in (("one", trained.tokenizer), ("two", both)):
        save(tmp_path / name, trained._replace(tokenizer=tokenizer))
        (tmp_path / name / "model.safetensors").unlink()  # not needed
        found = read_tokenizer(tmp_path / name)
        assert type(found) is type(tokenizer)
        assert found.digest() == tokenizer.digest()
    (tmp_path / "two" / "source_tokenizer.json").write_bytes(b"{}")
    with pytest.raises(InputError, match=r"source_tokenizer\.json: is damaged or of another model"):
        read_tokenizer(tmp_path / "two")


def test_sentencepiece_files_alone_and_in_a_hugging_face_folder(tmp_path):
    size = write_marian(tmp_path)
    tokenizer = read_tokenizer(tmp_path)
    assert tokenizer.kind == "sentencepiece"
    assert tokenizer.bos_id == tokenizer.pad_id == size - 1
    config = {"model_type": "marian", "vocab_size": size, "d_model": 8, "scale_embedding": True}
    config |= {"pad_token_id": size - 1, "decoder_start_token_id": 1, "eos_token_id": 0}
    config |= {"activation_function": "swish", "max_position_embeddings": 9}
    config |= dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
    for side in ("encoder", "decoder"):
        config |= {f"{side}_layers": 1, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_tokenizer(tmp_path).bos_id == 1  # as the model has it
    (tmp_path / "config.json").write_text('{"model_type": "of another library"}')
    assert read_tokenizer(tmp_path).digest() == tokenizer.digest()


REFUSED = {
    "nothing": (lambda folder: folder, "holds no tokenizer: neither tokenizer.json nor source.spm"),
    "missing": (lambda folder: folder / "x.json", "No such file or directory"),
    "no JSON": (lambda folder: folder / "weights.bin", "not UTF-8, so not a tokenizer file"),
    "no tokenizer": (lambda folder: folder / "a.json", "damaged tokenizer file"),
    "damaged model": (lambda folder: folder / "own", r"config\.json: is damaged"),
}


@pytest.mark.parametrize(("path", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_tokenizer_is_refused_in_one_line(tmp_path, path, message):
    (tmp_path / "weights.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "a.json").write_text('{"a": 1}')
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text("{")
    with pytest.raises(InputError, match=message) as refused:
        read_tokenizer(path(tmp_path))
    assert str(refused.value).startswith(str(path(tmp_path)))
    assert "\n" not in str(refused.value)
