"""Search written for reading: one sentence at a time, whole forward passes, lists and numpy."""

import dataclasses

import jax
import numpy as np

from jax_transformer import TransformerConfig, apply, generate
from tests.models import random_params, random_tokens, small_config

STATIC = (
    "config",
    "max_new_tokens",
    "beam_size",
    "num_hypotheses",
    "length_normalization",
    "banned_tokens",
    "min_new_tokens",
    "forced_first_token",
    "no_repeat_ngram_size",
    "top_k",
)
WITH_IDS = [name for name in TransformerConfig.presets() if name != "torch_nn"]


quick_generate = jax.jit(generate, static_argnames=STATIC)  # and raises nothing late
run = jax.jit(apply, static_argnames="config")


def random_model(preset, seed=0, vocab_size=8, dtype=np.float32, **overrides):
    """Return a model of so few ids that some rows end by chance, and ragged sources."""
    small = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    small |= dict.fromkeys(("src_vocab_size", "tgt_vocab_size"), vocab_size)
    if preset == "marian":
        small |= {"pad_id": vocab_size - 1, "bos_id": vocab_size - 1}
    config = small_config(preset, **(small | overrides))
    src = random_tokens(config, seed, dtype)[0]
    if preset == "marian":
        src[(src == config.pad_id) & (np.arange(src.shape[1]) == 0)] = 3
    return config, random_params(config, seed, dtype), src


def biased(logits):
    """Return a model that, whatever it has read, gives each id of the target this logit."""
    config, params, src = random_model(
        "vaswani2017", vocab_size=len(logits), output_projection="linear", output_bias=True
    )
    kernel = np.zeros((config.d_model, config.tgt_vocab_size), np.float32)
    params["output_projection"] = {"kernel": kernel, "bias": np.asarray(logits, np.float32)}
    return config, params, src


@dataclasses.dataclass
class Plain:
    """The searches of one source; its fields are options of `generate`."""

    params: dict
    config: TransformerConfig
    src: np.ndarray
    max_new_tokens: int
    min_new_tokens: int = 0
    prefix: tuple = ()
    banned_tokens: tuple = ()
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    length_penalty: float = 0.0
    length_normalization: str = "gnmt"

    def __post_init__(self):
        config, src = self.config, self.src
        self.length = self.max_new_tokens
        if config.decoder_attention == "self_over_memory":
            self.length = max(self.length, len(src))
            added = self.length - len(src)
            self.src = np.pad(src, (0, added), constant_values=config.pad_id)

    def logits(self, targets):
        """Return the logits [n, V] that follow targets of one length, without a cache."""
        step = len(targets[0])
        tgt = np.full((len(targets), self.length), self.config.pad_id, np.int32)
        tgt[:, 0] = self.config.bos_id
        tgt[:, 1 : step + 1] = np.array(targets).reshape(len(targets), step)
        rows = 2 ** int(np.ceil(np.log2(len(targets))))  # few shapes, few compilations
        tgt = np.resize(tgt, (rows, self.length))
        src = np.broadcast_to(self.src, (rows, len(self.src)))
        found = run(self.params, self.config, src, tgt)[: len(targets), step]
        return np.asarray(found, np.float64)

    def rule(self, scores, target):
        """Return the scores [V] of the tokens after a target, as the rules change them."""
        config, sequence = self.config, [self.config.bos_id, *target]
        if len(target) < len(self.prefix) and self.prefix[len(target)] != config.pad_id:
            forced = self.prefix[len(target)]
            return np.where(np.arange(len(scores)) == forced, scores, -np.inf)
        changed = scores.copy()
        for token in set(sequence):
            factor = self.repetition_penalty
            changed[token] = scores[token] * (factor if scores[token] < 0 else 1 / factor)
        size = self.no_repeat_ngram_size
        if size:
            for start in range(len(sequence) - size + 1):
                *before, last = sequence[start : start + size]
                if before == sequence[len(sequence) - size + 1 :]:
                    changed[last] = -np.inf
        if len(target) < self.min_new_tokens:
            changed[config.eos_id] = -np.inf
        changed[[config.pad_id, *self.banned_tokens]] = -np.inf
        return changed

    def score(self, total, length):
        base = length if self.length_normalization == "power" else (5 + length) / 6
        return total / base**self.length_penalty

    def greedy(self):
        """Return the target that takes the likeliest token at each step, and its score."""
        target, total = [], 0.0
        while len(target) < self.max_new_tokens and self.config.eos_id not in target:
            logits = self.logits([target])[0]
            token = int(np.argmax(self.rule(logits, target)))
            total += log_softmax(logits)[token]
            target.append(token)
        return target, self.score(total, len(target))

    def beam(self, size):
        """Return all targets that finish in a beam that is never given up, best first."""
        beam, finished = [([], 0.0)], []
        for _ in range(self.max_new_tokens):
            logits = self.logits([target for target, _ in beam])
            every = [
                ([*target, token], total + score)
                for (target, total), row in zip(beam, logits, strict=True)
                for token, score in enumerate(self.rule(log_softmax(row), target))
                if score > -np.inf
            ]
            ranked = sorted(every, key=lambda one: -one[1])[: 2 * size]
            ended = [one for one in ranked[:size] if one[0][-1] == self.config.eos_id]
            finished += ended
            beam = [one for one in ranked if one[0][-1] != self.config.eos_id][:size]
            if not beam:
                break
        finished += [one for one in beam if len(one[0]) == self.max_new_tokens]
        scored = [(target, self.score(total, len(target))) for target, total in finished]
        return sorted(scored, key=lambda one: -one[1])


def log_softmax(logits):
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def assert_found(hypotheses, row, expected, config, atol=1e-5):
    """Assert that a row's hypotheses are these pairs of target and score, in order."""
    for rank, (target, score) in enumerate(expected):
        tokens = hypotheses.tokens[row, rank].tolist()
        assert tokens == target + [config.pad_id] * (len(tokens) - len(target)), (row, rank)
        assert hypotheses.lengths[row, rank] == len(target)
        np.testing.assert_allclose(hypotheses.scores[row, rank], score, rtol=0, atol=atol)


def assert_equal(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)
