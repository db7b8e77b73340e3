"""`generate`: the public function for greedy search, beam search and sampling."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, Integer, PRNGKeyArray

from jax_transformer.config import TransformerConfig
from jax_transformer.decoding import options
from jax_transformer.decoding.beam import beam_search
from jax_transformer.decoding.cache import Cache, decode_step, init_cache
from jax_transformer.decoding.greedy import greedy_search
from jax_transformer.decoding.panels import cut_panels, use_panels, worth_a_copy
from jax_transformer.decoding.rule_options import StartToken, make_rules
from jax_transformer.decoding.rules import Rules
from jax_transformer.decoding.sampling import Sampling
from jax_transformer.decoding.search import EarlyStopping, Hypotheses, LengthPenalty
from jax_transformer.decoding.source import Scalar, as_ids, as_tuple, check_generates
from jax_transformer.errors import InputError
from jax_transformer.kernels.execution import DEFAULT_EXECUTION, Execution
from jax_transformer.model import masks
from jax_transformer.model.checks import check_id_batch, check_mask, check_not_empty, check_params
from jax_transformer.model.self_over_memory import pad_source
from jax_transformer.model.transformer import Params, SourceMask, encode


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
    params: Params,
    config: TransformerConfig,
    src: Integer[Array | np.ndarray, "B S"],
    *,
    max_new_tokens: int,
    src_mask: SourceMask | None = None,
    beam_size: int = 1,
    num_hypotheses: int = 1,
    length_penalty: Scalar = 0.0,
    length_normalization: str = "gnmt",
    early_stopping: EarlyStopping = "never",
    start_token: StartToken | None = None,
    eos_ids: tuple[int, ...] | None = None,
    allow_padding: bool = False,
    prefix: Integer[Array | np.ndarray, "_ P"] | None = None,
    length_limits: Integer[Array | np.ndarray, " _"] | None = None,
    min_new_tokens: int | None = None,
    forced_first_token: int | None = None,
    forced_last_token: int | None = None,
    banned_tokens: tuple[int, ...] = (),
    banned_sequences: tuple[tuple[int, ...], ...] = (),
    begin_suppressed_tokens: tuple[int, ...] = (),
    repetition_penalty: Scalar | None = None,
    no_repeat_ngram_size: int | None = None,
    encoder_no_repeat_ngram_size: int | None = None,
    renormalize: bool = False,
    key: PRNGKeyArray | None = None,
    temperature: Scalar | None = None,
    top_k: int | None = None,
    top_p: Scalar | None = None,
    execution: Execution = DEFAULT_EXECUTION,
) -> Hypotheses:
    """Return targets for a batch of sources: by greedy search, beam search or sampling.

    The default is greedy search: each next token is the most likely token. A `beam_size` above 1
    is beam search; a `key` is sampling. The lowest id wins a tie. With
    `length_normalization="power"`, the hypotheses and scores of a search are those of
    transformers 5.23 for the options of the same meaning.

    The search is one compiled loop that ends when every row has ended. Each set of shapes, `config`
    and options is compiled once; the values of `length_penalty`, `start_token`, `eos_ids`,
    `allow_padding`, `length_limits`, `min_new_tokens`, the forced, banned and suppressed tokens,
    `repetition_penalty`, `temperature` and `top_p` are data and may change. A row's targets do not
    depend on the rest of the batch. Works under `jax.jit`, where `config` and all options that are
    whole numbers, strings, booleans or tuples are static.

    If several rules apply to a token, the order is that of transformers: repetition penalty,
    n-grams, n-grams of the source, banned sequences and tokens, `min_new_tokens`, forced tokens,
    `begin_suppressed_tokens`, `renormalize`. A later rule wins.

    Args:
        params: Parameters, as from `init_params`.
        config: Their shape.
        src: Source ids [B, S].
        max_new_tokens: Largest number of tokens that follow the prefix, EOS included. A target may
            reach it without EOS. The result has L = P + `max_new_tokens` positions.
        src_mask: True = attend, broadcastable to [B, heads, 1, S]; None hides `config.pad_id`.
        beam_size: Number N of hypotheses that beam search keeps open.
        num_hypotheses: Number K of targets returned for each source, at most `beam_size`.
        length_penalty: Exponent alpha of the divisor of the summed log-probabilities; Vaswani et
            al. 2017 use 0.6 with `beam_size=4`.
        length_normalization: The divisor for n tokens after the prefix, EOS included: "gnmt" is
            ((5 + n) / 6)**alpha (Wu et al. 2016), "power" is n**alpha.
        early_stopping: When beam search stops for a source. True: as soon as `beam_size`
            hypotheses are finished. False: as soon as, in addition, the best open hypothesis at
            its present length has no better score than the worst of them. "never": as soon as no
            open hypothesis can still change the result.
        start_token: First decoder input of all sources, or of each source [B]; None is
            `config.bos_id`.
        eos_ids: Ids that end a target; None is `config.eos_id` alone.
        allow_padding: Whether `config.pad_id` may be generated as an ordinary token.
        prefix: First tokens of each target [B, P], without the start token. The prefix of a row
            ends at its first padding; the search continues there. A prefix adds nothing to the
            score or to the length that the penalty counts, and EOS in it ends nothing.
        length_limits: Largest number of tokens that follow the prefix, for each row [B], from 1 to
            `max_new_tokens`; a row ends there.
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
        key: Random key that switches sampling on. The draws of a row depend on the key and the
            row's index.
        temperature: Divisor of the logits before tokens are drawn.
        top_k: Draw only from the `top_k` most likely tokens.
        top_p: Draw only from the fewest most likely tokens whose probabilities reach this sum.
        execution: How the model is executed; the default suits a CPU.

    Returns:
        K hypotheses for each source, best first.

    Raises:
        InputError: The model has no token embeddings or output projection; a length does not fit
            its position table; an id is outside the vocabulary; options contradict each other or
            are out of range.
        NonFiniteError: Logits are NaN or infinite. Names row and step; under a transformation,
            where nothing can be raised, that row's scores are NaN.
    """
    check_generates(config)
    check_params(params, config)
    src = as_ids("src", src, config.src_vocab_size)
    check_not_empty("src", src)
    check_mask("src_mask", src_mask, (src.shape[0], config.num_heads, 1, src.shape[1]))
    eos_ids = (
        (config.eos_id,) if eos_ids is None else as_tuple("eos_ids", eos_ids, config.tgt_vocab_size)
    )
    options.check_sizes(config, beam_size, num_hypotheses, len(eos_ids))
    options.check_early_stopping(early_stopping)
    prefix_length = 0
    if prefix is not None:
        check_id_batch("prefix", prefix)
        prefix_length = prefix.shape[1]
    options.check_lengths(config, prefix_length, max_new_tokens)
    rules = make_rules(
        config,
        src,
        max_new_tokens,
        start_token=start_token,
        eos_ids=eos_ids,
        allow_padding=allow_padding,
        prefix=prefix,
        length_limits=length_limits,
        min_new_tokens=min_new_tokens,
        forced_first_token=forced_first_token,
        forced_last_token=forced_last_token,
        banned_tokens=banned_tokens,
        banned_sequences=banned_sequences,
        begin_suppressed_tokens=begin_suppressed_tokens,
        repetition_penalty=repetition_penalty,
        no_repeat_ngram_size=no_repeat_ngram_size,
        encoder_no_repeat_ngram_size=encoder_no_repeat_ngram_size,
        renormalize=renormalize,
    )
    hypotheses, failed_at = _search(
        params,
        config,
        src,
        src_mask,
        rules,
        options.sampling(config, beam_size, key, temperature, top_k, top_p),
        options.length_penalty(length_penalty, length_normalization),
        target_length=prefix_length + max_new_tokens,
        beam_size=beam_size,
        num_hypotheses=num_hypotheses,
        # Greedy search has no use for it, and is compiled once for all its values.
        early_stopping="never" if beam_size == 1 else early_stopping,
        execution=execution,
    )
    if not isinstance(failed_at, jax.core.Tracer) and (np.asarray(failed_at) >= 0).any():
        row = int(np.argmax(np.asarray(failed_at) >= 0))
        raise NonFiniteError(f"src[{row}]", row, int(failed_at[row]))
    return hypotheses


@partial(
    jax.jit,
    static_argnames=(
        "config",
        "target_length",
        "beam_size",
        "num_hypotheses",
        "early_stopping",
        "execution",
    ),
)
def _search(
    params: Params,
    config: TransformerConfig,
    src: Int32[Array, "B S"],
    src_mask: SourceMask | None,
    rules: Rules,
    sampling: Sampling | None,
    length_penalty: LengthPenalty,
    *,
    target_length: int,
    beam_size: int,
    num_hypotheses: int,
    early_stopping: EarlyStopping,
    execution: Execution,
) -> tuple[Hypotheses, Int32[Array, " B"]]:
    src_mask = masks.source_mask(src, config) if src_mask is None else src_mask
    src_mask = jnp.asarray(masks.dense(src_mask, 1, src.shape[1]))
    src, src_mask = pad_source(config, src, src_mask, target_length)
    memory = encode(params, config, src, src_mask, execution=execution)
    if execution.copied_kernels:
        params, config = _untie(params, config)
    if execution.wide_norms:
        params = _widen_norms(params)
    cache = init_cache(
        params,
        config,
        memory,
        target_length,
        src_mask,
        beam_size=beam_size,
        execution=execution,
    )
    panels = None
    if execution.copied_kernels:
        panels = cut_panels(params, config, src.shape[0] * beam_size)

    def advance(cache: Cache, tokens: Int32[Array, "B N"]) -> tuple[Float[Array, "B N V"], Cache]:
        # The barrier keeps XLA from making a float32 copy of half-precision parameters before the
        # loop. Only what a step reads of them is converted, in the step.
        here, tokens = jax.lax.optimization_barrier((params, tokens))
        with use_panels(panels):
            return decode_step(here, config, cache, tokens, execution=execution)

    if beam_size == 1:
        return greedy_search(advance, cache, config, rules, sampling, length_penalty)
    return beam_search(
        advance,
        cache,
        config,
        rules,
        length_penalty,
        num_hypotheses,
        early_stopping,
        execution.top_k,
    )


def _untie(params: Params, config: TransformerConfig) -> tuple[Params, TransformerConfig]:
    """Return the same model with a separate output kernel, transposed once before the loop.

    A table that is too large for a copy stays tied.
    """
    if config.output_projection != "tied":
        return params, config
    shared = config.token_embeddings == "shared"
    table = params["token_embedding" if shared else "target_embedding"]["embedding"]
    if not worth_a_copy(table):
        return params, config
    kernel = jax.lax.optimization_barrier(table.T)  # else XLA reads the table column by column
    projection = params.get("output_projection", {}) | {"kernel": kernel}
    config = dataclasses.replace(config, output_projection="linear")
    return params | {"output_projection": projection}, config


def _widen_norms(params: Params) -> Params:
    """Return the parameters with those of norms in at least float32, in which norms compute."""

    def widen(path: tuple[jax.tree_util.DictKey, ...], leaf: Float[Array, "..."]) -> Array:
        of_a_norm = len(path) > 1 and path[-2].key.endswith("norm")
        return leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)) if of_a_norm else leaf

    # The barrier keeps XLA from moving the conversions back into the loop.
    return jax.lax.optimization_barrier(jax.tree_util.tree_map_with_path(widen, params))
