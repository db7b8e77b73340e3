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
    "forced_last_token",
    "early_stopping",
    "eos_ids",
    "allow_padding",
    "banned_sequences",
    "begin_suppressed_tokens",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "renormalize",
    "top_k",
    "execution",
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
    start_token: int | None = None
    eos_ids: tuple | None = None
    allow_padding: bool = False
    prefix: tuple = ()
    min_new_tokens: int = 0
    forced_first_token: int | None = None
    forced_last_token: int | None = None
    banned_tokens: tuple = ()
    banned_sequences: tuple = ()
    begin_suppressed_tokens: tuple = ()
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    encoder_no_repeat_ngram_size: int = 0
    renormalize: bool = False
    length_penalty: float = 0.0
    length_normalization: str = "gnmt"
    early_stopping: bool | str = "never"

    def __post_init__(self):
        config, src = self.config, self.src
        self.start = config.bos_id if self.start_token is None else self.start_token
        self.eos_ids = (config.eos_id,) if self.eos_ids is None else self.eos_ids
        self.longest = len(self.prefix) + self.max_new_tokens
        self.words = [id for id in src.tolist() if id != config.pad_id]
        self.length = self.longest
        if config.decoder_attention == "self_over_memory":
            self.length = max(self.length, len(src))
            added = self.length - len(src)
            self.src = np.pad(src, (0, added), constant_values=config.pad_id)

    def logits(self, targets):
        """Return the logits [n, V] that follow targets of one length, without a cache."""
        step = len(targets[0])
        tgt = np.full((len(targets), self.length), self.config.pad_id, np.int32)
        tgt[:, 0] = self.start
        tgt[:, 1 : step + 1] = np.array(targets).reshape(len(targets), step)
        rows = 2 ** int(np.ceil(np.log2(len(targets))))  # few shapes, few compilations
        tgt = np.resize(tgt, (rows, self.length))
        src = np.broadcast_to(self.src, (rows, len(self.src)))
        found = run(self.params, self.config, src, tgt)[: len(targets), step]
        return np.asarray(found, np.float64)

    def forced(self, target):
        """Return the token that must follow a target, or None."""
        if len(target) < len(self.prefix):
            return self.prefix[len(target)]
        if len(target) + 1 == self.longest and self.forced_last_token is not None:
            return self.forced_last_token
        return None if target else self.forced_first_token

    def rule(self, scores, target):
        """Return the scores [V] of the tokens after a target, as the rules change them."""
        sequence, new = [self.start, *target], len(target) - len(self.prefix)
        changed = scores.copy()
        for token in set(sequence):
            factor = self.repetition_penalty
            changed[token] = scores[token] * (factor if scores[token] < 0 else 1 / factor)
        for size, text in (
            (self.no_repeat_ngram_size, sequence),
            (self.encoder_no_repeat_ngram_size, self.words),
        ):
            starts = range(len(text) - size + 1) if size else ()
            sequences = [text[start : start + size] for start in starts]
            changed[completed(sequences, sequence)] = -np.inf
        sequences = [ids for ids in self.banned_sequences if ids not in zip(self.eos_ids)]
        changed[completed(sequences, sequence)] = -np.inf
        changed[list(self.banned_tokens)] = -np.inf
        if not self.allow_padding:
            changed[self.config.pad_id] = -np.inf
        if new < self.min_new_tokens:
            changed[list(self.eos_ids)] = -np.inf
        if self.forced(target) is not None:
            changed[:] = -np.inf
            changed[self.forced(target)] = 0
        if len(target) == max(len(self.prefix), self.forced_first_token is not None):
            changed[list(self.begin_suppressed_tokens)] = -np.inf
        return log_softmax(changed) if self.renormalize else changed

    def score(self, total, target):
        length = len(target) - len(self.prefix)
        base = length if self.length_normalization == "power" else (5 + length) / 6
        return total / base**self.length_penalty

    def has_ended(self, target):
        return len(target) > len(self.prefix) and target[-1] in self.eos_ids

    def greedy(self):
        """Return the target that takes the likeliest token at each step, and its score."""
        target, total = [], 0.0
        while len(target) < self.longest and not self.has_ended(target):
            logits = self.logits([target])[0]
            changed = self.rule(logits, target)
            token = int(np.argmax(changed))
            if self.renormalize:
                total += changed[token]
            elif self.forced(target) is None:
                total += log_softmax(logits)[token]
            target.append(token)
        return target, self.score(total, target)

    def beam(self, size):
        """Return all targets that finish, best first; "never" goes on to the last length."""
        beam, finished = [([], 0.0)], []
        while beam:
            logits = self.logits([target for target, _ in beam])
            every = [
                ([*target, token], total + score)
                for (target, total), row in zip(beam, logits, strict=True)
                for token, score in enumerate(self.rule(log_softmax(row), target))
                if score > -np.inf
            ]
            ranked = sorted(every, key=lambda one: -one[1])[: (1 + len(self.eos_ids)) * size]
            at_limit = len(beam[0][0]) + 1 == self.longest
            ends = [at_limit or self.has_ended(target) for target, _ in ranked]
            finished += [
                (target, self.score(total, target))
                for (target, total), end in zip(ranked[:size], ends[:size], strict=True)
                if end
            ]
            beam = [one for one, end in zip(ranked, ends, strict=True) if not end][:size]
            finished = sorted(finished, key=lambda one: -one[1])
            if self.early_stopping != "never" and len(finished) >= size and beam:
                target, total = beam[0]
                hopeless = self.score(total, target) <= finished[size - 1][1]
                if self.early_stopping is True or hopeless:
                    break
        return finished


def completed(sequences, sequence):
    """Return the last ids of those sequences whose other ids `sequence` ends with."""
    return [
        last
        for *before, last in sequences
        if not before or list(before) == sequence[-len(before) :]
    ]


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
