"""The options of `generate`, declared once: names, types, ranges and defaults."""

from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer
from msgspec import Meta

from jax_transformer.config import LARGEST, TransformerConfig
from jax_transformer.config.declared import checked, short_repr
from jax_transformer.errors import InputError
from jax_transformer.model.checks import check_generates, check_length

LARGEST_ALPHA = 10.0  # 6,000**10 is a float32, and its inverse too
MOST_TOKENS = 2**30  # positions are int32
FLOAT32 = np.finfo(np.float32)

Count = Annotated[int, Meta(ge=1, le=LARGEST)]
Id = Annotated[int, Meta(ge=0, le=LARGEST)]
Ids = tuple[Id, ...]
SomeIds = Annotated[Ids, Meta(min_length=1)]
Alpha = Annotated[float, Meta(ge=-LARGEST_ALPHA, le=LARGEST_ALPHA)]
Probability = Annotated[float, Meta(gt=0, le=1)]
Factor = Annotated[float, Meta(ge=float(FLOAT32.tiny), le=float(FLOAT32.max))]
Scalar = float | int | Float[Array | np.ndarray, ""]
StartToken = int | Integer[Array | np.ndarray, ""] | Integer[Array | np.ndarray, " _"]
EarlyStopping = bool | Literal["never", "shrinking"]


