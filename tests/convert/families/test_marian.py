"""Marian alone: its real sizes, its peculiarities, its old files; `test_families` has the rest."""

import os
import sys

import jax
import pytest

from jax_transformer import TransformerConfig, apply
from jax_transformer.commands import main as cli
from jax_transformer.convert.families import marian
from jax_transformer.convert.families.family import config_from_json
from jax_transformer.convert.huggingface import from_huggingface, load_folder, to_huggingface
from jax_transformer.errors import InputError
from jax_transformer.tokenizers import train_byte_pair
from tests.convert.families.bart_lineage import both_sides, ids
from tests.convert.families.case import (
    foreign_model,
    foreign_results,
    ragged_tokens,
    transformers,
)
from tests.parity.ladder import bound, error

OPUS_MT = both_sides(
    heads=8,
    d_ff=2048,
    vocab_size=58_101,
    d_model=512,
    encoder_layers=6,
    decoder_layers=6,
    max_position_embeddings=512,
    activation_function="swish",
    **ids(pad=58_100, eos=0),
)
forward = jax.jit(apply, static_argnames="config")


@pytest.mark.exhaustive
def test_the_numbers_of_opus_mt():
    """In the real widths and depths."""
    model = foreign_model("marian", None, **OPUS_MT)
    config, params = from_huggingface(model)
    src, tgt = ragged_tokens(config, 7, 5)
    logits, _ = foreign_results(model, config, src, tgt)
    with jax.default_matmul_precision("highest"):
        measured = error(forward(params, config, src, tgt), logits)
    print(f"\nopus-mt: logits {measured:.1e} of the largest, {logits.abs().max():.1f}")
    assert measured <= bound("logits", "float32")


def test_config_of_an_older_transformers_is_read():
    """The keys that config.json of opus-mt models had in 2020, before some of today's."""
    values = transformers.MarianConfig(**OPUS_MT).to_dict()
    for key in ("decoder_vocab_size", "share_encoder_decoder_embeddings", "tie_word_embeddings"):
        del values[key]
    values |= {
        "add_bias_logits": False,
        "add_final_layer_norm": False,
        "normalize_before": False,
        "normalize_embedding": False,
        "static_position_embeddings": True,
        "num_beams": 6,
        "max_length": 512,
        "bad_words_ids": [[58_100]],
    }
    assert config_from_json(marian.FAMILY, values) == TransformerConfig.preset("marian")


def test_generation_never_returns_to_padding():
    config, _ = from_huggingface(foreign_model("marian"))
    assert marian.FAMILY.generation(config) == {
        "bad_words_ids": [[52]],
        "decoder_start_token_id": 52,
        "eos_token_id": 0,
        "forced_eos_token_id": 0,
        "max_length": 37,
        "pad_token_id": 52,
    }


def test_a_folder_without_a_tokenizer_is_refused_in_one_line(tmp_path, monkeypatch):
    config, params = from_huggingface(foreign_model("marian"))
    folder = tmp_path / "model"
    to_huggingface(params, config, folder)
    message = f"{folder / 'source.spm'} cannot be read; a tokenizer file must be there"
    with pytest.raises(InputError, match=message):
        load_folder(folder)
    monkeypatch.setattr(
        sys, "argv", ["jax-transformer", "translate", str(folder), "--input", __file__]
    )
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code.startswith(f"error: {message} (FileNotFoundError")
    byte_pair = train_byte_pair(["ab"], vocab_size=8)
    with pytest.raises(InputError, match="a MarianMTModel cannot have a tokenizer of the kind 'by"):
        to_huggingface(params, config, tmp_path / "other", tokenizer=byte_pair)
    assert os.listdir(tmp_path) == ["model"]
