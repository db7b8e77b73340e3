"""Decoding without a cache, one sentence at a time: the plain search behind the fast one.

Letters in shapes: B batch, S source length, L target length, K hypotheses, V target vocabulary.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float64, Int, Int64
from torch import Tensor

from jax_transformer.config import TransformerConfig
from torch_reference import masks
from torch_reference.model import Transformer


class Hypotheses(NamedTuple):
    """The K best targets of each source of a batch, best first.

    Attributes:
        tokens: Ids without BOS [B, K, L]: padding follows EOS; a row without EOS has no padding.
        scores: Sums of the log-probabilities of the tokens, EOS included, divided by the length
            penalty [B, K]; -inf where a source has fewer than K targets.
        lengths: Number of tokens of each row, EOS included [B, K].
    """

    tokens: Int64[Tensor, "B K L"]
    scores: Float64[Tensor, "B K"]
    lengths: Int64[Tensor, "B K"]


class Hypothesis(NamedTuple):
    """One target, finished or not, and the sum of its log-probabilities."""

    tokens: list[int]
    log_probability: float


# From targets of one length to the log-probabilities of their next tokens.
NextTokens = Callable[[list[Hypothesis]], Float64[Tensor, "open V"]]


@torch.no_grad()
def generate(
    model: Transformer,
    src: Int[Tensor, "B S"],
    *,
    max_new_tokens: int,
    beam_size: int = 1,
    length_penalty: float = 0.0,
    length_normalization: Literal["gnmt", "power"] = "gnmt",
    num_hypotheses: int = 1,
    src_mask: Bool[Tensor, "#B #H 1 #S"] | None = None,
) -> Hypotheses:
    """Translate a batch: greedily, or by beam search to the last step.

    Args:
        model: The model, in `eval()` mode, with token ids going in and logits coming out.
        max_new_tokens: Largest number of tokens of a target, EOS included: L of the result.
        beam_size: Number of open hypotheses; 1 takes the most likely token at each step.
        length_penalty: Exponent of the divisor; 0 compares plain sums.
        length_normalization: The penalty of n tokens: "gnmt" is ((5 + n) / 6)**length_penalty
            (Wu et al. 2016, section 7), "power" is n**length_penalty.
        num_hypotheses: K of the result, at most `beam_size`.
        src_mask: True = attend, broadcastable to [B, heads, 1, S]; None hides `config.pad_id`.
    """
    config, source_length = model.config, src.shape[1]
    if src_mask is None:
        src_mask = masks.source_mask(src, config)
    src_mask = src_mask.expand(len(src), -1, 1, source_length)
    target_length = max_new_tokens
    if config.decoder_attention == "self_over_memory":  # its sources and targets are equally long
        target_length = max(source_length, max_new_tokens)
        added = target_length - source_length
        src = torch.nn.functional.pad(src, (0, added), value=config.pad_id)
        src_mask = torch.nn.functional.pad(src_mask, (0, added))

    def score(hypothesis: Hypothesis) -> float:
        length = len(hypothesis.tokens)
        base = length if length_normalization == "power" else (5 + length) / 6
        return hypothesis.log_probability / base**length_penalty

    tokens = torch.full((len(src), num_hypotheses, max_new_tokens), config.pad_id)
    scores = torch.full((len(src), num_hypotheses), -math.inf, dtype=torch.float64)
    lengths = torch.zeros((len(src), num_hypotheses), dtype=torch.int64)
    for row, (source, mask) in enumerate(zip(src.split(1), src_mask.split(1), strict=True)):
        next_tokens = _next_tokens(model, source, mask, target_length)
        if beam_size == 1:
            found = [_greedy(next_tokens, config, max_new_tokens)]
        else:
            found = _beam_search(next_tokens, config, max_new_tokens, beam_size)
        found = sorted(found, key=score, reverse=True)[:num_hypotheses]  # a stable sort
        for rank, hypothesis in enumerate(found):
            length = len(hypothesis.tokens)
            tokens[row, rank, :length] = torch.tensor(hypothesis.tokens)
            scores[row, rank] = score(hypothesis)
            lengths[row, rank] = length
    return Hypotheses(tokens, scores, lengths)


def _next_tokens(
    model: Transformer,
    src: Int[Tensor, "1 S"],
    src_mask: Bool[Tensor, "1 #H 1 S"],
    target_length: int,
) -> NextTokens:
    """Return the function that runs the model on all tokens of the hypotheses so far."""
    config = model.config
    memory = model.encode(src, src_mask)

    def next_tokens(hypotheses: list[Hypothesis]) -> Float64[Tensor, "open V"]:
        step = len(hypotheses[0].tokens)
        tgt = torch.full((len(hypotheses), target_length), config.pad_id, device=src.device)
        tgt[:, 0] = config.bos_id
        tgt[:, 1 : step + 1] = torch.tensor([hypothesis.tokens for hypothesis in hypotheses])
        copies = memory.expand(len(hypotheses), -1, -1)
        logits = model.decode(tgt, copies, src_mask=src_mask)[:, step]
        log_probabilities = logits.double().log_softmax(dim=-1).cpu()
        log_probabilities[:, config.pad_id] = -math.inf  # padding is never generated
        return log_probabilities

    return next_tokens


def _greedy(next_tokens: NextTokens, config: TransformerConfig, max_new_tokens: int) -> Hypothesis:
    """Extend by the most likely token, the lowest id of a tie, until EOS."""
    tokens, total = [], 0.0
    while len(tokens) < max_new_tokens and config.eos_id not in tokens:
        log_probabilities = next_tokens([Hypothesis(tokens, total)])[0]
        tokens = [*tokens, int(log_probabilities.argmax())]
        total += float(log_probabilities.max())
    return Hypothesis(tokens, total)


def _beam_search(
    next_tokens: NextTokens, config: TransformerConfig, max_new_tokens: int, beam_size: int
) -> list[Hypothesis]:
    """Return every finished hypothesis, in the order in which they finished.

    Each step ranks all continuations of the open hypotheses; the better hypothesis and then the
    lower id wins a tie. Of the 2K best, a continuation that ends and is among the first K is
    finished; the K best of the others stay open. At the last position all end. The search never
    stops early.
    """

    def ends(hypothesis: Hypothesis) -> bool:
        tokens = hypothesis.tokens
        return tokens[-1] == config.eos_id or len(tokens) == max_new_tokens

    unfinished, finished = [Hypothesis([], 0.0)], []
    while unfinished:
        sums = [[hypothesis.log_probability] for hypothesis in unfinished]
        totals = torch.tensor(sums, dtype=torch.float64) + next_tokens(unfinished)  # [open, V]
        ranking = totals.flatten().argsort(descending=True, stable=True)[: 2 * beam_size]
        best = [
            Hypothesis([*unfinished[parent].tokens, token], float(totals[parent, token]))
            for parent, token in (divmod(index, totals.shape[1]) for index in ranking.tolist())
            if totals[parent, token] > -math.inf
        ]
        finished += [hypothesis for hypothesis in best[:beam_size] if ends(hypothesis)]
        unfinished = [hypothesis for hypothesis in best if not ends(hypothesis)][:beam_size]
    return finished
