"""Pairs of a sound and its text; the features of a sound are computed when its batch is made."""

import concurrent.futures
from collections import Counter
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32, Int64, Integer
from rich.console import Console
from rich.progress import track

from jax_transformer.audio.log_mel import HOP, SAMPLE_RATE, log_mel
from jax_transformer.audio.sound_files import Sound, open_sound
from jax_transformer.config import TransformerConfig
from jax_transformer.errors import InputError
from jax_transformer.text.corpus import Corpus, Part, packed_part
from jax_transformer.text.encoding import Filters, counted
from jax_transformer.text.parallel_text import Text
from jax_transformer.tokenizers import LineError, Tokenizer, encode_lines

# SpecAugment: the policy "LD" of Park et al. 2019 (table 1), whose sounds have 80 bands, with the
# bound on the masked time of the policy "SM", for short sounds.
MASKS, MOST_FRAMES, MOST_SHARE, MOST_BANDS = 2, 100, 0.2, 27 / 80


class SoundCorpus(Corpus):
    """Pairs of a sound and its text, in memory. A pair has EOS in the place of the sound's ids.

    Args:
        part: The pairs.
        files: The sound of each pair.
        config: The shape of the model, whose window a sound fills up with silence.
        masking: Seed and epoch of the masks of SpecAugment; None masks nothing.
    """

    def __init__(
        self,
        part: Part,
        files: Sequence[str],
        config: TransformerConfig,
        masking: tuple[int, int] | None = None,
    ) -> None:
        super().__init__([part], config.src_vocab_size, config.tgt_vocab_size, config.pad_id)
        self.files, self._config, self._masking = files, config, masking
        self.source_length = config.stack("encoder").max_length

    def masked(self, seed: int, epoch: int) -> "SoundCorpus":
        """Return the corpus with the masks of an epoch, drawn for each sound."""
        return SoundCorpus(self.parts[0], self.files, self._config, (seed, epoch))

    def side_lengths(self, pairs: Integer[np.ndarray, "pairs"]) -> Int64[np.ndarray, "pairs 2"]:
        """See `Corpus`; the target counts for both sides, as all sounds have one length."""
        return np.repeat(super().side_lengths(pairs)[:, 1:], 2, axis=1)

    def features(
        self, pairs: Integer[np.ndarray, "pairs"], rows: int
    ) -> Float32[np.ndarray, "rows frames bands"]:
        """Return the sources of some pairs; rows after them are 0.

        Raises:
            InputError: If a sound cannot be read.
        """
        frames, bands = 2 * self.source_length, self._config.source_features
        found = np.zeros((rows, frames, bands), np.float32)
        with concurrent.futures.ThreadPoolExecutor() as threads:
            for row, of_sound in enumerate(threads.map(self._features, pairs.tolist())):
                found[row] = of_sound
        return found

    def _features(self, pair: int) -> Float32[np.ndarray, "frames bands"]:
        frames, bands = 2 * self.source_length, self._config.source_features
        blocks = open_sound(self.files[pair]).blocks()
        samples = np.concatenate([np.zeros(0, np.float32), *blocks])[: frames * HOP]
        features = log_mel(np.pad(samples, (0, frames * HOP - len(samples))), bands)
        if self._masking is not None:
            draw = np.random.default_rng([*self._masking, pair])
            heard = features[: len(samples) // HOP]
            widest = min(MOST_FRAMES, int(MOST_SHARE * len(heard))), int(MOST_BANDS * bands)
            for lines, most in [*zip((heard, heard.T), widest, strict=True)] * MASKS:
                width = draw.integers(most + 1)
                start = draw.integers(len(lines) - width + 1)
                lines[start : start + width] = 0
        return features


def encode_sounds(
    text: Text,
    tokenizer: Tokenizer,
    config: TransformerConfig,
    begin: Sequence[int],
    filters: Filters,
    skips_bad_lines: bool,
    console: Console,
) -> tuple[SoundCorpus, Text]:
    """Return the pairs of sounds and texts that are kept, as a corpus and as they are.

    Args:
        text: The files of sounds, of which the headers are read, and what they say.
        begin: The ids before each text.
    """
    dropped, bad_lines = Counter({"dropped for an empty side": text.dropped_empty}), []
    window = 2 * config.stack("encoder").max_length * HOP / SAMPLE_RATE  # seconds
    ids, kept = [], []
    with concurrent.futures.ThreadPoolExecutor() as threads:
        opened = track(
            threads.map(_opened, text.sources),
            "reading the headers of the sounds",
            total=text.pairs,
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        targets = encode_lines(tokenizer.encode_target, text.targets)
        for file, said, sound, target in zip(
            text.sources, text.targets, opened, targets, strict=True
        ):
            fault = f"{file}: {target.fault}" if isinstance(target, LineError) else sound
            if isinstance(fault, str):
                if not skips_bad_lines:
                    raise InputError(f"{fault}; or set bad_lines to 'skip'")
                bad_lines.append(file)
                continue
            length = len(begin) + len(target)
            if sound.seconds > window or filters.reason_to_drop(length, length):
                dropped["dropped as too long"] += 1
                continue
            ids.append(np.array([tokenizer.eos_id, tokenizer.bos_id, *begin, *target], np.int32))
            kept.append((file, said))
    if not kept:
        raise InputError(
            f"of {text.pairs:,} sounds with texts none can be read, has at most {window:g} s, and "
            f"at most {filters.max_length} tokens; name others"
        )
    files, texts = zip(*kept, strict=True)
    part = counted(packed_part(ids, [1] * len(ids)), +dropped, 0, [*text.bad_lines, *bad_lines])
    return SoundCorpus(part, files, config), Text(files, texts)


def _opened(file: str) -> Sound | str:
    """Return a sound, or why it cannot be read."""
    try:
        return open_sound(file)
    except InputError as error:
        return str(error)
