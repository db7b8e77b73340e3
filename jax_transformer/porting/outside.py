"""What programs do and no config has, computed only so that it can be named; and fields of numbers.

A hypothesis that carries a word runs as `torch_reference` would if it did what the word says. Where
it then agrees with a record, the word's sentence tells what the program does, and the remedy. A
word that is a field of the config is found by its number.

Letters in shapes: B batch, T queries, S keys, L length, D d_model, H heads, K head_dim, V vocab.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from torch_reference import Transformer
from torch_reference.functional import merge_heads, rotary_angles, rotate
from torch_reference.layers import MultiHeadAttention, Residual

if TYPE_CHECKING:
    from jax_transformer.porting.record import Record
    from jax_transformer.porting.simulate import Point

STAGES = ("encoder", "decoder", "logits")  # in the order in which they run
FACTORS = tuple(2.0**power for power in (0, -1, 1, -2, 2, -3, 3, -4, 4, -5, 5, -6, 6, -7, 7))
BASES = tuple(10_000 * factor for factor in FACTORS[1:])
FIRST_IDS = (1.0, 2.0, 0.0, 3.0)
WINDOWS = (1.0, 2.0, 3.0, 4.0)  # longer ones than a record's texts cannot be told
CAPS = tuple(10 * factor for factor in FACTORS)
STEPS = 12  # of the search for a number
NONE = "no weights can stand for it"
PAIRS = "put the even rows of each head's queries and keys before the odd ones, weights and biases"
TABLES = "with positions='learned', tables can hold what it adds to the embeddings"
PRODUCTS = "multiply the weight and the bias of each sublayer's last product by it"
HEAD = "multiply the weight and the bias of the output projection by it"
SHIFTED = "record the program without the shift, with targets that begin with BOS"


class Word(NamedTuple):
    """What a program does.

    Attributes:
        stage: Where it shows first, of `STAGES`.
        single: Whether a single token shows it.
        numbers: Values of its number from which a search starts; () where it has none.
        sentence: "" of a field.
    """

    stage: str
    single: bool
    numbers: tuple[float, ...]
    sentence: str = ""
    remedy: str = NONE


# Of two words with which the same numbers agree, the first one is said.
WORDS = {
    "scaled sum": Word(
        "encoder", True, FACTORS, "multiplies the sum of embedding and positions by {}", TABLES
    ),
    "scaled positions": Word("encoder", True, FACTORS, "multiplies the positions by {}", TABLES),
    "positions from 1": Word("encoder", True, (), "counts positions from 1", TABLES),
    "scaled sublayers": Word(
        "encoder", True, FACTORS, "multiplies the output of each sublayer by {}", PRODUCTS
    ),
    "scaled residuals": Word(
        "encoder", True, FACTORS, "multiplies the input of each sublayer by {} in the addition"
    ),
    "softmax over heads": Word("encoder", True, (), "takes the softmax over the heads"),
    "base": Word("encoder", False, BASES, "has sinusoids with {} in place of 10,000", TABLES),
    "rotary pairs": Word("encoder", False, (), "has rotary positions, of pairs of columns", PAIRS),
    "rotary_theta": Word("encoder", False, BASES),
    "attention_softcap": Word("encoder", False, CAPS),
    "sliding_window": Word("encoder", False, WINDOWS),
    "viewed heads": Word("encoder", False, (), "splits the heads without a transpose"),
    "viewed and joined heads": Word(
        "encoder", False, (), "splits and joins the heads without a transpose"
    ),
    "softmax over queries": Word("encoder", False, (), "takes the softmax over the queries"),
    "memory by layers": Word(
        "decoder", True, (), "reads in each decoder layer the output of the same encoder layer"
    ),
    "shifted targets": Word(
        "decoder", True, FIRST_IDS, "shifts the targets itself, behind the id {}", SHIFTED
    ),
    "scaled logits": Word("logits", True, FACTORS, "multiplies the logits by {}", HEAD),
    "logit_softcap": Word("logits", True, CAPS),
}


class Outside(NamedTuple):
    """A word with its number; `learned` names, by sublayers of ours, the tensors that hold it."""

    word: str
    number: float = 1.0
    learned: tuple[tuple[str, str], ...] = ()

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the config that have it; none but for a word that is a field."""
        if WORDS[self.word].sentence:
            return {}
        whole = self.word == "sliding_window"
        return {self.word: int(self.number) if whole else float(f"{self.number:.6g}")}

    def sentence(self, d_model: int) -> str:
        """Return what the program does, and the remedy."""
        word, number = WORDS[self.word], f"{self.number:,.6g}"
        if math.isclose(self.number, d_model**0.5, rel_tol=1e-6):
            number = "sqrt(d_model)"
        if self.learned:
            number = f"a learned number, {self.learned[0][1]} in the first layer"
        does = word.sentence.format(number)
        return f"your program {does}; no field of the config has it: {word.remedy}"


