"""A small Whisper from scratch on speech of espeak-ng: python -m benchmarks.spoken_numbers FOLDER.

English numbers below 10,000, which `VOICES` speak at several speeds and pitches: 2,000 utterances
train, others select the parameters and score, of numbers and voices that no training had. FOLDER
gets the sounds, their lists, a model to start from and the run. Extra "test"; espeakng-loader.
"""

import ctypes
import subprocess
import sys
from pathlib import Path

import numpy as np
import soundfile
import tyro
from rich.console import Console
from rich.table import Table

VOICES = ("en-us", "en-us+f2", "en", "en+f4", "en-gb-scotland+m3", "en-us+m7")
OTHER_VOICES = ("en-gb-x-rp+f3", "en-029", "en-gb-x-gbclan+m2")
NUMBERS, HELD_OUT, TRAINING, TESTED = 10_000, 1_000, 2_000, 300
POSITIONS = 200  # of the encoder: 4 seconds
RATE, PITCH = 1, 3  # parameters of espeak-ng
SETTINGS = """
--steps 2500 --schedule cosine --warmup-steps 400 --learning-rate 0.001 --max-tokens 6400
--bucket-count 2 --clip-norm 1 --dropout 0.1 --evaluation-interval 500 --select-by wer
--spec-augment --language en --freeze source_positions/*
"""


class Speaker:
    """espeak-ng, which turns text into samples."""

    def __init__(self) -> None:
        import espeakng_loader

        self._library, self._blocks = ctypes.CDLL(espeakng_loader.get_library_path()), []
        folder = espeakng_loader.get_data_path().encode()
        self.rate = self._library.espeak_Initialize(2, 0, folder, 0)  # 2: samples to a callback
        kind = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p
        )
        self._callback = kind(self._take)  # kept: the library has only its address
        self._library.espeak_SetSynthCallback(self._callback)

    def _take(self, samples: "ctypes.POINTER(ctypes.c_short)", count: int, _: int) -> int:
        if samples and count:
            self._blocks.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    def say(self, text: str, voice: str, words_a_minute: int, pitch: int) -> np.ndarray:
        """Return the samples [samples] of a text, int16."""
        if self._library.espeak_SetVoiceByName(voice.encode()):
            raise ValueError(f"espeak-ng has no voice {voice}")
        self._library.espeak_SetParameter(RATE, words_a_minute, 0)
        self._library.espeak_SetParameter(PITCH, pitch, 0)
        self._blocks, content = [], text.encode() + b"\0"
        self._library.espeak_Synth(content, len(content), 0, 1, 0, 1, None, None)
        return np.concatenate(self._blocks)


def write_sounds(folder: Path) -> None:
    """Write the utterances of each list, and the lists."""
    from jax_transformer.text.number_words import english

    folder.mkdir()
    speaker, draw = Speaker(), np.random.default_rng(0)
    numbers = draw.permutation(NUMBERS)
    held_out, trained = numbers[:HELD_OUT], numbers[HELD_OUT:]
    lists = {  # numbers, voices, utterances
        "training": (trained, VOICES, TRAINING),
        "validation": (held_out[: HELD_OUT // 2], VOICES, TESTED),
        "new numbers": (held_out[HELD_OUT // 2 :], VOICES, TESTED),
        "new voices": (trained, OTHER_VOICES, TESTED),
        "new numbers, new voices": (held_out[HELD_OUT // 2 :], OTHER_VOICES, TESTED),
    }
    for name, (some, voices, count) in lists.items():
        lines = []
        for index, number in enumerate(draw.choice(some, count, replace=count > len(some))):
            (words,) = english([number])
            voice = voices[index % len(voices)]
            speed, pitch = draw.integers([130, 30], [200, 70]).tolist()
            samples = speaker.say(words, voice, speed, pitch)
            file = f"{name.replace(', ', '_').replace(' ', '_')}_{index}.wav"
            soundfile.write(folder / file, samples, speaker.rate)
            lines.append(f"{file}\t{words}\n")
        (folder / f"{name}.tsv").write_text("".join(lines))


def write_model(folder: Path, texts: list[str]) -> None:
    """Write a small Whisper with random weights and a tokenizer of its own."""
    import tokenizers
    import transformers

    pairs = tokenizers.ByteLevelBPETokenizer()
    pairs.train_from_iterator(texts, 320, show_progress=False)
    folder.mkdir()
    pairs.save_model(str(folder))
    tokenizer = transformers.WhisperTokenizer.from_pretrained(folder)
    names = ["startoftranscript", "en", "translate", "transcribe", "startoflm", "startofprev"]
    special = [f"<|{name}|>" for name in ("endoftext", *names, "nospeech", "notimestamps")]
    tokenizer.add_tokens(special, special_tokens=True)
    tokenizer.save_pretrained(folder)
    eos, start, english, translate, transcribe, *_ = tokenizer.convert_tokens_to_ids(special)
    layers = dict.fromkeys(("encoder_layers", "decoder_layers"), 3)
    heads = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4)
    widths = dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 512)
    ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), eos)
    config = transformers.WhisperConfig(
        vocab_size=len(tokenizer) + POSITIONS + 1,
        d_model=128,
        max_source_positions=POSITIONS,
        max_target_positions=48,
        decoder_start_token_id=start,
        begin_suppress_tokens=None,
        **layers,
        **heads,
        **widths,
        **ids,
    )
    transformers.set_seed(0)
    model = transformers.WhisperForConditionalGeneration(config)
    own = {"lang_to_id": {"<|en|>": english}, "is_multilingual": True, "max_length": 48}
    own |= {"task_to_id": {"transcribe": transcribe, "translate": translate}}
    own |= {"no_timestamps_token_id": len(tokenizer) - 1, "_from_model_config": False}
    for name, value in (own | ids | {"decoder_start_token_id": start}).items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(folder)


def read_list(path: Path) -> tuple[list[Path], list[str]]:
    """Return the sounds of a list, and what they say."""
    rows = [line.split("\t") for line in path.read_text().splitlines()]
    return [path.parent / file for file, _ in rows], [words for _, words in rows]


def main(folder: tyro.conf.Positional[Path]) -> None:
    """Make what is not there yet, train or resume, and print the word error rates."""
    from jax_transformer import Transcriber
    from jax_transformer.evaluation.scores import exact_match, word_error_rate

    folder.mkdir(exist_ok=True)
    sounds, model, run = folder / "sounds", folder / "model", folder / "run"
    if not sounds.exists():
        write_sounds(sounds)
    if not model.exists():
        write_model(model, read_list(sounds / "training.tsv")[1])
    named = ["--output", run, "--source", sounds / "training.tsv"]
    named += ["--valid-source", sounds / "validation.tsv"]
    named += ["--resume"] if run.exists() else ["--init", model, *SETTINGS.split()]
    command = [sys.executable, "-m", "jax_transformer", "train", *map(str, named)]
    subprocess.run(command, check=True)
    transcriber = Transcriber(run, batch_size=32)
    table = Table("utterances", "word error rate, %", "all words right")
    for name in ("new numbers", "new voices", "new numbers, new voices"):
        files, texts = read_list(sounds / f"{name}.tsv")
        heard = [each.text for each in transcriber(files, language="en", temperatures=(0.0,))]
        right = exact_match(heard, [texts])
        table.add_row(name, f"{word_error_rate(heard, texts):.2f}", f"{right:.1%}")
    Console().print(table)


if __name__ == "__main__":
    tyro.cli(main)
