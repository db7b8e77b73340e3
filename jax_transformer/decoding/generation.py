"""`generate`: the public function for greedy search, beam search and sampling."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int32, Integer

from jax_transformer.config import TransformerConfig
from jax_transformer.decoding.beam import beam_search
from jax_transformer.decoding.cache import Cache, check_slots, new_cache, next_step
from jax_transformer.decoding.generation_config import EarlyStopping, GenerationConfig
from jax_transformer.decoding.greedy import greedy_search
from jax_transformer.decoding.hypotheses import Hypotheses, LengthPenalty, batch_sizes
from jax_transformer.decoding.rules import Rules, as_array, make_rules
from jax_transformer.decoding.sampling import Keys, Sampling, make_sampling
from jax_transformer.errors import InputError, shorten
from jax_transformer.kernels.execution import DEFAULT_SEARCH_EXECUTION, SearchExecution
from jax_transformer.kernels.panels import Panels, arrange_for_steps
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
from jax_transformer.model.self_over_memory import pad_source
from jax_transformer.model.transformer import Params, SourceMask, run_module

ModelStep = Callable[[Cache, Int32[Array, "B N"]], tuple[Float[Array, "B N V"], Cache]]


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
    src: Integer[Array | np.ndarray, "B S"],
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
        src: Source ids [B, S].
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
    if generation is None:
        chosen = GenerationConfig(**options)
    elif isinstance(generation, GenerationConfig):
        chosen = dataclasses.replace(generation, **options)
    else:
        raise InputError(f"generation={shorten(generation)} must be a GenerationConfig or None")
    check_execution(execution, SearchExecution)
    models = _models(params, config)
    params, configs = zip(*models, strict=True)
    config = configs[0]
    prefix_length = 0
    if prefix is not None:
        check_id_batch("prefix", prefix)
        prefix_length = prefix.shape[1]
    for model in models:
        ids = checked_source(*model, src, src_mask)
        chosen.check_model(model[1], prefix_length)
    target_length = prefix_length + chosen.max_new_tokens
    if memory is not None:
        if len(models) > 1:
            raise InputError("memory is that of one model; leave it out for an ensemble")
        check_slots(config, memory, src_mask, target_length)
        if memory.shape[:2] != ids.shape:
            wanted = f"[batch, length, d_model] as src, which is {[*ids.shape, config.d_model]}"
            raise InputError(f"memory of shape {memory.shape} must be {wanted}")
    rules = make_rules(chosen, config, ids, prefix, length_limits)
    sampling = make_sampling(chosen, key, ids.shape[0])
    penalty = LengthPenalty(as_array(chosen.length_penalty), chosen.length_normalization)
    hypotheses, failed_at = search(
        *(params, configs, ids, src_mask, memory, rules, sampling, penalty),
        target_length=target_length,
        beam_size=chosen.beam_size,
        num_hypotheses=chosen.num_hypotheses,
        # Greedy search has no use for it, and is compiled once for all its values.
        early_stopping="never" if chosen.beam_size == 1 else chosen.early_stopping,
        execution=execution,
    )
    if not isinstance(failed_at, jax.core.Tracer) and (np.asarray(failed_at) >= 0).any():
        row = int(np.argmax(np.asarray(failed_at) >= 0))
        raise NonFiniteError(f"src[{row}]", row, int(failed_at[row]))
    return hypotheses


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
    src: Integer[Array | np.ndarray, "B S"],
    src_mask: SourceMask | None,
) -> Int32[Array, "B S"]:
    """Return the ids of a source as int32; refuse a source or a model that makes no text."""
    check_config(config)
    check_generates(config)
    check_params(params, config)
    check_inputs("src", src, config.src_vocab_size, None, config)
    check_not_empty("src", src)
    check_mask("src_mask", src_mask, (src.shape[0], config.num_heads, 1, src.shape[1]))
    return functional.cast_ids(src, config.src_vocab_size)


STATIC = ("configs", "target_length", "beam_size", "num_hypotheses", "early_stopping", "execution")


@partial(jax.jit, static_argnames=STATIC)
def search(
    params: tuple[Params, ...],
    configs: tuple[TransformerConfig, ...],
    src: Int32[Array, "B S"],
    src_mask: SourceMask | None,
    memory: Float[Array, "B S D"] | None,
    rules: Rules,
    sampling: Sampling | None,
    length_penalty: LengthPenalty,
    *,
    target_length: int,
    beam_size: int,
    num_hypotheses: int,
    early_stopping: EarlyStopping,
    execution: SearchExecution,
) -> tuple[Hypotheses, Int32[Array, " B"]]:
    """Return what `generate` does for data that it has checked, and the step of each failed row.

    Args:
        target_length: Number L of positions; symbolic in a program for any (`jax.export`).
    """
    models = [
        _arranged(*model, src, src_mask, memory, target_length, beam_size, execution)
        for model in zip(params, configs, strict=True)
    ]
    steps, caches = zip(*models, strict=True)

    def advance(
        cache: Cache, tokens: Int32[Array, "B N"]
    ) -> tuple[list[Float[Array, "B N V"]], Cache]:
        logits, after = [], []
        for step, layers, mask in zip(steps, cache.layers, cache.src_mask, strict=True):
            of_model, written = step(cache._replace(layers=layers, src_mask=mask), tokens)
            logits.append(of_model)
            after.append(written)
        return logits, _joined(after)

    cache, config = _joined(caches), configs[0]
    # What is drawn depends on the index of a row, so rows keep their places where tokens are drawn.
    leave = execution.smaller_batches and sampling is None
    sizes = batch_sizes(src.shape[0]) if leave else [src.shape[0]]
    if beam_size == 1:
        return greedy_search(advance, cache, config, rules, sampling, length_penalty, sizes)
    return beam_search(
        advance,
        cache,
        config,
        rules,
        length_penalty,
        num_hypotheses,
        early_stopping,
        execution.top_k,
        sizes,
    )


def _joined(caches: Sequence[Cache]) -> Cache:
    """Return one cache: models have their own layers and masks, and share all else."""
    layers, masks = zip(*[(cache.layers, cache.src_mask) for cache in caches], strict=True)
    return caches[0]._replace(layers=layers, src_mask=masks)


def _arranged(
    params: Params,
    config: TransformerConfig,
    src: Int32[Array, "B S"],
    src_mask: SourceMask | None,
    memory: Float[Array, "B S D"] | None,
    target_length: int,
    beam_size: int,
    execution: SearchExecution,
) -> tuple[ModelStep, Cache]:
    """Return one step of a model's search, and its cache before the first one."""
    src, src_mask = pad_source(config, src, src_mask, target_length)
    if memory is None:
        memory = run_module(params, config, execution, src, src_mask, method="encode")
    cache = new_cache(params, config, memory, target_length, src_mask, beam_size, execution)
    params = arrange_for_steps(params, config, execution, src.shape[0] * beam_size)

    def step(cache: Cache, tokens: Int32[Array, "B N"]) -> tuple[Float[Array, "B N V"], Cache]:
        # The barrier keeps XLA from making a float32 copy of half-precision parameters before the
        # loop. Only what a step reads of them is converted, in the step.
        def hold(leaf: Any) -> Any:
            if isinstance(leaf, Panels):
                return leaf
            return jax.lax.optimization_barrier((leaf, tokens))[0]

        here = jax.tree.map(hold, params, is_leaf=lambda leaf: isinstance(leaf, Panels))
        return next_step(here, config, cache, tokens, execution)

    return step, cache
