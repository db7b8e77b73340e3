"""`Transcriber`: sounds to text in one call, by a Whisper model (Radford et al. 2022)."""

import dataclasses
import functools
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Float32, Int32
from msgspec import Meta

from jax_transformer.audio.log_mel import HOP, SAMPLE_RATE, LogMelStream
from jax_transformer.audio.sound_files import open_sound
from jax_transformer.config import TransformerConfig
from jax_transformer.config.declared import check_fields, check_names, checked, declarations
from jax_transformer.convert.generation_config import GENERATION_FILE, read_generation_config
from jax_transformer.convert.huggingface import is_huggingface
from jax_transformer.convert.origin import Origin
from jax_transformer.decoding.generation import NonFiniteError
from jax_transformer.decoding.generation_config import Count, GenerationConfig, Id
from jax_transformer.decoding.rules import make_rules
from jax_transformer.decoding.search import search
from jax_transformer.errors import InputError, shorten
from jax_transformer.kernels.attention_backend import execution_on
from jax_transformer.kernels.execution import SearchExecution
from jax_transformer.model.checks import check_whole_number
from jax_transformer.model.transformer import Params, bind
from jax_transformer.runtime.sharding import make_mesh, row_sharding, row_shards
from jax_transformer.storage.hub import local_folder
from jax_transformer.tokenizers import Tokenizer
from jax_transformer.transcription.overlapping import joined_transcripts
from jax_transformer.transcription.segments import (
    Progress,
    Segment,
    Transcript,
    sound_name,
    split_at_times,
)
from jax_transformer.translation import model_folder
from jax_transformer.translation.model_folder import TrainedModel
from jax_transformer.translation.pools import power_of_two
from jax_transformer.translation.translate import place

LATEST = "max_initial_timestamp_index"  # a key of generation_config.json
USUAL = {LATEST: 50}  # as the authors have it
ENGLISH = 51_864  # tokens of the models of English alone
FRAME = HOP / SAMPLE_RATE  # seconds; a time counts two
NEEDED = ("transcribe", "translate", "startofprev", "notimestamps")  # tokens
Temperatures = Annotated[tuple[Annotated[float, Meta(ge=0)], ...], Meta(min_length=1)]


@dataclass(frozen=True)
class Options:
    """How sounds become text. What fails is decoded again (Radford et al. 2022, section 4.5).

    Attributes:
        language: Code of what is spoken, as "de"; None is what the start of each sound shows.
        task: "translate" writes English.
        timestamps: Whether a sound of one window has segments with times; a longer one always has.
        overlapping: Whether a long sound is cut into windows that overlap by a third, which are
            decoded together and joined where their texts agree: faster on an accelerator, and
            without times.
        prompt: Text before each window, as names and their spelling.
        beam_size: Hypotheses of a search; None is the model's.
        temperatures: Of each attempt at a window: 0 searches, others draw.
        compression_ratio: An attempt fails whose text zlib makes smaller by more than this factor.
        log_probability: An attempt fails whose tokens have a lower mean log-probability.
        no_speech: Such a window is silent instead, where <|nospeech|> is likelier than this.
        seed: Of what is drawn, which depends on it, the sound's number and the place in it.
    """

    language: str | None = None
    task: Literal["transcribe", "translate"] = "transcribe"
    timestamps: bool = False
    overlapping: bool = False
    prompt: str | None = None
    beam_size: Count | None = None
    temperatures: Temperatures = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    compression_ratio: float = 2.4
    log_probability: float = -1.0
    no_speech: float = 0.6
    seed: Id = 0

    def __post_init__(self) -> None:
        """Check every option by itself."""
        check_fields(self)


@dataclass
class Listened:
    """A sound of which all before frame `seek` is text."""

    number: int
    name: str
    stream: LogMelStream
    timed: bool
    language: str | None
    seek: int = 0
    tokens: list[int] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    fault: str | None = None


