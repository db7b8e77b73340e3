"""Generation defaults as options of `generate`: every key of transformers is in one group."""

import json
import os
from dataclasses import fields

import pytest
import torch

from jax_transformer import TransformerConfig
from jax_transformer.convert.generation_config import (
    NEUTRAL,
    USUAL,
    generation_options,
    read_generation_config,
)
from jax_transformer.decoding.generation_config import GenerationConfig
from jax_transformer.errors import InputError
from tests.convert.families.case import foreign_model, transformers

HONOURED = frozenset(
    """
    bad_words_ids begin_suppress_tokens bos_token_id decoder_start_token_id early_stopping
    encoder_no_repeat_ngram_size eos_token_id forced_bos_token_id forced_eos_token_id length_penalty
    max_length max_new_tokens min_length min_new_tokens no_repeat_ngram_size num_beams
    num_return_sequences renormalize_logits repetition_penalty suppress_tokens
    """.split()
)
# What these keys control changes no output: caches, compilation, the form of the result, the
# sampling that `do_sample` would switch on, and the model that an assistant would be.
# `remove_invalid_values` acts on logits that are not finite, which `generate` refuses.
# `pad_token_id` fills the positions after EOS.
WITHOUT_EFFECT = frozenset(
    """
    assistant_confidence_threshold assistant_ensemble_weight assistant_lookbehind cache_config
    compile_config continuous_batching_config disable_compile epsilon_cutoff eta_cutoff is_assistant
    low_memory max_cache_len max_matching_ngram_size min_p num_assistant_tokens
    num_assistant_tokens_schedule output_attentions output_hidden_states output_logits output_scores
    pad_token_id prefill_chunk_size remove_invalid_values return_dict_in_generate speculation_type
    target_lookbehind temperature top_h top_k top_p transformers_version typical_p use_cache
    """.split()
)

SIZES = {"src_vocab_size": 53, "tgt_vocab_size": 53, "pad_id": 52, "bos_id": 52}
CONFIG = TransformerConfig.preset("marian", **SIZES)
BASE = {"length_penalty": 1.0, "length_normalization": "power", "early_stopping": False}
BASE |= {"max_new_tokens": 20, "allow_padding": True}


def options(**values):
    return generation_options(values, CONFIG)


def test_every_key_of_transformers_is_in_one_group():
    known = {key for key in vars(transformers.GenerationConfig()) if not key.startswith("_")}
    assert HONOURED | WITHOUT_EFFECT | NEUTRAL.keys() == known
    assert len(HONOURED) + len(WITHOUT_EFFECT) + len(NEUTRAL) == len(known)
    assert REFUSED.keys() - {"forced_eos_token_id"} == NEUTRAL.keys()
    from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS

    caches = {*ALL_CACHE_IMPLEMENTATIONS, "paged"} - {"quantized"}  # it rounds
    assert caches <= {*NEUTRAL["cache_implementation"]}


def test_the_defaults_of_transformers_are_no_options():
    defaults = transformers.GenerationConfig._get_default_generation_params()
    assert generation_options(defaults, CONFIG) == BASE | {"max_new_tokens": 19}
    assert options(**transformers.GenerationConfig().to_dict()) == BASE
    assert options() == BASE
    ours = {option.name: option.default for option in fields(GenerationConfig)}
    left_out = ours.keys() - BASE.keys() | USUAL.keys()
    assert all(ours[name] == USUAL.get(name) or ours[name] in (None, ()) for name in left_out)
    assert USUAL.items() <= ours.items()


