"""The windows of sounds through a Whisper model: the memory, then a search, again where it failed.

Letters in shapes: B windows of a batch, V target vocabulary.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float32, PRNGKeyArray
from msgspec import Meta

from jax_transformer.config.declared import check_fields, check_name, declarations
from jax_transformer.convert.generation_config import GENERATION_FILE, read_generation_config
from jax_transformer.convert.huggingface import is_huggingface
from jax_transformer.decoding.generation_config import Count, GenerationConfig, Id
from jax_transformer.decoding.rules import make_rules
from jax_transformer.decoding.search import search
from jax_transformer.errors import InputError, shorten
from jax_transformer.kernels.attention_backend import execution_on
from jax_transformer.kernels.execution import SearchExecution
from jax_transformer.model.transformer import Params, bind
from jax_transformer.runtime.sharding import row_sharding, row_shards
from jax_transformer.translation import model_folder
from jax_transformer.translation.model_folder import TrainedModel
from jax_transformer.translation.translate import place

NEEDED = ("<|transcribe|>", "<|translate|>", "<|startofprev|>", "<|notimestamps|>")
Temperature = Annotated[float, Meta(ge=0, le=100)]
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


@dataclass(frozen=True)
class Options:
    """How sounds become text. What fails is decoded again (Radford et al. 2022, section 4.5).

    Attributes:
        language: Code of what is spoken, as "de"; None detects it at the start of each sound.
        task: "translate" writes English.
        timestamps: Whether a sound of one window has segments with times; a longer one always has.
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
    prompt: str | None = None
    beam_size: Count | None = None
    temperatures: Annotated[tuple[Temperature, ...], Meta(min_length=1)] = TEMPERATURES
    compression_ratio: float = 2.4
    log_probability: float = -1.0
    no_speech: float = 0.6
    seed: Id = 0

    def __post_init__(self) -> None:
        """Check every option by itself."""
        check_fields(self)


class Task(NamedTuple):
    """What a window asks for: a language, whether times, and the numbers that its draws use."""

    language: str | None
    timed: bool
    numbers: tuple[int, int]


class Decoded(NamedTuple):
    """What was heard in a window: ids without EOS, and whether it is silent."""

    tokens: list[int]
    is_silent: bool


