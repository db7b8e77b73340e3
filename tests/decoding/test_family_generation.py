"""Every family generates as in transformers, with the kind of defaults that its folders have.

The models are random, but their targets vary: the output has a table and a bias of its own, and
the bias of EOS is high. Both sides compute in float64, so that no near-tie decides.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from jax_transformer import TransformerConfig
from jax_transformer.convert.families import FAMILIES
from jax_transformer.convert.generation_config import generation_options
from jax_transformer.convert.huggingface import from_huggingface
from tests.convert.families.case import CASES, as_inputs, foreign_model, transformers
from tests.decoding.float64_torch import Float64Torch
from tests.decoding.plain import quick_generate
from tests.parity.ladder import ROUNDED, score_error
from tests.tiers import tiered

BATCH, SOURCE_LENGTH, LONGEST, BEAMS = 32, 7, 9, 4
PENALTIES = (0.0, 0.6, 1.0, 2.0)  # 4 times 128 hypotheses
COMMON = {"num_beams": BEAMS, "num_return_sequences": BEAMS, "max_length": LONGEST}
SPREAD = 2.0  # of a token's logit, over sources and places
CODE = 7  # of a language
SUMMARY = {"forced_bos_token_id": 0, "no_repeat_ngram_size": 3, "early_stopping": True}
# In M2M100 a generated padding has another position than here: 9 is padding.
TRANSLATION = {"forced_bos_token_id": CODE, "bad_words_ids": [[9]]}
# Beside what `Family.generation` returns.
DEFAULTS = {
    "marian": {"renormalize_logits": True},
    "pegasus": {"min_length": 4},
    "bart": SUMMARY | {"min_length": 5},
    "mbart": {"decoder_start_token_id": CODE, "early_stopping": True},
    "mbart, 50 languages": {"forced_bos_token_id": CODE, "early_stopping": True},
    "plbart": {"decoder_start_token_id": None, "bos_token_id": 0},
    "mvp": SUMMARY | {"repetition_penalty": 1.3},
    # In transformers, the padding of a short source is one of its n-grams: 41 is padding.
    "blenderbot": {
        "min_length": 5,
        "no_repeat_ngram_size": 2,
        "encoder_no_repeat_ngram_size": 2,
        "bad_words_ids": [[41], [5, 6]],
    },
    "m2m_100": TRANSLATION | {"early_stopping": True},
    "m2m_100, NLLB": TRANSLATION | {"begin_suppress_tokens": [3], "no_repeat_ngram_size": 2},
    # The parameters that T5's own folders give for summaries and for translation.
    "t5": {"no_repeat_ngram_size": 3, "min_length": 2, "early_stopping": True},
    "t5, translation": {"early_stopping": True},
    "mt5": {"no_repeat_ngram_size": 2, "renormalize_logits": True},
    "umt5": {"no_repeat_ngram_size": 2},
}


class Speaker(NamedTuple):
    """A model whose targets vary, in both frameworks, and what it translates."""

    theirs: torch.nn.Module
    config: TransformerConfig
    params: dict[str, Any]
    src: np.ndarray


@functools.cache
def speaker(name):
    """Return the last small model of a family with an output of its own."""
    model = foreign_model(name, [*CASES[name].shapes][-1], torch.float64)
    config, params = from_huggingface(model)
    random, generator = np.random.default_rng(0), torch.Generator().manual_seed(1)
    vocabulary = min(config.src_vocab_size, config.tgt_vocab_size)
    words = np.setdiff1d(np.arange(vocabulary), [config.pad_id, config.eos_id])
    src = np.full((BATCH, SOURCE_LENGTH), config.pad_id, np.int32)
    for row, length in enumerate(random.integers(1, SOURCE_LENGTH, BATCH)):
        src[row, :length] = random.choice(words, length)
        src[row, length] = config.eos_id
    head = torch.nn.Linear(config.d_model, config.tgt_vocab_size, dtype=torch.float64)
    head.weight.data.normal_(generator=generator)
    model.lm_head = head
    # Without the mean, which the biases inside the model make large, one token always wins.
    targets = torch.tensor(random.choice(words, (BATCH, LONGEST)))
    with torch.no_grad():
        logits = model(**as_inputs(config, src), decoder_input_ids=targets).logits
        spread = logits.std(dim=(0, 1)).mean() / SPREAD
        head.weight /= spread
        head.bias -= (logits / spread).mean(dim=(0, 1))
        head.bias[config.eos_id] += 2.0
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.zero_()
    params["output_projection"] = {
        "kernel": head.weight.data.T.numpy(),
        "bias": head.bias.data.numpy(),
    }
    changed = {"output_projection": "linear", "output_bias": True}
    return Speaker(model, dataclasses.replace(config, **changed), params, src)


@pytest.fixture(autouse=True)
def float64_search(x64, monkeypatch):
    monkeypatch.setattr(transformers.generation.utils, "torch", Float64Torch())


def defaults_of(name):
    """Return a family's speaker, and the content of its generation_config.json."""
    family = name.partition(",")[0]
    found = speaker(family)
    return found, FAMILIES[family].generation(found.config) | COMMON | DEFAULTS[name]


def found_by_transformers(speaker, values):
    """Return tokens (padding after the end), lengths and scores [batch, beams]."""
    speaker.theirs.generation_config = transformers.GenerationConfig(**values)
    result = speaker.theirs.generate(
        **as_inputs(speaker.config, speaker.src),
        return_dict_in_generate=True,
        output_scores=True,
    )
    tokens, scores = result.sequences[:, 1:].numpy(), result.sequences_scores.numpy()
    ends = tokens == values["eos_token_id"]
    lengths = np.where(ends.any(axis=1), ends.argmax(axis=1) + 1, tokens.shape[1])
    # Where a source has too few targets, transformers fills up with copies that score -1e9.
    lengths = np.where(scores < -1e6, 0, lengths)
    scores = np.where(scores < -1e6, -np.inf, scores)
    places = np.arange(LONGEST - 1)
    tokens = np.pad(tokens, [(0, 0), (0, LONGEST - 1 - tokens.shape[1])])
    tokens = np.where(places < lengths[:, None], tokens, speaker.config.pad_id)
    return tokens.reshape(BATCH, BEAMS, -1), *(a.reshape(BATCH, BEAMS) for a in (lengths, scores))


def compare(speaker, values, theirs):
    """Return how many hypotheses differ where `generate` has these defaults, and by how much."""
    tokens, lengths, scores = theirs
    options = generation_options(values, speaker.config)
    found = quick_generate(speaker.params, speaker.config, speaker.src, **options)
    same = np.all(found.tokens == tokens, axis=-1) & (found.lengths == lengths)
    apart = score_error(found.scores, scores)
    return (~same).sum(), apart


@pytest.mark.parametrize("name", tiered(DEFAULTS, ["bart"]))
def test_hypotheses_and_scores_are_those_of_transformers(name):
    speaker, values = defaults_of(name)
    count, different, worst, seen = 0, 0, 0.0, []
    for penalty in PENALTIES:
        settings = values | {"length_penalty": penalty}
        theirs = found_by_transformers(speaker, settings)
        wrong, apart = compare(speaker, settings, theirs)
        count, different, worst = count + theirs[1].size, different + wrong, max(worst, apart)
        seen += theirs[1].flat
    print(f"\n{name}: {count} hypotheses, {different} differ, worst score {worst:.0e}")
    assert count >= 500
    assert different == 0
    assert worst <= ROUNDED
    assert len(set(seen)) > 3


def test_every_family_is_compared():
    assert {name.partition(",")[0] for name in DEFAULTS} == set(CASES)