# What a file has: the options that differ from those of an empty file.
HONOURED_VALUES = {
    "opus-mt": (
        {
            "bad_words_ids": [[52]],
            "bos_token_id": 0,
            "decoder_start_token_id": 52,
            "eos_token_id": 0,
            "forced_eos_token_id": 0,
            "max_length": 512,
            "num_beams": 4,
            "pad_token_id": 52,
            "renormalize_logits": True,
        },
        {"beam_size": 4, "forced_last_token": 0, "max_new_tokens": 511, "renormalize": True}
        | {"allow_padding": False},
    ),
    "max_new_tokens wins": ({"max_length": 9, "max_new_tokens": 7}, {"max_new_tokens": 7}),
    "no longer than the table": ({"max_new_tokens": 9999}, {"max_new_tokens": 512}),
    "start": ({"decoder_start_token_id": 7, "bos_token_id": 8}, {"start_token": 7}),
    "start is BOS": ({"bos_token_id": 8}, {"start_token": 8}),
    "several ends": ({"eos_token_id": [0, 5, 0]}, {"eos_ids": (0, 5)}),
    "another end": ({"eos_token_id": 5}, {"eos_ids": (5,)}),
    "one end in a list": ({"eos_token_id": [0]}, {}),
    "forced": (
        {"forced_bos_token_id": 9, "forced_eos_token_id": [0]},
        {"forced_first_token": 9, "forced_last_token": 0},
    ),
    "minimum": ({"min_length": 5}, {"min_new_tokens": 4}),
    "minimum of new tokens": ({"min_length": 9, "min_new_tokens": 3}, {"min_new_tokens": 3}),
    "minimum of 1": ({"min_length": 1}, {}),
    "minimum below a forced end": (
        {"min_length": 10, "max_length": 10, "forced_eos_token_id": 0},
        {"max_new_tokens": 9, "min_new_tokens": 8, "forced_last_token": 0},
    ),
    "stops early": ({"early_stopping": True}, {"early_stopping": True}),
    "stops late": ({"early_stopping": "never"}, {"early_stopping": "never"}),
    "penalties": (
        {"length_penalty": 0, "repetition_penalty": 1.5, "no_repeat_ngram_size": 3},
        {"length_penalty": 0.0, "repetition_penalty": 1.5, "no_repeat_ngram_size": 3},
    ),
    "n-grams of the source": (
        {"encoder_no_repeat_ngram_size": 3},
        {"encoder_no_repeat_ngram_size": 3},
    ),
    "bans": (
        # EOS by itself is not banned by bad_words_ids, but by suppress_tokens.
        {"bad_words_ids": [[0], [9], [3, 4, 5], [52, 0]], "suppress_tokens": [7, 9]},
        {"banned_tokens": (7, 9), "banned_sequences": ((3, 4, 5), (52, 0))},
    ),
    "bans of EOS and padding": (
        {"suppress_tokens": [52, 0]},
        {"banned_tokens": (0,), "allow_padding": False},
    ),
    "at the beginning": ({"begin_suppress_tokens": [0, 4]}, {"begin_suppressed_tokens": (0, 4)}),
    "several results": (
        {"num_beams": 3, "num_return_sequences": 2},
        {"beam_size": 3, "num_hypotheses": 2},
    ),
    "no effect": ({"temperature": 0.3, "top_k": 5, "use_cache": False, "x": [], "_y": 1}, {}),
    "neutral": ({"do_sample": False, "num_beam_groups": 1, "guidance_scale": 1.0}, {}),
}


@pytest.mark.parametrize(("values", "expected"), HONOURED_VALUES.values(), ids=HONOURED_VALUES)
def test_what_is_honoured(values, expected):
    found = options(**values)
    wanted = BASE | expected
    if wanted["early_stopping"] == "never":
        del wanted["early_stopping"]
    if not wanted["allow_padding"]:
        del wanted["allow_padding"]
    assert found == wanted
    hash(tuple(found.items()))  # static arguments of jax.jit