@dataclass(frozen=True)
class GenerationConfig:
    """How targets are generated: options of `generate`, made once or given as its keywords.

    If several rules apply to a token, the order is that of transformers: repetition penalty,
    n-grams, n-grams of the source, banned sequences and tokens, `min_new_tokens`, forced tokens,
    `begin_suppressed_tokens`, `renormalize`. A later rule wins.

    Attributes:
        max_new_tokens: Largest number of tokens that follow the prefix, EOS included. A target may
            reach it without EOS.
        beam_size: Number N of hypotheses that beam search keeps open.
        num_hypotheses: Number K of targets returned for each source, at most `beam_size`.
        length_penalty: Exponent alpha of the divisor of the summed log-probabilities; Vaswani et
            al. 2017 use 0.6 with `beam_size=4`.
        length_normalization: The divisor for n tokens after the prefix, EOS included: "gnmt" is
            ((5 + n) / 6)**alpha (Wu et al. 2016), "power" is n**alpha.
        early_stopping: When beam search stops for a source. True: as soon as `beam_size`
            hypotheses are finished. False: as soon as, in addition, the best open hypothesis at
            its present length has no better score than the worst of them. "never": as soon as no
            open hypothesis can still change the result. "shrinking": when none is open; each
            finished hypothesis leaves its place in the beam empty, as in Marian.
        start_token: First decoder input of all sources, or of each source [B]; None is
            `config.bos_id`.
        eos_ids: Ids that end a target; None is `config.eos_id` alone.
        allow_padding: Whether `config.pad_id` may be generated as an ordinary token.
        max_length_factor: Largest number of tokens that follow the prefix for each token of the
            source, whose EOS counts; None is no such limit.
        min_new_tokens: Smallest number of tokens that follow the prefix, EOS not counted.
        forced_first_token: First token of each row without a prefix; adds 0 to the score.
        forced_last_token: Token at the last position that `max_new_tokens` or `length_limits`
            allows; adds 0 to the score.
        banned_tokens: Ids that are never generated, except where they are forced.
        banned_sequences: Sequences of ids that are never completed. The start token and the prefix
            can be a part of them. A sequence of one EOS id is ignored.
        begin_suppressed_tokens: Ids that are not generated at the first position that is neither
            of the prefix nor forced by `forced_first_token`.
        repetition_penalty: Factor, above 1, by which the scores of used tokens fall (Keskar et al.
            2019). It acts on logits, or on log-probabilities, and so on scores, in beam search.
        no_repeat_ngram_size: Length n: no sequence of n tokens occurs twice in a target, start
            token and prefix included.
        encoder_no_repeat_ngram_size: Length n: no sequence of n tokens of the source, padding
            excepted, occurs in the target.
        renormalize: Whether the probabilities of the tokens that the rules allow are normalised to
            a sum of 1 before they are added to the score.
        temperature: Divisor of the logits before tokens are drawn.
        top_k: Draw only from the `top_k` most likely tokens (Fan et al. 2018).
        top_p: Draw only from the fewest most likely tokens whose probabilities reach this sum
            (Holtzman et al. 2020).
    """

    max_new_tokens: Annotated[int, Meta(ge=1, le=MOST_TOKENS)]
    beam_size: Count = 1
    num_hypotheses: Count = 1
    length_penalty: Scalar = field(default=0.0, metadata={"declared": Alpha})
    length_normalization: Literal["gnmt", "power"] = "gnmt"
    early_stopping: EarlyStopping = "never"
    start_token: StartToken | None = field(default=None, metadata={"declared": Id | None})
    eos_ids: SomeIds | None = None
    allow_padding: bool = False
    max_length_factor: Annotated[float, Meta(gt=0, le=MOST_TOKENS)] | None = None
    min_new_tokens: Annotated[int, Meta(ge=0)] | None = None
    forced_first_token: Id | None = None
    forced_last_token: Id | None = None
    banned_tokens: Ids = ()
    banned_sequences: tuple[SomeIds, ...] = ()
    begin_suppressed_tokens: Ids = ()
    repetition_penalty: Scalar | None = field(default=None, metadata={"declared": Factor | None})
    no_repeat_ngram_size: Count | None = None
    encoder_no_repeat_ngram_size: Count | None = None
    renormalize: bool = False
    temperature: Scalar | None = field(default=None, metadata={"declared": Factor | None})
    top_k: Count | None = None
    top_p: Scalar | None = field(default=None, metadata={"declared": Probability | None})

    __repr__ = short_repr

    def __post_init__(self) -> None:
        """Check every option by itself, and options that depend on each other."""
        for option in fields(self):
            object.__setattr__(self, option.name, _checked(option, getattr(self, option.name)))
        if self.num_hypotheses > self.beam_size:
            raise InputError(
                f"num_hypotheses={self.num_hypotheses} must be from 1 to beam_size={self.beam_size}"
            )
        if self.min_new_tokens is not None and self.min_new_tokens >= self.max_new_tokens:
            raise InputError(
                f"min_new_tokens={self.min_new_tokens} must be from 0 to "
                f"{self.max_new_tokens - 1}: max_new_tokens={self.max_new_tokens} counts EOS too"
            )

    def ids(self) -> Iterator[tuple[str, int]]:
        """Yield each id of an option, with its name for a message."""
        for name in ("start_token", "forced_first_token", "forced_last_token"):
            if isinstance(token := getattr(self, name), int):
                yield name, token
        for name in ("eos_ids", "banned_tokens", "begin_suppressed_tokens"):
            yield from (
                (f"{name}[{i}]", token) for i, token in enumerate(getattr(self, name) or ())
            )
        for i, sequence in enumerate(self.banned_sequences):
            yield from ((f"banned_sequences[{i}][{j}]", id) for j, id in enumerate(sequence))

    def check_model(self, config: TransformerConfig, prefix_length: int = 0) -> None:
        """Refuse options that do not fit a model's vocabulary or position table."""
        check_generates(config)
        for name in ("max_length_factor", "encoder_no_repeat_ngram_size"):
            if not config.reads_ids and getattr(self, name) is not None:
                raise InputError(f"{name}={getattr(self, name)} counts tokens of a source of sound")
        vocab_size, eos_count = config.tgt_vocab_size, len(self.eos_ids or (config.eos_id,))
        needed = (1 + eos_count) * self.beam_size
        if self.beam_size > 1 and needed > vocab_size:
            raise InputError(
                f"beam_size={self.beam_size} needs a vocabulary of {needed} tokens or more, but "
                f"tgt_vocab_size={vocab_size}"
            )
        if self.top_k is not None and self.top_k > vocab_size:
            raise InputError(f"top_k={self.top_k} must be from 1 to {vocab_size} tokens")
        for name, token in self.ids():
            if token >= vocab_size:
                raise InputError(
                    f"{name}={token} is outside the vocabulary; ids go from 0 to {vocab_size - 1}"
                )
        if not config.has_position_table:
            return
        if prefix_length and prefix_length + self.max_new_tokens > config.max_length:
            raise InputError(
                f"a prefix of {prefix_length} tokens and max_new_tokens={self.max_new_tokens} "
                f"exceed the position table, which ends at max_length={config.max_length}"
            )
        check_length("max_new_tokens: the target", self.max_new_tokens, config.max_length)


# The options that a model may have defaults for: all but those of sampling.
SAMPLING_OPTIONS = ("temperature", "top_k", "top_p")
MODEL_OPTIONS = tuple(
    each.name for each in fields(GenerationConfig) if each.name not in SAMPLING_OPTIONS
)


def _checked(option: Field, value: Any) -> Any:
    """Return an option as its declared type; NumPy's and JAX's numbers become Python's."""
    name, traced = option.name, isinstance(value, jax.core.Tracer)
    if name == "start_token" and (traced or getattr(value, "shape", ())):
        return value  # one for each source, or traced: `make_rules` checks it
    if traced:
        if "declared" not in option.metadata:
            raise InputError(f"{name} is traced by jit; make it static: it is compiled in")
        is_real = any(jnp.issubdtype(value.dtype, kind) for kind in (np.floating, np.integer))
        if value.shape or not is_real:
            kind = f"dtype {value.dtype} and shape {value.shape}"
            raise InputError(f"{name} of {kind} must be one number")
        return value
    return checked(name, _plain(value), option.metadata.get("declared", option.type))


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        return np.asarray(value).tolist()
    return tuple(map(_plain, value)) if isinstance(value, list | tuple | range) else value
