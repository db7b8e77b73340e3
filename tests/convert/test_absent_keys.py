"""A key that config.json lacks means what the class in transformers takes it for."""

import functools

import pytest
import torch

from jax_transformer.convert.families import FAMILIES
from jax_transformer.convert.families.family import config_from_json
from jax_transformer.convert.huggingface import from_huggingface
from jax_transformer.convert.report import ConversionError
from tests.convert.families.case import (
    CASES,
    change_values,
    foreign_class,
    foreign_model,
    logits_error,
)
from tests.parity.ladder import bound
from tests.tiers import QUICK_FAMILIES, tiered_rows

# Small, and every width is a multiple of the heads. Other keys are at the default of the class.
SMALL = {
    "bart": {
        "vocab_size": 61,
        "d_model": 12,
        **dict.fromkeys(("encoder_layers", "decoder_layers"), 1),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
        **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 7),
        "max_position_embeddings": 17,
    },
    "t5": {
        "vocab_size": 61,
        "d_model": 12,
        "d_kv": 5,
        "d_ff": 7,
        **dict.fromkeys(("num_layers", "num_decoder_layers"), 1),
        "num_heads": 2,
        "pad_token_id": 4,  # what a start token is that no class has
    },
}
# Beside a key that is at its default: what must be so too, or fit it.
TOGETHER = {
    "encoder_attention_heads": ("decoder_attention_heads",),
    "decoder_attention_heads": ("encoder_attention_heads",),
    "encoder_ffn_dim": ("decoder_ffn_dim",),
    "decoder_ffn_dim": ("encoder_ffn_dim",),
    "pad_token_id": ("vocab_size",),
    "decoder_start_token_id": ("vocab_size",),
}
# Their defaults follow from other keys.
FOLLOWING = ("decoder_vocab_size", "num_decoder_layers")


@functools.cache
def class_defaults(name):
    return foreign_class(name).config_class().to_dict()


def keys_of(name):
    """Return the keys that the family reads and the class has."""
    family = FAMILIES[name]
    read = [*family.fields, *family.words, *family.fixed, *family.training_only, *family.defaults]
    return [key for key in dict.fromkeys(read) if key in class_defaults(name)]


ROWS = [(name, key) for name in CASES for key in keys_of(name)]


def values_of(name, key):
    """Return the arguments of a small model in which a key has its default or follows."""
    family, defaults = FAMILIES[name], class_defaults(name)
    small = SMALL["t5" if "num_layers" in defaults else "bart"]
    if name == "marian":  # the default of padding is the last of the vocabulary
        small = small | {"pad_token_id": 60, "decoder_start_token_id": 60}
    if key.endswith("heads"):
        small = small | {"d_model": 2 * defaults[key]}
    small = small | {each: defaults[each] for each in (key, *TOGETHER.get(key, ()))}
    if name == "marian":
        small["decoder_vocab_size"] = small["vocab_size"]
    if key in FOLLOWING or defaults[key] is None:
        small[key] = family.computed[key](defaults | small)
    return small


@pytest.mark.parametrize(("name", "key"), ROWS)
def test_an_absent_key_means_the_default_of_the_class(name, key):
    values = class_defaults(name) | values_of(name, key)
    whole = config_from_json(FAMILIES[name], values)
    del values[key]
    assert config_from_json(FAMILIES[name], values) == whole


def test_every_default_and_a_config_without_keys_are_those_of_the_class():
    for name, family in ((name, FAMILIES[name]) for name in CASES):
        meant, theirs = {**family.training_only, **family.defaults}, class_defaults(name)
        assert meant == {key: theirs.get(key) for key in meant}, name
        values = {key: value for key, value in theirs.items() if value is not None}
        assert config_from_json(family, {}) == config_from_json(family, values), name


@pytest.mark.parametrize(
    ("name", "key"),
    tiered_rows(
        ROWS,
        is_quick=lambda name, key: name in QUICK_FAMILIES and key == "scale_embedding",
        is_exhaustive=lambda name, key: name in ("marian", "umt5"),
    ),
)
def test_a_folder_that_lacks_a_key_gives_the_numbers_of_transformers(name, key, tmp_path):
    model = foreign_model(name, {}, **values_of(name, key))
    model.save_pretrained(tmp_path)
    config, params = from_huggingface(change_values(tmp_path, **{key: "absent"}))
    theirs = type(model).from_pretrained(tmp_path)
    assert logits_error(params, config, theirs) <= bound("logits", "float32")


def test_sizes_that_are_absent_and_do_not_fit_are_named(tmp_path):
    model = foreign_model("bart", "one_head_unscaled")
    model.config.save_pretrained(tmp_path)
    change_values(tmp_path, d_model="absent", dropout="absent")
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ConversionError, match=r"wrong shape .*shared") as refused:
        from_huggingface(tmp_path)
    assert refused.value.report.hint.startswith("config.json lacks d_model: the defaults of Bart")
