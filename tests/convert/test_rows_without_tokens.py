"""Tables with more rows than the tokenizer has tokens, as resize_token_embeddings leaves them."""

import json

import numpy as np
import pytest
import torch

from jax_transformer import generate
from jax_transformer.convert.huggingface import from_huggingface, load_folder, to_huggingface
from jax_transformer.convert.origin import read_origin
from jax_transformer.errors import InputError
from jax_transformer.translation import model_folder
from jax_transformer.translation.model_folder import TrainedModel
from tests.convert.families.case import (
    CASES,
    as_inputs,
    foreign_class,
    foreign_model,
    foreign_results,
    forward,
    goes_home,
    ragged_tokens,
    read_values,
)
from tests.parity.ladder import bound, error
from tests.tiers import tiered, tiered_rows
from tests.tokenizers import class_folders

SHAPES = [(name, shape) for name, case in CASES.items() for shape in list(case.shapes)[:1]]
SHAPES.append(("marian", "two_tables"))


@pytest.mark.parametrize(
    ("name", "shape"), tiered_rows(SHAPES, lambda name, shape: name in ("bart", "umt5"))
)
def test_every_row_comes_in_and_goes_home(name, shape, tmp_path):
    """A table with rows of its own at the end: padding may no longer be the last of Marian."""
    model = foreign_model(name, shape)
    before = model.config.vocab_size
    model.resize_token_embeddings(64)
    tables = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    for table in tables:
        table.data[before:].normal_(generator=torch.Generator().manual_seed(1))
    if "final_logits_bias" in model.state_dict():
        model.final_logits_bias[:, before:] += 3.0
    model.save_pretrained(tmp_path / "model")
    config, params = goes_home(tmp_path / "model", tmp_path / "home")
    assert config.src_vocab_size == 64
    assert config.tgt_vocab_size == read_values(tmp_path / "model").get("decoder_vocab_size", 64)
    src, tgt = ragged_tokens(config)
    src[0, :3] = 61, 62, 63
    tgt[0, 1:3] = config.tgt_vocab_size - 1
    theirs, _ = foreign_results(model, config, src, tgt)
    assert error(forward(params, config, src, tgt), theirs) <= bound("logits", "float32")


def test_a_bias_shorter_than_the_table_is_refused(tmp_path):
    """As in transformers, whose Marian and MVP write it where they pad to a multiple."""
    model = foreign_model("mvp")
    model.resize_token_embeddings(54, pad_to_multiple_of=8)
    model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="mismatch"):
        type(model).from_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"final_logits_bias +\[1, 54\], expected \[1, 56\]"):
        from_huggingface(tmp_path)


@pytest.fixture(params=tiered(["t5", "m2m100", "nllb"], ["t5", "m2m100"]))
def padded(request, tmp_path):
    """The folder of a model that prefers the rows without a token, and its first such row."""
    folder = tmp_path / "model"
    folder.mkdir()
    size = len(getattr(class_folders, f"write_{request.param}")(folder))
    name = "t5" if request.param == "t5" else "m2m_100"
    model = foreign_model(name, None, vocab_size=size)
    model.resize_token_embeddings(size + 3)
    config, _ = from_huggingface(model)
    logits, _ = foreign_results(model, config, *ragged_tokens(config))
    table = model.get_input_embeddings().weight.data
    table[size:] = 2 * table[logits[:, 0, :size].argmax(-1)]
    model.save_pretrained(folder)
    return folder, size


def test_no_search_generates_a_row_without_a_token(padded):
    folder, size = padded
    config, params, tokenizer, generation = load_folder(folder)
    absent = (size, size + 1, size + 2)
    assert tokenizer.tgt_vocab_size == config.tgt_vocab_size == size + 3
    assert generation["banned_tokens"] == absent
    assert load_folder(folder, ignore_generation_config=True)[3] == {"banned_tokens": absent}

    src, _ = ragged_tokens(config)
    model = foreign_class(read_values(folder)["model_type"]).from_pretrained(folder)
    source = as_inputs(config, src)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "num_beams": 3, "early_stopping": True}
    free = model.generate(**source, **options)
    assert (free >= size).any()  # transformers generates them
    theirs = model.generate(**source, **options, suppress_tokens=list(absent))
    own = {"max_new_tokens": 6, "min_new_tokens": 5, "beam_size": 3, "early_stopping": True}
    tokens = np.asarray(generate(params, config, src, **generation | own).tokens)[:, 0]
    assert not (tokens >= size).any()
    np.testing.assert_array_equal(tokens[:, :5], theirs[:, 1:6])


def test_the_ban_is_the_models_and_not_the_users(padded, tmp_path):
    """An own folder keeps it; the generation defaults that go home do not name it."""
    folder, size = padded
    values = json.loads((folder / "generation_config.json").read_text())
    content = json.dumps(values | {"bad_words_ids": [[7]]})
    (folder / "generation_config.json").write_text(content)
    model, (origin, _) = TrainedModel(*load_folder(folder)), read_origin(folder)
    assert model.generation["banned_tokens"] == (7, size, size + 1, size + 2)
    model_folder.write(tmp_path / "own", model, origin)
    again = model_folder.read(tmp_path / "own")
    assert again.generation == model.generation
    origin = model_folder.read_origin(tmp_path / "own")
    options = {"tokenizer": again.tokenizer, "origin": origin}
    to_huggingface(again.params, again.config, tmp_path / "home", **options)
    assert (tmp_path / "home" / "generation_config.json").read_text() == content