class WindowModel:
    """A Whisper model on its devices, as a function of a batch of windows.

    Attributes:
        model: The model, whose parameters lie on the mesh.
        languages: The id of each code; none of a model of English alone.
        frames: Of a window.
        rows: Windows of a batch, of which some may be in vain.
        first_time: The first id that is a time.
    """

    def __init__(self, read: TrainedModel, folder: Path, batch_size: int, mesh: Mesh) -> None:
        config, tokenizer = read.config, read.tokenizer
        if config.source_features is None or tokenizer is None:
            raise InputError(f"{folder}: reads no sound, or has no tokenizer; use Translator")
        ids = [tokenizer.token_id(token) for token in NEEDED]
        if None in ids:
            raise InputError(f"{folder}: its tokenizer lacks {NEEDED[ids.index(None)]}")
        self._tasks = dict(zip(("transcribe", "translate"), ids, strict=False))
        self._previous, self._no_times = ids[2:]
        self.first_time = self._no_times + 1
        values = _generation_values(folder)
        codes = range(config.bos_id + 1, min(ids)) if values.get("is_multilingual", True) else ()
        self.languages = {tokenizer.target.segmenter.token(code)[2:-2]: code for code in codes}
        latest = values.get("max_initial_timestamp_index", config.tgt_vocab_size)
        self._times = np.array([self.first_time, self.first_time + latest], np.int32)
        # Times that no file names are banned as other ids without a token are.
        banned = read.generation.get("banned_tokens", ())
        own = {"banned_tokens": tuple(token for token in banned if token < self.first_time)}
        self.model = place(read._replace(generation={**read.generation, **own}), mesh)
        self._mesh, shards = mesh, row_shards(mesh)
        self.rows = shards * -(-batch_size // shards)
        self.frames = 2 * config.stack("encoder").max_length
        dtype = jax.tree.leaves(read.params)[0].dtype
        device = mesh.devices.flat[0]
        self._execution = execution_on(device, dtype.name, config, SearchExecution)

        def heard(params: Params, src: Array, tgt: Array) -> tuple[Array, Array]:
            bound = bind(params, config, self._execution)
            memory = bound.encode(src.astype(dtype))
            return memory, jax.nn.softmax(bound.decode(tgt, memory)[:, 0].astype(jnp.float32))

        self._heard = jax.jit(heard)

    def checked(self, options: Mapping[str, Any]) -> Options:
        """Return options; refuse unknown ones, and a language or a task that the model lacks."""
        for name, value in options.items():
            check_name(name, value, declarations(Options))
        chosen = Options(**options)
        if chosen.language is not None and chosen.language not in self.languages:
            known = ", ".join(self.languages) or "none, the model is of English alone"
            raise InputError(f"language={chosen.language!r} must be one of {known}")
        if chosen.task == "translate" and not self.languages:
            raise InputError("task='translate' needs a model of several languages")
        return chosen

    def listen(
        self, features: Float32[np.ndarray, "B frames bands"]
    ) -> tuple[tuple[Array, Array], list[str | None], Float32[np.ndarray, " B"]]:
        """Return the placed features and memory, likeliest languages, and chances of silence."""
        starts = np.full((self.rows, 1), self.model.config.bos_id, np.int32)
        src, starts = jax.device_put((features, starts), row_sharding(self._mesh))
        with jax.set_mesh(self._mesh):
            memory, first = self._heard(self.model.params, src, starts)
        first, codes = np.asarray(first), [*self.languages]
        likeliest = np.argmax(first[:, [*self.languages.values()]], axis=1) if codes else ()
        languages = [codes[index] for index in likeliest] or [None] * self.rows
        return (src, memory), languages, first[:, self._no_times - 1]

    def decode(
        self,
        placed: tuple[Array, Array],
        silence: Float32[np.ndarray, " B"],
        tasks: Sequence[Task],
        options: Options,
    ) -> list[Decoded]:
        """Return what is heard in windows that all have times or none: the first good attempt."""
        windows = [Decoded([], False)] * len(tasks)
        left = range(len(tasks))
        for attempt in range(len(options.temperatures)):
            rows, failed = self._search(placed, tasks, left, options, attempt), []
            for index in left:
                tokens, mean = rows[index]
                content = self.model.tokenizer.decode(tokens).encode()
                is_unlikely = mean < options.log_probability
                is_silent = is_unlikely and silence[index] > options.no_speech
                windows[index] = Decoded(tokens, bool(is_silent))
                repeats = len(content) / len(zlib.compress(content)) > options.compression_ratio
                if (is_unlikely or repeats) and not is_silent:
                    failed.append(index)
            if not (left := failed):
                break
        return windows

    def _search(
        self,
        placed: tuple[Array, Array],
        tasks: Sequence[Task],
        left: Sequence[int],
        options: Options,
        attempt: int,
    ) -> list[tuple[list[int], float]]:
        """Return the tokens of each row, and the mean of their log-probabilities, EOS counted."""
        config, (src, memory) = self.model.config, placed
        padded = [*tasks, *tasks[:1] * (self.rows - len(tasks))]
        prompt = self._prompt(options.prompt)
        rows = [[*prompt, config.bos_id, *self._instructions(task, options)] for task in padded]
        prefix = np.array(rows, np.int32)[:, 1:]
        most = config.max_length - len(rows[0])
        if most < 1:
            raise InputError(f"prompt={shorten(options.prompt)} leaves no room for text")
        limits = np.where(np.isin(np.arange(self.rows), left), most, 1)  # the others end at once
        key = None
        if options.temperatures[attempt] > 0:
            key = jnp.stack([_key(options.seed, *task.numbers, attempt) for task in padded])
        generation = self._generation(options, attempt, rows[0][0], most, tasks[0].timed)
        prefix = prefix if prefix.size else None
        rules = make_rules(generation, config, src, prefix, limits.astype(np.int32), key)
        rules = rules.replace(times=self._times if tasks[0].timed else None)
        with jax.set_mesh(self._mesh):
            found, _ = search(
                (self.model.params,),
                (config,),
                src,
                rules,
                target_length=config.max_length - 1,
                beam_size=generation.beam_size,
                execution=self._execution,
                memory=memory,
            )
        tokens, scores, lengths = (np.asarray(leaf[:, 0]).tolist() for leaf in found)
        begin = len(rows[0]) - 1
        own = [ids[begin:length] for ids, length in zip(tokens, lengths, strict=True)]
        own = [ids[:-1] if ids[-1:] == [config.eos_id] else ids for ids in own]
        return [*zip(own, scores, strict=True)]

    def _generation(
        self, options: Options, attempt: int, start: int, most: int, timed: bool
    ) -> GenerationConfig:
        """Return the options of an attempt, whose score is a mean log-probability."""
        temperature = options.temperatures[attempt]
        banned = self.model.generation["banned_tokens"] + (self._no_times,) * timed
        changes: dict[str, Any] = {"max_new_tokens": most, "start_token": start}
        changes |= {"banned_tokens": banned, "length_normalization": "power", "length_penalty": 1.0}
        if temperature > 0:
            changes |= {"beam_size": 1, "num_hypotheses": 1, "temperature": temperature}
        elif options.beam_size is not None:
            changes["beam_size"] = options.beam_size
        usual = self.model.generation_config(**changes)
        if usual.beam_size > 1:
            return usual
        # As the authors, of what the rules leave; a beam's choice would depend on it.
        return self.model.generation_config(**changes, renormalize=True)

    def _instructions(self, task: Task, options: Options) -> list[int]:
        said = [self.languages[task.language], self._tasks[options.task]] if self.languages else []
        return said if task.timed else [*said, self._no_times]

    def _prompt(self, text: str | None) -> list[int]:
        """Return the tokens before a window: as the authors', half of the positions at most."""
        if not text:
            return []
        (ids,) = self.model.tokenizer.encode_target([f" {text.strip()}"])
        return [self._previous, *ids[:-1][1 - self.model.config.max_length // 2 :]]


def _key(seed: int, *numbers: int) -> PRNGKeyArray:
    key = jax.random.key(seed)
    for number in numbers:
        key = jax.random.fold_in(key, number)
    return key


def _generation_values(folder: Path) -> dict[str, Any]:
    """Return the generation defaults of a folder, or of the one that its model comes from."""
    if is_huggingface(folder):
        return read_generation_config(folder)[0]
    origin = model_folder.read_origin(folder)
    return json.loads(origin.files.get(GENERATION_FILE, b"{}")) if origin else {}
