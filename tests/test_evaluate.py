"""Lines in, lines out, in order; and the measures."""

import re

import jax
import numpy as np
import pytest

from jax_transformer import InputError, evaluate
from jax_transformer.decoding import Hypotheses
from tests.models import tiny_checkpoint

LINES = ["abba", "", "a", "cab cab cab cab", " \t ", "b", "bacab"]


@pytest.fixture(scope="module")
def checkpoint():
    """A model of random parameters: its translations differ from line to line."""
    untrained = tiny_checkpoint(["abc cab"], vocab_size=8, seed=2, max_length=20)
    return untrained._replace(params=jax.tree.map(lambda leaf: 3 * leaf, untrained.params))


def test_order_is_restored_and_blank_lines_stay(checkpoint, monkeypatch):
    sources = []
    original = evaluate.generate

    def echo(params, config, src, *, max_new_tokens):
        """Say the source itself, so that the right answer is known."""
        sources.append(src)
        hypotheses = original(params, config, src, max_new_tokens=max_new_tokens)
        tokens = np.zeros(hypotheses.tokens.shape, np.int32)
        tokens[:, 0, : src.shape[1]] = src
        lengths = (src != config.pad_id).sum(1, keepdims=True).astype(np.int32)
        return hypotheses._replace(tokens=tokens, lengths=lengths)

    monkeypatch.setattr(evaluate, "generate", echo)
    translations = evaluate.translate(checkpoint, LINES, token_budget=24, bucket_count=2)
    assert translations == [line.strip() for line in LINES]
    lengths = [src.shape[1] for src in sources]
    assert lengths == sorted(lengths)
    assert len(set(lengths)) == 2


def test_a_translation_does_not_depend_on_the_other_lines(checkpoint):
    together = evaluate.translate(checkpoint, LINES, bucket_count=1)
    assert len({*together}) > 2
    for line, translation in zip(LINES[:4], together[:4], strict=True):
        assert evaluate.translate(checkpoint, [line]) == [translation]
    assert max(map(len, together)) > 0


def test_a_translation_ends_before_its_end_token_and_a_blank_line_has_none(checkpoint, monkeypatch):
    tokenizer = checkpoint.tokenizer
    ids = [*tokenizer.encode("cab"), tokenizer.eos_id, *tokenizer.encode("abba")]

    def cut(params, config, src, *, max_new_tokens):
        tokens = np.zeros((len(src), 1, max_new_tokens), np.int32)
        tokens[:, 0, : len(ids)] = ids
        lengths = np.full((len(src), 1), ids.index(tokenizer.eos_id) + 1)
        return Hypotheses(tokens, np.zeros((len(src), 1), np.float32), lengths)

    monkeypatch.setattr(evaluate, "generate", cut)
    assert evaluate.translate(checkpoint, ["a", " ", "b"]) == ["cab", "", "cab"]


def test_no_lines_are_no_translations(checkpoint):
    assert evaluate.translate(checkpoint, []) == []


def test_an_overlong_line_is_named(checkpoint):
    longest = "abca cab abcab ab bacabac"
    size = len(checkpoint.tokenizer.encode(longest)) + 1
    with pytest.raises(InputError, match=rf"line 3 is {size} tokens .*max_length=20"):
        evaluate.translate(checkpoint, ["a", "", longest, "b"])


def test_exact_match_is_a_share():
    assert evaluate.exact_match(["a", "b", "c "], ["a", "B", "c"]) == pytest.approx(1 / 3)


def test_bleu_is_cased_and_signed():
    references = ["A man walks his dog .", "Two girls are singing ."]
    line = evaluate.bleu(references, references)
    assert line.startswith("BLEU = 100.00")
    assert re.search(r"nrefs:1\|case:mixed\|eff:no\|tok:13a\|smooth:exp\|version:\d", line)
    assert not evaluate.bleu([one.lower() for one in references], references).startswith(
        "BLEU = 100.00"
    )
