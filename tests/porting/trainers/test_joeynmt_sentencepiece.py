"""JoeyNMT's text where sentencepiece alone splits it: text in, text out."""

import pytest
import sentencepiece
import yaml

from jax_transformer import porting
from jax_transformer.errors import InputError
from jax_transformer.porting.trainers import TRAINERS, read_trainer
from jax_transformer.tokenizers import describe, from_description
from tests.porting.trainers.programs import JoeyNMT
from tests.tokenizers import sentencepiece_models

SPECIAL = ("<unk>", "<pad>", "<s>", "</s>")
LINES = sentencepiece_models.text(1)[:20]


@pytest.fixture(scope="module")
def models():
    return [sentencepiece_models.train(sentencepiece_models.text(seed), 90) for seed in (1, 2)]


@pytest.fixture
def save(tmp_path, models):
    """Write a checkpoint whose two sides have a sentencepiece model each; return its path."""

    def save(dropped="", **changed):
        module = JoeyNMT()
        sides = []
        for model in models:
            found = sentencepiece_models.pieces(model)[3:]
            sides.append((*SPECIAL, *(piece for piece in found if piece != dropped)))
        module.words = tuple(sides)
        for name, words in zip(("src", "trg"), sides, strict=True):
            table = getattr(module, f"{name}_embed").lut
            table.weight.data = table.weight.data[:1].expand(len(words), -1).clone()
        weight = module.decoder.output_layer.weight
        weight.data = weight.data[:1].expand(len(sides[1]), -1).clone()
        data = {}
        for side, model in zip(("src", "trg"), models, strict=True):
            (tmp_path / f"{side}.model").write_bytes(model)
            files = {"model_file": f"/somewhere/{side}.model"}
            data[side] = {"level": "bpe", "tokenizer_cfg": files}
        data["src"] |= changed
        return module.save(tmp_path, data=data)

    return save


def test_text_goes_in_and_comes_out(save, models):
    tokenizer = porting.from_trainer(save())[2]
    encoders = (tokenizer.encode_source, tokenizer.encode_target)
    for model, encode in zip(models, encoders, strict=True):
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        tokens = [*SPECIAL, *sentencepiece_models.pieces(model)[3:]]
        for line in LINES:
            ids = [
                tokens.index(piece)
                for piece in processor.encode(line, out_type=str)
                if piece in tokens
            ]
            assert [i for i in encode([line])[0] if i] == [*ids, 3]
    line = sentencepiece_models.text(2)[0]
    assert tokenizer.decode([2, *tokenizer.encode_target([line])[0], 1]) == line
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id) == (1, 2, 3, 0)
    again = from_description(describe(tokenizer), tokenizer.contents, "folder")
    assert again.encode_source(LINES) == tokenizer.encode_source(LINES)


@pytest.mark.parametrize(
    "changed",
    [
        {"lowercase": True},
        {"normalize": True},
        {"level": "word"},
        {"level": "char"},
        {"tokenizer_type": "subword-nmt"},
        {"tokenizer_cfg": {"model_file": "src.model", "pretokenizer": "moses"}},
        {"tokenizer_cfg": {"model_file": "absent.model"}},
        {"tokenizer_cfg": {}},
        {"tokenizer_cfg": None},
    ],
    ids=str,
)
def test_where_more_makes_the_tokens_lines_are_tokens(save, changed):
    program, model = read_trainer(save(**changed))
    tokenizer = program.tokenizer(model, program.config(model))
    assert tokenizer.kind == "separate"  # two of words between spaces
    assert tokenizer.encode_source([model.source_tokens[7]]) == [[7, 3]]


def test_a_model_that_may_not_use_all_its_pieces_is_not_read(save, models):
    """JoeyNMT forbids the pieces that its vocabulary lacks: the model splits differently."""
    dropped = next(piece for piece in sentencepiece_models.pieces(models[0])[3:] if len(piece) > 2)
    program, model = read_trainer(save(dropped))
    assert program.tokenizer(model, program.config(model)).kind == "separate"


def test_a_damaged_model_is_named(save, tmp_path):
    path = save()
    (tmp_path / "src.model").write_bytes(b"damaged")
    with pytest.raises(InputError, match=r"src\.model: is no"):
        porting.from_trainer(path)


def test_the_name_of_a_model_is_no_path(save, tmp_path):
    path = save()
    whole = yaml.safe_load((tmp_path / "config.yaml").read_text())
    whole["data"]["src"]["tokenizer_cfg"]["model_file"] = "/etc/passwd"
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(whole))
    model = read_trainer(path)[1]
    program = TRAINERS["joeynmt"]
    assert program.tokenizer(model, program.config(model)).kind == "separate"
