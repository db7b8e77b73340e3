"""Folders of small Whisper models with random weights, and what transformers hears with them.

Windows have one second. Each token has a part of its logit that no sound changes: so times stay
inside of windows, and targets have several segments and lengths.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from jax_transformer.audio.log_mel import log_mel
from tests.tokenizers.class_folders import write_whisper

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

LANGUAGES = ("en", "de", "fr")
WINDOW, LENGTH = 50, 48  # positions of the encoder, two frames each, and of the decoder
BANDS = 80
SECOND = 16_000  # samples


class Foreign(NamedTuple):
    """A model of transformers, its tokenizer, and the folder that has both."""

    folder: Path
    model: transformers.WhisperForConditionalGeneration
    tokenizer: transformers.WhisperTokenizer

    def id(self, name):
        return self.tokenizer.convert_tokens_to_ids(f"<|{name}|>")

    def hears(self, sound, **options):
        """Return (start, end, tokens) of each segment of a sound, by one search of each window."""
        usual = {"return_timestamps": False, "do_sample": False, "num_beams": 1}
        if self.model.generation_config.is_multilingual:
            usual["task"] = "transcribe"  # otherwise it would name none beside a detected language
        with torch.no_grad():
            found = self.model.generate(_features(sound), return_segments=True, **usual | options)
        return [
            (float(part["start"]), float(part["end"]), part["tokens"].tolist())
            for part in found["segments"][0]
        ]

    def logits(self, sound, tokens):
        """Return the logits [tokens, V] of a sound of one window, by no rule."""
        with torch.no_grad():
            return self.model(_features(sound), decoder_input_ids=torch.tensor([tokens])).logits[0]


def _features(sound):
    return torch.from_numpy(log_mel(np.pad(sound, (0, max(0, SECOND - len(sound)))), BANDS).T[None])


def write_folder(path, seed=0, languages=LANGUAGES, times=0.5, beams=1, positions=WINDOW):
    """Write a model of these languages, of English alone without; return it in transformers.

    `times` is the part of the logit of a time that no sound changes.
    """
    path.mkdir()
    tokenizer = write_whisper(path, "published", languages=languages)
    eos, start, previous, no_times = (
        tokenizer.convert_tokens_to_ids(f"<|{name}|>")
        for name in ("endoftext", "startoftranscript", "startofprev", "notimestamps")
    )
    ids = dict.fromkeys(("pad_token_id", "eos_token_id", "bos_token_id"), eos)
    ids["decoder_start_token_id"] = start
    config = transformers.WhisperConfig(
        vocab_size=len(tokenizer),
        num_mel_bins=BANDS,
        d_model=32,
        encoder_layers=1,
        decoder_layers=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_source_positions=positions,
        max_target_positions=LENGTH,
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
        **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens")),
        **ids,
    )
    model = transformers.WhisperForConditionalGeneration(config).eval()
    _randomize(model, seed)
    own = torch.zeros(len(tokenizer))
    own[no_times + 1 :] = times
    own[no_times + 1 + positions + 1 :] = -100.0  # behind the window
    own[eos] = 1.0
    decoder = model.model.decoder
    with torch.no_grad():  # the last norm makes the first number of a state 1
        decoder.layer_norm.weight[0], decoder.layer_norm.bias[0] = 0, 1
        decoder.embed_tokens.weight[:, 0] = own
    values = {"max_length": LENGTH, "num_beams": beams, "return_timestamps": False, **ids}
    values |= {"no_timestamps_token_id": no_times, "prev_sot_token_id": previous}
    values |= {"_from_model_config": False, "max_initial_timestamp_index": 20}
    values["is_multilingual"] = bool(languages)
    # As in published files: some text, and the special tokens but for languages and EOS.
    special = range(start + 1 + len(languages), no_times)
    values |= {"suppress_tokens": [1, 2, 7, start, *special], "begin_suppress_tokens": [3, eos]}
    if languages:
        codes = {f"<|{code}|>": start + 1 + n for n, code in enumerate(languages)}
        tasks = ("translate", "transcribe")
        values |= {"lang_to_id": codes}
        values |= {"task_to_id": {t: tokenizer.convert_tokens_to_ids(f"<|{t}|>") for t in tasks}}
    for name, value in values.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(path)
    return Foreign(path, model, tokenizer)


def _randomize(model, seed):
    """Give every leaf random numbers, but for the sinusoids; the tokens depend on the sound."""
    generator = torch.Generator().manual_seed(seed)
    for name, leaf in model.named_parameters():
        if not name.endswith("encoder.embed_positions.weight"):
            wide = 1.2 if "embed_tokens" in name else 1.5
            deviation = wide * leaf[0].numel() ** -0.5 if leaf.ndim > 1 else 0.3
            leaf.data.normal_(float(name.endswith("norm.weight")), deviation, generator=generator)


def sound(seconds, seed=0):
    """Return tones, each of another length, height and loudness, and noise."""
    random, parts, length = np.random.default_rng(seed), [], round(SECOND * seconds)
    while sum(map(len, parts)) < length:
        angles = random.uniform(0.03, 2.4) * np.arange(random.integers(1000, 6000))
        parts.append(random.uniform(0.01, 0.5) * np.sin(angles))
    noise = 0.01 * random.standard_normal(length)
    return (np.concatenate(parts)[:length] + noise).astype(np.float32)
