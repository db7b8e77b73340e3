"""`generate`: the public function for greedy search, beam search and sampling."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from jax_transformer.config import TransformerConfig
from jax_transformer.config.declared import check_names, declarations
from jax_transformer.decoding.cache import check_slots
from jax_transformer.decoding.generation_config import GenerationConfig
from jax_transformer.decoding.hypotheses import Hypotheses
from jax_transformer.decoding.rules import make_rules
from jax_transformer.decoding.sampling import Keys
from jax_transformer.decoding.search import search
from jax_transformer.errors import InputError, shorten
from jax_transformer.kernels.execution import DEFAULT_SEARCH_EXECUTION, SearchExecution
from jax_transformer.model import functional
from jax_transformer.model.checks import (
    check_config,
    check_execution,
    check_generates,
    check_id_batch,
    check_inputs,
    check_mask,
    check_not_empty,
    check_params,
)
from jax_transformer.model.transformer import Params, Source, SourceMask


class NonFiniteError(InputError):
    """The logits of a source are NaN or infinite.

    Attributes:
        row: Index of the source in the batch.
        step: Index of the target token that could not be chosen, from 0.
    """

    def __init__(self, source: str, row: int, step: int) -> None:
        """Name the source as the caller knows it."""
        super().__init__(
            f"the logits of {source} are NaN or infinite at step {step}: parameters that are not "
            "finite, or so large that they overflow, cannot generate"
        )
        self.row, self.step = row, step


def generate(
    params: Params | Sequence[Params],
    config: TransformerConfig | Sequence[TransformerConfig],
    src: Source,
    generation: GenerationConfig | None = None,
    *,
    src_mask: SourceMask | None = None,
    memory: Float[Array | np.ndarray, "B S D"] | None = None,
    prefix: Integer[Array | np.ndarray, "_ P"] | None = None,
    length_limits: Integer[Array | np.ndarray, " _"] | None = None,
    key: Keys | None = None,
    execution: SearchExecution = DEFAULT_SEARCH_EXECUTION,
    **options: Any,
) -> Hypotheses:
    """Return targets for a batch of sources: by greedy search, beam search or sampling.

    The default is greedy search: each next token is the most likely token. A `beam_size` above 1
    is beam search (section 6.1); a `key` is sampling. The lowest id wins a tie. With
    `length_normalization="power"`, the hypotheses and scores of a search are those of
    transformers 5.23 for the options of the same meaning.

    The search is one compiled loop that ends when every row has ended. Each set of shapes, `config`
    and options is compiled once; the values of numbers and ids among the options are data and may
    change, except those that decide shapes: `max_new_tokens`, `beam_size`, `num_hypotheses`,
    `top_k`, `early_stopping` and the sizes of n-grams. A row's targets do not depend on the rest of
    the batch. Works under `jax.jit`, where `config` and all options that are whole numbers,
    strings, booleans or tuples are static.

    Args:
        params: Parameters of a model, or those of each model of an ensemble, which chooses tokens
            by the mean of its models' log-probabilities.
        config: The config of the model, or of each model; an ensemble has one vocabulary.
        src: Source ids [B, S], or sound [B, frames, `config.source_features`].
        generation: The options, which `GenerationConfig` describes; None is those of `options`
            alone. The result has L = P + `max_new_tokens` positions.
        src_mask: True = attend, broadcastable to [B, heads, 1, S]; None hides `config.pad_id`.
        memory: What `encode` returned for `src` with a mask or positions of its own [B, S, D];
            None encodes `src` with `src_mask`, which is always that of the cross-attention, and so
            does an ensemble.
        prefix: First tokens of each target [B, P], without the start token. The prefix of a row
            ends at its first padding; the search continues there. A prefix adds nothing to the
            score or to the length that the penalty counts, and EOS in it ends nothing.
        length_limits: Largest number of tokens that follow the prefix, for each row [B], from 1 to
            `max_new_tokens`; a row ends there.
        key: Random key that switches sampling on: one, and the draws of a row depend on it and the
            row's index; or one for each row [B], on which alone its draws depend.
        execution: How the model is executed; the default suits a CPU.
        **options: Fields of `GenerationConfig`, in place of those of `generation`. Without
            `generation`, `max_new_tokens` is required.

    Returns:
        K hypotheses for each source, best first.

    Raises:
        InputError: The models differ in their vocabularies or special ids; one has no token
            embeddings or output projection; a length does not fit a position table; an id is
            outside the vocabulary; options contradict each other or are out of range.
        NonFiniteError: Logits are NaN or infinite. Names row and step; under a transformation,
            where nothing can be raised, that row's scores are NaN.
    """
    if generation is not None and not isinstance(generation, GenerationConfig):
        raise InputError(f"generation={shorten(generation)} must be a GenerationConfig or None")
    check_names(options, declarations(GenerationConfig))
    if generation is None:
        options = GenerationConfig(**options)
    else:
        options = dataclasses.replace(generation, **options)
    check_execution(execution, SearchExecution)
    models = _models(params, config)
    src = _check(models, options, src, src_mask, memory, prefix)
    params, configs = zip(*models, strict=True)
    rules = make_rules(options, configs[0], src, prefix, length_limits, key)
    length = options.max_new_tokens + (0 if prefix is None else prefix.shape[1])
    hypotheses, failed_at = search(
        params,
        configs,
        src,
        rules,
        target_length=length,
        beam_size=options.beam_size,
        execution=execution,
        src_mask=src_mask,
        memory=memory,
    )
    if not isinstance(failed_at, jax.core.Tracer) and (np.asarray(failed_at) >= 0).any():
        row = int(np.argmax(np.asarray(failed_at) >= 0))
        raise NonFiniteError(f"src[{row}]", row, int(failed_at[row]))
    return hypotheses


def _check(
    models: Sequence[tuple[Params, TransformerConfig]],
    options: GenerationConfig,
    src: Source,
    src_mask: SourceMask | None,
    memory: Float[Array | np.ndarray, "B S D"] | None,
    prefix: Integer[Array | np.ndarray, "_ P"] | None,
) -> Source:
    """Return the source, ids as int32; refuse what does not fit the models."""
    prefix_length = 0
    if prefix is not None:
        check_id_batch("prefix", prefix)
        prefix_length = prefix.shape[1]
    for params, config in models:
        source = checked_source(params, config, src, src_mask)
        options.check_model(config, prefix_length)
    if memory is not None:
        if len(models) > 1:
            raise InputError("memory is that of one model; leave it out for an ensemble")
        check_slots(config, memory, src_mask, prefix_length + options.max_new_tokens)
        shape = src.shape[0], config.positions_of(src.shape[1])
        if memory.shape[:2] != shape:
            wanted = f"[batch, length, d_model] as src, which is {[*shape, config.d_model]}"
            raise InputError(f"memory of shape {memory.shape} must be {wanted}")
    return source


def _models(
    params: Params | Sequence[Params], config: TransformerConfig | Sequence[TransformerConfig]
) -> list[tuple[Params, TransformerConfig]]:
    """Return the models of an ensemble, or the only model; refuse those that are of no ensemble."""
    if not isinstance(config, list | tuple):
        return [(params, config)]
    if not isinstance(params, list | tuple) or len(params) != len(config) or not config:
        raise InputError(
            f"an ensemble needs a list of parameters and a config for each; {len(config)} configs "
            f"and {len(params)} parameters are given"
        )
    for other in config:
        check_config(other)
        for name in ("src_vocab_size", "tgt_vocab_size", "pad_id", "bos_id", "eos_id"):
            if getattr(other, name) != getattr(config[0], name):
                raise InputError(
                    f"{name} of the models of an ensemble must be equal; they have "
                    f"{getattr(config[0], name)} and {getattr(other, name)}"
                )
    return list(zip(params, config, strict=True))


def checked_source(
    params: Params,
    config: TransformerConfig,
    src: Source,
    src_mask: SourceMask | None,
) -> Source:
    """Return a source, ids as int32; refuse a source or a model that makes no text."""
    check_config(config)
    check_generates(config)
    check_params(params, config)
    check_inputs("src", src, config.src_vocab_size, None, config.stack("encoder"))
    check_not_empty("src", src)
    heads = {config.num_heads, config.stack("encoder").num_heads}
    heads = heads.pop() if len(heads) == 1 else 1
    length = config.positions_of(src.shape[1])
    check_mask("src_mask", src_mask, (src.shape[0], heads, 1, length))
    return functional.cast_ids(src, config.src_vocab_size) if config.reads_ids else jnp.asarray(src)