REFUSED = {
    "assistant_early_exit": 2,
    "cache_implementation": "quantized",
    "constraints": [1],
    "diversity_penalty": 0.5,
    "do_sample": True,
    "dola_layers": "low",
    "encoder_repetition_penalty": 1.2,
    "exponential_decay_length_penalty": [5, 1.1],
    "force_words_ids": [[4]],
    "guidance_scale": 1.5,
    "max_time": 2.0,
    "num_beam_groups": 2,
    "penalty_alpha": 0.6,
    "prompt_lookup_num_tokens": 3,
    "sequence_bias": [[[4], 1.0]],
    "stop_strings": ["x"],
    "token_healing": True,
    "use_mtp": True,
    "watermarking_config": {"bias": 2.5},
    "forced_eos_token_id": [0, 1],
}
DAMAGED = {
    "num_beams": (0, "4", 2.5, True),
    "num_return_sequences": (2,),
    "early_stopping": ("yes", 1),
    "renormalize_logits": ("yes",),
    "length_penalty": ("1", float("nan"), True),
    "repetition_penalty": (0, -1.0),
    "max_length": (1, "9"),
    "max_new_tokens": (0,),
    "min_length": (-1, 30),
    "min_new_tokens": (20,),
    "no_repeat_ngram_size": (-1,),
    "decoder_start_token_id": ([52, 52], 53, -1),
    "forced_bos_token_id": (53, [4]),
    "eos_token_id": ([0, 53], "0"),
    "bad_words_ids": ([4], [[]], [[53]], 7),
    "suppress_tokens": ([True],),
    "begin_suppress_tokens": (["a" * 200],),
}


@pytest.mark.parametrize(
    ("key", "value"),
    [*REFUSED.items(), *((key, value) for key, values in DAMAGED.items() for value in values)],
)
def test_what_cannot_be_honoured_is_refused_by_name_with_the_remedy(key, value):
    with pytest.raises(InputError) as refused:
        options(**{key: value})
    message = str(refused.value)
    assert message.startswith(f"generation_config.json: {key}={value!r}"[:80])
    if key in REFUSED:
        assert "cannot be honoured" in message
    assert message.endswith("; --ignore-generation-config ignores the file's generation defaults")
    assert "\n" not in message
    assert len(message) < 300


def test_a_generation_config_replaces_all_keys_of_the_config(tmp_path):
    keys = {"model_type": "marian", "num_beams": 4, "max_length": 9, "forced_eos_token_id": None}
    keys |= {"force_bos_token_to_be_generated": True, "bos_token_id": 6}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    values, name = read_generation_config(tmp_path)
    assert name == "config.json"
    expected = BASE | {"beam_size": 4, "max_new_tokens": 8, "start_token": 6}
    assert generation_options(values, CONFIG) == expected | {"forced_first_token": 6}
    assert "forced_eos_token_id" not in values  # null says nothing
    path = tmp_path / "generation_config.json"
    path.write_text('{"num_beams": 2}')
    values, name = read_generation_config(tmp_path)
    assert name == "generation_config.json"
    assert generation_options(values, CONFIG) == BASE | {"beam_size": 2}
    for damage in (lambda: path.write_text("[]"), lambda: path.write_text("{"), path.unlink):
        damage()
        if not path.exists():
            os.mkfifo(path)
        with pytest.raises(InputError, match=r"generation_config\.json (is no|must)"):
            read_generation_config(tmp_path)


@pytest.mark.parametrize(
    ("values", "new_tokens"),
    [({}, 20), ({"max_length": 20}, 19), ({"max_new_tokens": 7, "max_length": 20}, 7)],
)
def test_lengths_are_those_of_transformers(values, new_tokens):
    """Without a length, transformers generates 20 tokens after the start token."""
    model = foreign_model("marian")
    with torch.no_grad():
        model.final_logits_bias[0, 0] = -100  # no EOS
    ids = {"decoder_start_token_id": 52, "eos_token_id": 0, "pad_token_id": 52}
    model.generation_config = transformers.GenerationConfig(**values, **ids)
    generated = model.generate(torch.tensor([[3, 4, 5, 0]]))
    assert generated.shape[1] - 1 == new_tokens == options(**values)["max_new_tokens"]


def test_relative_positions_do_not_limit_targets():
    config = TransformerConfig.preset("t5", max_length=9)
    assert generation_options({"max_length": 100}, config)["max_new_tokens"] == 99
    assert generation_options({}, config)["max_new_tokens"] == 20