def words_at(points: Sequence[Point], record: Record) -> list[str]:
    """Return the words that may explain a difference at the last of the places compared."""
    names = [point.name.partition(" of batch ") for point in points]
    number = int(names[-1][2])
    stages = [STAGES.index(place.partition(".")[0]) for place, _, n in names if int(n) == number]
    possible = STAGES[stages[-2] + 1 if len(stages) > 1 else 0 : stages[-1] + 1]
    *before, length = [batch.tgt.shape[1] for batch in record.batches[: number + 1]]
    new = {True: number == 0, False: length > 1 and max(before, default=1) == 1}
    return [name for name, word in WORDS.items() if word.stage in possible and new[word.single]]


def best_number(word: str, distance: Callable[[float], float], start: float | None = None) -> float:
    """Return the number of a word with the smallest distance: near `start`, or the best start."""
    numbers, step = WORDS[word].numbers, 0.2
    best = min(numbers, key=distance, default=1.0) if start is None else start
    if numbers in ((), FIRST_IDS, WINDOWS):
        return best
    for _ in range(STEPS):
        low, here, high = (distance(best * math.exp(side * step)) ** 2 for side in (-1, 0, 1))
        curve = low - 2 * here + high
        if not curve > 0:  # at the end, and where no number is finite
            break
        move = min(max((low - high) / (2 * curve), -2), 2) * step  # to the end of the parabola
        best, step = best * math.exp(move), min(abs(move), step)
    return best


def install(model: Transformer, outside: Outside) -> None:
    """Change the attentions or the residual additions of a model as a word says."""
    attentions = "rotary pairs", "viewed", "softmax"
    for module in model.modules():
        if isinstance(module, MultiHeadAttention) and outside.word.startswith(attentions):
            module.forward = functools.partial(_attend, module, outside.word)
        if isinstance(module, Residual) and outside.word == "scaled residuals":
            module.register_forward_pre_hook(lambda _, args: (outside.number * args[0], args[1]))


def embed(
    model: Transformer, tokens: Tensor, side: str, outside: Outside
) -> Float[Tensor, "B L D"]:
    """Return the vectors of tokens with their positions."""
    x = model.embed(tokens, side)
    total, config = model.add_positions(x, side), model.config
    word, number = outside.word, outside.number
    if word == "scaled sum":  # of embeddings that are not scaled before
        scale = config.d_model**0.5 if config.embedding_scale == "sqrt_d_model" else 1.0
        return number * (total - x + x / scale)
    if word == "scaled positions":
        return x + number * (total - x)
    if config.positions.startswith("sinusoidal"):
        _, length, width = x.shape
        if word == "positions from 1":
            return x + model.add_positions(x.new_zeros(1, length + 1, width), side)[:, 1:]
        if word == "base":
            frequency = number ** (-torch.arange(0, width, 2) / width).to(x)
            angle = torch.arange(length)[:, None] * frequency
            if config.positions == "sinusoidal_halves":
                return x + torch.cat([angle.sin(), angle.cos()], -1)
            return x + torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, :width]
    return total


def score(logits: Float[Tensor, "B T V"], outside: Outside) -> Float[Tensor, "B T V"]:
    """Return logits as a word says."""
    return outside.number * logits if outside.word == "scaled logits" else logits


def _attend(
    attention: MultiHeadAttention,
    word: str,
    query: Float[Tensor, "B T D"],
    key: Float[Tensor, "B S D"],
    value: Float[Tensor, "B S D"],
    mask: Bool[Tensor, "#B #H #T #S"],
    position_bias: Float[Tensor, "1 H T S"] | None = None,
    angles: Float[Tensor, "L C"] | None = None,
) -> Float[Tensor, "B T D"]:
    """Return what an attention of another kind computes."""
    within = query is key
    heads = [attention.queries(query, angles), attention.keys(key, angles)]
    heads.append(attention.project(attention.value, value))
    if word.startswith("viewed"):
        heads = [merge_heads(x).reshape(x.shape) for x in heads]
    query, key, value = (x.repeat_interleave(heads[0].shape[1] // x.shape[1], 1) for x in heads)
    if word == "rotary pairs" and within:
        query, key = _turned(query), _turned(key)
    scores = query @ key.mT / attention.config.attention_divisor
    scores = scores if position_bias is None else scores + position_bias
    axis = {"softmax over heads": 1, "softmax over queries": 2}.get(word, 3)
    read = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(axis) @ value
    joined = read.flatten(1).reshape(len(read), read.shape[2], -1)
    return attention.output(joined if word == "viewed and joined heads" else merge_heads(read))


def _turned(x: Float[Tensor, "B H L K"]) -> Float[Tensor, "B H L K"]:
    """Return vectors turned in pairs of columns (Su et al. 2021), the first of all pairs first."""
    if x.shape[-1] % 2:
        return x
    angles = rotary_angles(x.shape[2], x.shape[3], 10_000.0)
    return rotate(torch.cat((x[..., ::2], x[..., 1::2]), -1), angles)