class Transcriber:
    """A Whisper model as a function from sounds to text.

        transcriber = jax_transformer.Transcriber("whisper-small")
        (heard,) = transcriber(["speech.flac"])
        heard.text, heard.language, heard.segments

    Args:
        model: A folder, a name of the hub, or a loaded model, as for `Translator`.
        dtype: Type that the parameters are converted to; None keeps theirs.
        batch_size: Windows that are decoded together, each of another sound.
        mesh: The devices, from `make_mesh`; windows are distributed over the axes data and fsdp.

    Attributes:
        languages: The id of each code; none of a model of English alone.

    Raises:
        InputError: As `load`; or the model reads no sound, or its tokenizer is not Whisper's.
    """

    def __init__(
        self,
        model: str | Path | TrainedModel,
        *,
        dtype: str | None = None,
        batch_size: int = 8,
        mesh: Mesh | None = None,
    ) -> None:
        model_folder.check_dtype(dtype)
        check_whole_number("batch_size", batch_size, least=1)
        self.name, values, read = "a loaded model", USUAL, model
        if not isinstance(model, TrainedModel):
            folder, self.name = local_folder(model), str(model)
            read, values = model_folder.read(folder), _generation_values(folder)
        read, self._mesh = read.with_dtype(dtype), mesh or make_mesh()
        config, tokenizer = read.config, read.tokenizer
        if config.source_features is None or tokenizer is None:
            raise InputError(f"{self.name}: reads no sound, or has no tokenizer; use Translator")
        self._ids = special_ids(tokenizer, self.name)
        first = self._ids["notimestamps"] + 1
        latest = checked(LATEST, values.get(LATEST), Id | None)
        latest = config.tgt_vocab_size if latest is None else first + latest
        self._times = np.array([first, latest], np.int32)
        self.languages = language_ids(tokenizer, values.get("is_multilingual"))
        # Ids that no token has are banned: not those of times, which some folders do not name.
        banned = [token for token in read.generation.get("banned_tokens", ()) if token < first]
        self._model = place(
            read._replace(generation={**read.generation, "banned_tokens": (*banned,)}), self._mesh
        )
        shards = row_shards(self._mesh)
        self._rows = shards * -(-batch_size // shards)
        self._frames = 2 * config.stack("encoder").max_length  # of a window
        device, dtype = self._mesh.devices.flat[0], jax.tree.leaves(read.params)[0].dtype
        self._execution = execution_on(device, dtype.name, config, SearchExecution)

    def __repr__(self) -> str:
        """Return one line with the model's name and sizes."""
        return f"Transcriber({self.name!r}: {self._model!r})"

    def __call__(self, sounds: Iterable[Any], **options: Any) -> list[Transcript]:
        """Return what each sound says, in order.

        Args:
            sounds: As of `stream`; errors, too.
            **options: Fields of `transcription.transcriber.Options`.
        """
        return list(self.stream(sounds, **options))

    def stream(
        self,
        sounds: Iterable[Any],
        progress: Progress | None = None,
        **options: Any,
    ) -> Iterator[Transcript]:
        """Yield what each sound says, in order. A sound that cannot be read has a `fault`.

        A long sound is read in windows, the next one from the end of the last whole segment. Only
        a window of each open sound is in memory.

        Args:
            sounds: Files, arrays [samples] at 16,000 Hz, or pairs of an array and its rate in Hz.
            progress: Is called with the name of a sound, its seconds that are text, and all.
            **options: Fields of `transcription.transcriber.Options`.

        Raises:
            InputError: An option is unknown, or does not fit the model.
            NonFiniteError: The model computes NaN.
        """
        if isinstance(sounds, str | Path | np.ndarray):
            raise InputError(f"sounds={shorten(sounds)} must be a list of sounds")
        chosen = self._checked(options)
        if chosen.overlapping:
            size, plain = self._frames * HOP, dataclasses.replace(chosen, overlapping=False)
            listen = functools.partial(self.stream, **vars(plain))
            yield from joined_transcripts(
                sounds, size, listen, self._model.tokenizer.decode, progress
            )
            return
        waiting, running, done, following = enumerate(sounds), [], {}, 0
        while True:
            while len(running) < self._rows and (new := next(waiting, None)) is not None:
                opened = self._open(*new, chosen)
                if isinstance(opened, Transcript):
                    done[new[0]] = opened
                else:
                    running.append(opened)
            while following in done:
                yield done.pop(following)
                following += 1
            if not running:
                return
            together = [one for one in running if one.timed == running[0].timed]
            self._advance(together, chosen)
            for one in together:
                if progress is not None:
                    progress(one.name, FRAME * one.seek, FRAME * one.stream.num_frames)
                if one.fault is not None:
                    done[one.number] = Transcript(one.name, "", (), fault=one.fault)
                elif one.seek == one.stream.num_frames:
                    text = self._model.tokenizer.decode(one.tokens).strip()
                    segments = tuple(one.segments)
                    done[one.number] = Transcript(one.name, text, segments, one.language)
            running = [one for one in running if one.number not in done]

    def _checked(self, options: Mapping[str, Any]) -> Options:
        check_names(options, declarations(Options))
        chosen = Options(**options)
        if chosen.language is not None and chosen.language not in self.languages:
            known = ", ".join(self.languages) or "none, the model is of English alone"
            raise InputError(f"language={chosen.language!r} must be one of {known}")
        if chosen.task == "translate" and not self.languages:
            raise InputError("task='translate' needs a model of several languages")
        if chosen.overlapping and chosen.timestamps:
            raise InputError("overlapping=True has no times: leave timestamps out")
        return chosen

    def _open(self, number: int, source: Any, options: Options) -> Listened | Transcript:
        name = sound_name(number, source)
        bands, least = self._model.config.source_features, self._frames * HOP
        try:
            stream = LogMelStream(open_sound(source, name).blocks, bands, least)
        except InputError as error:
            return Transcript(name, "", (), fault=str(error))
        timed = options.timestamps or stream.num_frames > self._frames
        return Listened(number, name, stream, timed, options.language)

    def _advance(self, sounds: Sequence[Listened], options: Options) -> None:
        """Add a window to the text of each sound; all of them have times, or none."""
        config, tokenizer = self._model.config, self._model.tokenizer
        shards = row_shards(self._mesh)  # each with as many rows: few numbers are compiled
        rows = min(self._rows, shards * power_of_two(-(-len(sounds) // shards)))
        features = np.zeros((rows, self._frames, config.source_features), np.float32)
        for row, one in zip(features, sounds, strict=False):
            try:
                found = one.stream.frames(one.seek, self._frames)
            except InputError as error:  # the file has changed since it was opened
                one.fault, found = str(error), row[:0]
            row[: len(found)] = found
        starts = np.full((rows, 1), config.bos_id, np.int32)
        src, starts = jax.device_put((features, starts), row_sharding(self._mesh))
        with jax.set_mesh(self._mesh):
            memory, first = _heard(
                self._model.params, src, starts, self._model.config, self._execution
            )
        first, codes = np.asarray(first), [*self.languages]
        for one, row in zip(sounds, first, strict=False):
            if codes and one.language is None:
                one.language = codes[np.argmax(row[[*self.languages.values()]])]
        silence = first[:, self._ids["notimestamps"] - 1]  # the probability of <|nospeech|>
        windows = self._decode(src, memory, silence, sounds, options)
        for one, tokens in zip(sounds, windows, strict=True):
            begin, frames = one.seek, min(self._frames, one.stream.num_frames - one.seek)
            parts, passed = [], frames
            if tokens is not None:
                parts, passed = split_at_times(tokens, int(self._times[0]), frames)
            one.seek = min(begin + (passed or frames), one.stream.num_frames)
            for low, high, ids in parts:
                low = max(0, low)  # where no time was asked for, text may begin a part
                start, end = FRAME * (begin + 2 * low), FRAME * (begin + 2 * max(low, high))
                text = tokenizer.decode(ids).strip()
                one.segments.append(Segment(start, end, text, tuple(ids)))
                one.tokens += ids

    def _decode(
        self,
        src: Float32[Array, "B frames bands"],
        memory: Array,
        silence: Float32[np.ndarray, " B"],
        sounds: Sequence[Listened],
        options: Options,
    ) -> list[list[int] | None]:
        """Return the ids of each window by the first attempt that did not fail; None is silent."""
        windows: list[list[int] | None] = [None] * len(sounds)
        left = [*range(len(sounds))]
        for attempt in range(len(options.temperatures)):
            rows, failed = self._search(src, memory, sounds, left, options, attempt), []
            for index in left:
                tokens, mean = rows[index]
                content = self._model.tokenizer.decode(tokens).encode()
                is_unlikely = mean < options.log_probability
                repeats = len(content) / len(zlib.compress(content)) > options.compression_ratio
                is_silent = is_unlikely and silence[index] > options.no_speech
                windows[index] = None if is_silent else tokens
                if (is_unlikely or repeats) and not is_silent:
                    failed.append(index)
            left = failed
            if not left:
                break
        return windows

    def _search(
        self,
        src: Float32[Array, "B frames bands"],
        memory: Array,
        sounds: Sequence[Listened],
        left: Sequence[int],
        options: Options,
        attempt: int,
    ) -> list[tuple[list[int], float]]:
        """Return the ids of each row, and the mean of their log-probabilities, EOS counted."""
        config, timed = self._model.config, sounds[0].timed
        padded = [*sounds, *sounds[:1] * (len(src) - len(sounds))]
        begins = np.array([self._begin(one, options) for one in padded], np.int32)
        begin = begins.shape[1]
        most = config.max_length - begin
        if most < 1:
            raise InputError(f"prompt={shorten(options.prompt)} leaves no room for text")
        limits = np.where(np.isin(np.arange(len(src)), left), most, 1)  # others end at once
        key = None
        if options.temperatures[attempt] > 0:
            places = [(one.number, one.seek, attempt) for one in padded]
            key = jnp.stack([_key(options.seed, *place) for place in places])
        generation = self._generation(options, attempt, int(begins[0, 0]), most, timed)
        prefix = begins[:, 1:] if begin > 1 else None
        rules = make_rules(generation, config, src, prefix, limits.astype(np.int32), key)
        rules = rules.replace(times=self._times if timed else None)
        with jax.set_mesh(self._mesh):
            found, failed_at = search(
                (self._model.params,),
                (config,),
                src,
                rules,
                target_length=config.max_length - 1,
                beam_size=generation.beam_size,
                execution=self._execution,
                memory=memory,
            )
        if (failed := np.flatnonzero(np.asarray(failed_at) >= 0)).size:
            row = int(failed[0])
            raise NonFiniteError(padded[row].name, row, int(failed_at[row]))
        rows = []
        for ids, score, length in zip(*(np.asarray(x[:, 0]).tolist() for x in found), strict=True):
            end = length - (ids[length - 1] == config.eos_id)
            rows.append((ids[begin - 1 : end], score))
        return rows

    def _begin(self, one: Listened, options: Options) -> list[int]:
        """Return the ids before the text of a window, a prompt of half of the positions at most."""
        before = []
        if options.prompt:
            (ids,) = self._model.tokenizer.encode_target([f" {options.prompt.strip()}"])
            ids = ids[:-1][1 - self._model.config.max_length // 2 :]
            before = [self._ids["startofprev"], *ids]
        said = [self.languages[one.language], self._ids[options.task]] if self.languages else []
        times = [] if one.timed else [self._ids["notimestamps"]]
        return [*before, self._model.config.bos_id, *said, *times]

    def _generation(
        self, options: Options, attempt: int, start: int, most: int, timed: bool
    ) -> GenerationConfig:
        """Return the options of a search whose scores are means."""
        banned = self._model.generation["banned_tokens"] + (self._ids["notimestamps"],) * timed
        usual = self._model.generation_config(
            max_new_tokens=most,
            start_token=start,
            banned_tokens=banned,
            num_hypotheses=1,
            length_normalization="power",
            length_penalty=1.0,
        )
        if (temperature := options.temperatures[attempt]) > 0:
            usual = dataclasses.replace(usual, beam_size=1, temperature=temperature)
        elif options.beam_size is not None:
            usual = dataclasses.replace(usual, beam_size=options.beam_size)
        # As the authors, of what the rules leave; a beam's choice would depend on it.
        return dataclasses.replace(usual, renormalize=usual.beam_size == 1)


@functools.partial(jax.jit, static_argnames=("config", "execution"))
def _heard(
    params: Params,
    src: Float32[Array, "B frames bands"],
    tgt: Int32[Array, "B 1"],
    config: TransformerConfig,
    execution: SearchExecution,
) -> tuple[Float[Array, "B positions D"], Float32[Array, "B V"]]:
    """Return the memory of windows, and the probabilities of their first tokens."""
    bound = bind(params, config, execution)
    memory = bound.encode(src.astype(jax.tree.leaves(params)[0].dtype))
    return memory, jax.nn.softmax(bound.decode(tgt, memory)[:, 0].astype(jnp.float32))


def special_ids(tokenizer: Tokenizer, name: str) -> dict[str, int]:
    """Return the ids of `NEEDED`; refuse a tokenizer without them."""
    ids = {token: tokenizer.token_id(f"<|{token}|>") for token in NEEDED}
    if absent := [token for token, number in ids.items() if number is None]:
        raise InputError(f"{name}: its tokenizer lacks <|{absent[0]}|>; take that of Whisper")
    return ids


def language_ids(tokenizer: Tokenizer, is_multilingual: bool | None = None) -> dict[str, int]:
    """Return the id of each code of a language: the tokens between BOS and the tasks.

    Args:
        is_multilingual: Of generation_config.json. The models of English alone have the tokens,
            too; without it they are known by their size.
    """
    codes = range(tokenizer.bos_id + 1, min(special_ids(tokenizer, "").values()))
    if is_multilingual is None:
        is_multilingual = tokenizer.tgt_vocab_size != ENGLISH
    token = tokenizer.target.segmenter.token
    return {token(code)[2:-2]: code for code in codes} if is_multilingual else {}


def _key(seed: int, *numbers: int) -> Array:
    key = jax.random.key(seed)
    for number in numbers:
        key = jax.random.fold_in(key, number)
    return key


def _generation_values(folder: Path) -> dict[str, Any]:
    """Return the generation defaults of a folder, or of the one that its model comes from."""
    if is_huggingface(folder):
        return read_generation_config(folder)[0]
    return origin_values(model_folder.read_origin(folder))


def origin_values(origin: Origin | None) -> dict[str, Any]:
    """Return the generation defaults of the folder that a model comes from."""
    if origin and GENERATION_FILE in origin.files:
        return json.loads(origin.files[GENERATION_FILE])
    return USUAL
