"""Marian's transformer in numpy, by its names and options; it shares no code with the library.

A parameter is drawn where it is read for the first time.
"""

import math
from pathlib import Path

import numpy as np
import yaml

OPTIONS = {
    "type": "transformer",
    "dim-emb": 8,
    "transformer-heads": 2,
    "transformer-dim-ffn": 12,
    "transformer-decoder-dim-ffn": 0,
    "transformer-ffn-depth": 2,
    "transformer-ffn-activation": "swish",
    "transformer-preprocess": "",
    "transformer-postprocess": "dan",
    "transformer-postprocess-emb": "d",
    "transformer-postprocess-top": "",
    "transformer-decoder-autoreg": "self-attention",
    "transformer-disable-position-embeddings": False,
    "transformer-no-projection": False,
    "transformer-tied-layers": [],
    "dec-cell": "gru",
    "enc-depth": 2,
    "dec-depth": 2,
    "tied-embeddings": False,
    "tied-embeddings-src": False,
    "tied-embeddings-all": True,
    "output-omit-bias": False,
    "input-types": [],
    "version": "v1.12.42",
}
VOCABULARY = ["</s>", "<unk>", "on", "null", "a", "man", '"', "#", "ü", "1", "5:30"]
WORDS = len(VOCABULARY)


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


class Marian:
    def __init__(self, options=(), seed=0, words=WORDS):
        self.options, self.words = OPTIONS | dict(options), words
        self.params, self.random = {}, np.random.default_rng(seed)

    def param(self, name, *shape):
        if name not in self.params:
            self.params[name] = self.random.normal(size=shape).astype(np.float32)
        return self.params[name].astype(np.float64)

    def dense(self, x, name, width, suffix=""):
        weight = self.param(f"{name}_W{suffix}", x.shape[-1], width)
        return x @ weight + self.param(f"{name}_b{suffix}", 1, width)

    def apply(self, operations, name, y, x=None, suffix=""):
        for operation in operations:
            if operation == "a":
                y = y + x
            elif operation == "n":
                mean = y.mean(-1, keepdims=True)
                y = (y - mean) / np.sqrt(((y - mean) ** 2).mean(-1, keepdims=True) + 1e-6)
                y = y * self.param(f"{name}_ln_scale{suffix}", 1, y.shape[-1])
                y = y + self.param(f"{name}_ln_bias{suffix}", 1, y.shape[-1])
            elif operation == "r":
                y = y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6)
                y = y * self.param(f"{name}_rms_scale{suffix}", 1, y.shape[-1])
        return y

    def after(self, name, y, x):
        return self.apply(self.options["transformer-postprocess"], name, y, x)

    def attention(self, name, x, memory, is_causal=False):
        heads, width = self.options["transformer-heads"], x.shape[-1]
        query, key, value = (
            self.dense(of, name, width, letter).reshape(len(of), heads, -1).swapaxes(0, 1)
            for of, letter in ((x, "q"), (memory, "k"), (memory, "v"))
        )
        scores = query @ key.swapaxes(1, 2) / math.sqrt(width // heads)
        if is_causal:
            scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
        y = (softmax(scores) @ value).swapaxes(0, 1).reshape(len(x), width)
        if not self.options["transformer-no-projection"]:
            y = self.dense(y, name, width, "o")
        return self.after(f"{name}_Wo", y, x)

    def recurrence(self, name, x):
        width = x.shape[-1]
        new = x @ self.param(f"{name}_W", width, width)
        gate = 1 / (1 + np.exp(-self.dense(x, name, width, "f")))
        state, states = np.zeros(width), []
        for t in range(len(x)):
            state = gate[t] * state + (1 - gate[t]) * new[t]
            states.append(np.maximum(state, 0))
        return self.after(f"{name}_ffn", np.array(states), x)

    def feed_forward(self, name, x, width):
        y = self.dense(x, name, width, 1)
        kind = self.options["transformer-ffn-activation"]
        if kind == "relu":
            y = np.maximum(y, 0)
        elif kind == "swish":
            y = y / (1 + np.exp(-y))
        else:
            y = y * (1 + np.vectorize(math.erf)(y / math.sqrt(2))) / 2
        return self.after(f"{name}_ffn", self.dense(y, name, x.shape[-1], 2), x)

    def embed(self, x, stack):
        if not self.options["transformer-disable-position-embeddings"]:
            half = x.shape[1] // 2
            rates = np.exp(-np.arange(half) * math.log(10000) / (half - 1))
            angles = np.arange(len(x))[:, None] * rates
            x = math.sqrt(x.shape[1]) * x + np.concatenate([np.sin(angles), np.cos(angles)], 1)
        operations = self.options["transformer-postprocess-emb"]
        return self.apply(operations, f"{stack}_emb", x, suffix="_pre")

    def logits(self, source, target):
        """Return the logits of each target token: the decoder begins with a zero vector."""
        options, width = self.options, self.options["dim-emb"]
        all_tied = options["tied-embeddings-all"]
        shared = all_tied or options["tied-embeddings-src"]
        tables = ["Wemb"] * 2 if shared else ["encoder_Wemb", "decoder_Wemb"]
        sources, targets = (self.param(name, self.words, width) for name in tables)
        d_ff = options["transformer-dim-ffn"]
        x = self.embed(sources[source], "encoder")
        for layer in range(1, options["enc-depth"] + 1):
            x = self.attention(f"encoder_l{layer}_self", x, x)
            x = self.feed_forward(f"encoder_l{layer}_ffn", x, d_ff)
        memory = self.apply(options["transformer-postprocess-top"], "encoder_top", x)
        x = np.concatenate([np.zeros((1, width)), targets[target[:-1]]])
        x = self.embed(x, "decoder")
        for layer in range(1, options["dec-depth"] + 1):
            if options["transformer-decoder-autoreg"] == "rnn":
                x = self.recurrence(f"decoder_l{layer}_rnn", x)
            else:
                x = self.attention(f"decoder_l{layer}_self", x, x, is_causal=True)
            x = self.attention(f"decoder_l{layer}_context", x, memory)
            inner = options["transformer-decoder-dim-ffn"] or d_ff
            x = self.feed_forward(f"decoder_l{layer}_ffn", x, inner)
        x = self.apply(options["transformer-postprocess-top"], "decoder_top", x)
        tied = all_tied or options["tied-embeddings"]
        table = targets if tied else self.param("decoder_ff_logit_out_Wt", self.words, width)
        y = x @ table.T
        return (
            y
            if options["output-omit-bias"]
            else y + self.param("decoder_ff_logit_out_b", 1, self.words)
        )

    def save(self, folder: Path):
        """Write a folder as Marian does; all parameters exist after the first logits."""
        self.logits([3, 0], [4, 0])
        text = yaml.safe_dump(self.options).encode() + b"\0"
        entries = {"special:model.yml": np.frombuffer(text, np.int8)}
        folder.mkdir(exist_ok=True)
        np.savez(folder / "model.npz", **self.params, **entries)
        words = (yaml.safe_dump(word).splitlines()[0] for word in VOCABULARY)
        (folder / "vocab.yml").write_text("".join(f"{w}: {i}\n" for i, w in enumerate(words)))
        return folder
