"""The plain search of the torch reference beside exhaustive search."""

import itertools

import numpy as np
import pytest
import torch

import torch_reference
from tests.decoding.reversing import (
    MAX_NEW_TOKENS,
    PRESETS,
    VOCABULARY,
    constant_model,
    random_model,
    small_config,
    sources,
)
from tests.models import unchecked
from tests.tiers import tiered

PENALTIES = {"gnmt": lambda n, alpha: ((5 + n) / 6) ** alpha, "power": lambda n, alpha: n**alpha}
# What shared_heads says at a position depends on how many tokens follow: a whole target cannot
# be read at once.
CAUSAL = [name for name in PRESETS if name != "shared_heads"]
LONGEST = 4


def tiny(preset):
    """Return a random model of five ids, and two sources."""
    config = small_config(preset, vocab_size=5)
    symbol, other = (3, 2) if preset == "marian" else (3, 4)
    src = [[symbol, other, config.eos_id], [symbol, config.eos_id, config.pad_id]]
    return random_model(config), torch.tensor(src)


def read(model, src, tokens):
    """Return the log-probabilities [B, L] of whole targets, 0 at padding."""
    begin = torch.full((len(tokens), 1), model.config.bos_id)
    with torch.no_grad(), unchecked():
        logits = model(src, torch.cat([begin, tokens[:, :-1]], dim=1))
    seen = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    return torch.where(tokens != model.config.pad_id, seen, 0)


def everything(model, src, penalty):
    """Return every target of up to four tokens, best first: tokens and scores of one source."""
    config = model.config
    symbols = [i for i in range(config.tgt_vocab_size) if i not in (config.pad_id, config.eos_id)]
    targets = [
        (*prefix, last)
        for length in range(LONGEST)
        for prefix in itertools.product(symbols, repeat=length)
        for last in (config.eos_id, *(symbols if length == LONGEST - 1 else ()))
    ]
    tokens = torch.full((len(targets), LONGEST), config.pad_id)
    for row, target in enumerate(targets):
        tokens[row, : len(target)] = torch.tensor(target)
    lengths = torch.tensor([len(target) for target in targets])
    seen = read(model, src.expand(len(targets), -1), tokens)
    scores = seen.sum(dim=1) / penalty(lengths)
    order = scores.argsort(descending=True)
    return tokens[order], scores[order], lengths[order]


@pytest.mark.parametrize("preset", tiered(CAUSAL, ["marian"], ["umt5"]))
@pytest.mark.parametrize(("kind", "alpha"), [("gnmt", 0.0), ("gnmt", 0.6), ("power", 1.0)])
def test_a_wide_beam_finds_every_target_in_order(preset, kind, alpha):
    model, src = tiny(preset)
    found = torch_reference.generate(
        model,
        src,
        max_new_tokens=LONGEST,
        beam_size=200,
        length_penalty=alpha,
        length_normalization=kind,
        num_hypotheses=200,
    )
    for row in range(len(src)):
        expected = everything(model, src[row : row + 1], lambda n: PENALTIES[kind](n, alpha))
        count = len(expected[0])
        tokens, scores, lengths = (part[row] for part in found)
        assert torch.equal(tokens[:count], expected[0])
        torch.testing.assert_close(scores[:count].float(), expected[1], rtol=0, atol=1e-5)
        assert torch.equal(lengths[:count], expected[2])
        # There are no more: what is left says so.
        assert (tokens[count:] == model.config.pad_id).all()
        assert (scores[count:] == -np.inf).all()
        assert (lengths[count:] == 0).all()


def search(model, src, **options):
    options = {"max_new_tokens": MAX_NEW_TOKENS} | options
    with unchecked():
        return torch_reference.generate(model, torch.as_tensor(src), **options)


@pytest.mark.parametrize(("beam_size", "endings"), [(1, [4]), (2, [4, 5]), (4, [4, 5, 6, 7])])
def test_ties_take_the_lowest_id(beam_size, endings):
    """Four ids are equally likely, whatever the source; the better parent is the lower one too."""
    model = constant_model([1.0] * 4 + [9.0] * 4 + [1.0] * (VOCABULARY - 8))
    src = sources(model.config, 2, seed=0)
    found = search(model, src, beam_size=beam_size, num_hypotheses=beam_size)
    assert (found.tokens[..., :-1] == 4).all()
    assert found.tokens[..., -1].tolist() == [endings, endings]
