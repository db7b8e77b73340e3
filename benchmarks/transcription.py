"""Speed of Whisper beside transformers and CTranslate2: python -m benchmarks.transcription.

Random weights of whisper-tiny's shape, the same in all: the encoder of 30 seconds, a greedy search
of `NEW_TOKENS` tokens from its memory, a minute of noise with times (CTranslate2 makes windows
alone). Float32 on one core, in turn, each call right after a discarded one. Linux; extra "test".
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import tyro

from benchmarks.systems import processor, spread, start, stop, time_in_turn
from jax_transformer.audio.log_mel import log_mel

NEW_TOKENS, SECONDS = 60, 60
EOS = 50_257  # and the number of tokens of text
PROMPT = [EOS + 1, EOS + 2, EOS + 102, EOS + 106]  # start, English, transcribe, no times
NOISE = np.random.default_rng(0).normal(0, 0.1, 16_000 * SECONDS).astype(np.float32)
System = Callable[[str], Any]


def window(samples: np.ndarray = NOISE[: 30 * 16_000]) -> np.ndarray:
    """Return features [1, bands, frames]."""
    return np.ascontiguousarray(log_mel(samples, 80).T[None])


def write_models(folder: Path) -> None:
    """Write folder/huggingface, with large weights that say much, and folder/ctranslate2."""
    import transformers
    from ctranslate2.converters import TransformersConverter
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    words = [*letters, *(f"w{number}" for number in range(EOS - len(letters)))]
    codes = [*transformers.models.whisper.tokenization_whisper.LANGUAGES][:99]
    names = ["endoftext", "startoftranscript", *codes, "translate", "transcribe", "startoflm"]
    special = [f"<|{name}|>" for name in (*names, "startofprev", "nospeech", "notimestamps")]
    tokenizer = transformers.WhisperTokenizer({word: i for i, word in enumerate(words)}, [])
    tokenizer.add_tokens(special, special_tokens=True)
    tokenizer.add_tokens([f"<|{number / 50:.2f}|>" for number in range(1501)])
    tokenizer.save_pretrained(folder / "huggingface")
    ids = {"eos_token_id": EOS, "pad_token_id": EOS, "decoder_start_token_id": EOS + 1}
    transformers.set_seed(0)
    # Of tiny's shape by default.
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**ids))
    for name, leaf in model.named_parameters():
        if leaf.ndim > 1 and "encoder.embed_positions" not in name:
            leaf.data.normal_(0, 1.5 * leaf[0].numel() ** -0.5)
    own = {"max_initial_timestamp_index": 50, "max_length": 448, "begin_suppress_tokens": [EOS]}
    own |= {"suppress_tokens": [EOS + 1, *range(EOS + 101, EOS + 106)], "is_multilingual": True}
    own |= {"_from_model_config": False}
    own |= {"no_timestamps_token_id": PROMPT[-1], "task_to_id": {"transcribe": PROMPT[2]}}
    own |= {"lang_to_id": {f"<|{code}|>": EOS + 2 + number for number, code in enumerate(codes)}}
    for key, value in (ids | own).items():
        setattr(model.generation_config, key, value)
    model.save_pretrained(folder / "huggingface")
    TransformersConverter(str(folder / "huggingface")).convert(str(folder / "ctranslate2"))


def load_ours(folder: Path) -> System:
    """Return this library."""
    import jax

    from jax_transformer import GenerationConfig, SearchExecution, convert, encode
    from jax_transformer.decoding.rules import make_rules
    from jax_transformer.decoding.search import search
    from jax_transformer.transcription.transcriber import Transcriber

    config, params = convert.from_huggingface(folder / "huggingface")
    transcriber = Transcriber(folder / "huggingface", batch_size=1)
    src, encoded = np.swapaxes(window(), 1, 2), jax.jit(encode, static_argnames="config")
    memory, limits = encoded(params, config, src), np.full(1, NEW_TOKENS, np.int32)
    options = {"banned_tokens": (EOS,), "allow_padding": True, "start_token": PROMPT[0]}
    options = GenerationConfig(max_new_tokens=NEW_TOKENS, **options)
    rules = make_rules(options, config, src, np.array([PROMPT[1:]], np.int32), limits, None)
    whole = {"target_length": 3 + NEW_TOKENS, "beam_size": 1, "execution": SearchExecution()}

    def run(task: str) -> Any:
        if task == "encoder":
            return np.asarray(encoded(params, config, src))
        if task == "search":
            found, _ = search((params,), (config,), src, rules, memory=memory, **whole)
            return np.asarray(found.tokens)[0, 0, 3:].tolist()
        (heard,) = transcriber([NOISE], temperatures=(0.0,), no_speech=2.0, language="en")
        return [token for part in heard.segments for token in part.tokens]

    return run


def load_transformers(folder: Path) -> System:
    """Return transformers."""
    import torch
    import transformers

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    name = folder / "huggingface"
    model = transformers.WhisperForConditionalGeneration.from_pretrained(name).eval()
    encoder, src, long = model.get_encoder(), torch.tensor(window()), torch.tensor(window(NOISE))
    given = {"encoder_outputs": encoder(src), "decoder_input_ids": torch.tensor([PROMPT])}
    given |= {"min_new_tokens": NEW_TOKENS, "max_new_tokens": NEW_TOKENS}
    given["generation_config"] = transformers.GenerationConfig(eos_token_id=EOS)

    def run(task: str) -> Any:
        if task == "encoder":
            return encoder(src).last_hidden_state.numpy()
        if task == "search":
            return transformers.GenerationMixin.generate(model, **given)[0, 4:].tolist()
        return model.generate(long, return_timestamps=True, language="en")[0].tolist()

    return run


def load_ctranslate2(folder: Path) -> System:
    """Return CTranslate2."""
    import ctranslate2

    model = ctranslate2.models.Whisper(str(folder / "ctranslate2"), intra_threads=1)
    src = ctranslate2.StorageView.from_array(window())
    memory, options = model.encode(src), {"suppress_tokens": [EOS], "suppress_blank": False}
    options |= {"max_length": 2 * NEW_TOKENS, "beam_size": 1}

    def run(task: str) -> Any:
        if task == "encoder":
            return np.array(model.encode(src))
        return model.generate(memory, [PROMPT], **options)[0].sequences_ids[0]

    return run


LOADERS = {"ours": load_ours, "transformers": load_transformers, "CTranslate2": load_ctranslate2}


def main(rounds: int = 5, core: int = 0) -> None:
    """Time the systems in turn, print median seconds, ratios and how the results agree.

    Args:
        rounds: How often each system is timed on each task.
        core: The one core that everything runs on.
    """
    os.sched_setaffinity(0, {core})  # inherited by the processes begun from here on
    with tempfile.TemporaryDirectory() as name:
        write_models(Path(name))
        systems = start(LOADERS, Path(name))
        print(f"float32, one core: {processor()}")
        for task in ("encoder", "search", "minute"):
            asked = {n: s for n, s in systems.items() if (n, task) != ("CTranslate2", "minute")}
            results, seconds = time_in_turn(asked, (task,), rounds)
            ours = results["ours"]
            for other, found in results.items():
                ratios = spread(np.divide(seconds[other], seconds["ours"]))
                agreement = (
                    f"equal {found == ours}"
                    if task != "encoder"
                    else (f"error {np.abs(found - ours).max() / np.abs(ours).max():.0e}")
                )
                size = len(found)
                print(task, other, f"{median(seconds[other]):.3f} s", ratios, size, agreement)
        stop(systems)


if __name__ == "__main__":
    tyro.cli(main)
