"""The programs of an exported model: pure functions of named arrays, for sizes of any number.

Each program takes and returns arrays, dicts of arrays and tuples of them alone, so that a process
without this library can call it. Letters in shapes: B batch, S source length, T target length,
N hypotheses of a source, K returned hypotheses, D d_model, V target vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jax_transformer.config import TransformerConfig
from jax_transformer.decoding import GenerationConfig
from jax_transformer.decoding.cache import Cache, new_cache, next_step
from jax_transformer.decoding.rules import make_rules, within_factor
from jax_transformer.decoding.search import search
from jax_transformer.kernels.execution import SearchExecution
from jax_transformer.model.self_over_memory import needs_equal_lengths, pad_source
from jax_transformer.model.transformer import Params, Source, bind

PLATFORMS = {"cpu": "cpu", "cuda": "gpu", "tpu": "tpu"}  # of jax.export: of `Execution`
Named = Mapping[str, Array]
Program = Callable[..., Any]  # of an execution, a config, parameters and arrays


def named(tree: Any) -> dict[str, Array]:
    """Return the leaves of a tree by their paths, for example "decoder.norm.scale".

    Args:
        tree: Parameters or a cache, whose arrays have any shapes [...].
    """
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def as_tree(arrays: Named, like: Any) -> Any:
    """Return named arrays as a tree: what `named` was called with."""
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in named(like)])


def export_programs(
    params: Params, config: TransformerConfig, searches: Mapping[str, GenerationConfig]
) -> dict[str, jax.export.Exported]:
    """Return the programs of a model by name, each for batches and lengths of any size.

        encode(params, src [B, S]) -> memory [B, S, D]
        init_cache(params, src [B, S], memory [B, S, D], ancestors [B, N, T] of -1) -> cache
        decode_step(params, cache, tokens [B, N]) -> (logits [B, N, V], cache)
        search(params, src [B, S], prefix [B, T], limits [B])
            -> (tokens [B, K, T], scores [B, K], lengths [B, K])

    Parameters and caches are dicts of arrays, see `named`. Ids and lengths are int32. A model of
    sound has `src` [B, frames, bands] in float32, of a whole window.

    Args:
        params: The parameters, a nested dict of arrays.
        config: The shape of the model.
        searches: The options of each search, by its name; `max_new_tokens` is an argument.
    """
    frames, bands = str(2 * config.stack("encoder").max_length), config.source_features

    def of_sizes(names: Sequence[str]) -> tuple[Any, ...]:
        """Return sizes of these letters, in a scope of their own: a program knows no others."""
        if bands is not None:  # S is the window
            names = [frames if name == "s" else name for name in names]
        known = ["n*t >= n"] if "n" in names else []  # a cache has room for one position
        if config.has_position_table or config.positions == "rotary":  # whose angles are a table
            known += [f"{name} <= {config.max_length}" for name in "st" if name in names]
        return jax.export.symbolic_shape(", ".join(names), constraints=known)

    def export(program: Program, *arguments: Any, **fields: str | bool) -> jax.export.Exported:

        def run(arrays: Named, *others: Any) -> Any:
            tree = as_tree(arrays, params)
            on_cpu, on_gpu, on_tpu = (
                partial(program, SearchExecution.for_platform(name, **fields), config)
                for name in PLATFORMS.values()
            )
            return jax.lax.platform_dependent(tree, *others, cpu=on_cpu, cuda=on_gpu, tpu=on_tpu)

        return jax.export.export(jax.jit(run), platforms=[*PLATFORMS])(named(params), *arguments)

    def sources(batch: Any, length: Any) -> jax.ShapeDtypeStruct:
        if bands is None:
            return _ids(batch, length)
        return jax.ShapeDtypeStruct((batch, length, bands), jnp.float32)

    batch, source = of_sizes("bs")
    programs = {"encode": export(_encode, sources(batch, source))}
    # Sources are as long as targets where the decoder needs that.
    batch, count, target, source = of_sizes("bntt" if needs_equal_lengths(config) else "bnts")
    src = sources(batch, source)
    memory = jax.eval_shape(partial(_encode, SearchExecution(), config), params, src)
    ancestors = _ids(batch, count, target)
    cache = jax.eval_shape(
        partial(_init_cache, SearchExecution(wide_cache=False), config),
        params,
        src,
        memory,
        ancestors,
    )
    programs["init_cache"] = export(
        lambda *arguments: named(_init_cache(*arguments)),
        src,
        memory,
        ancestors,
        cache="split_heads",  # of the caches of all platforms
        wide_cache=False,
    )
    programs["decode_step"] = export(partial(_decode_step, cache), named(cache), _ids(batch, count))
    batch, source, target = of_sizes("bst")
    for name, generation in searches.items():
        program = partial(_search, generation)
        programs[name] = export(program, sources(batch, source), _ids(batch, target), _ids(batch))
    return programs


def _ids(*shape: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _encode(
    execution: SearchExecution, config: TransformerConfig, params: Params, src: Source
) -> Float[Array, "B S D"]:
    return bind(params, config, execution).encode(src)


def _init_cache(
    execution: SearchExecution,
    config: TransformerConfig,
    params: Params,
    src: Source,
    memory: Float[Array, "B S D"],
    ancestors: Int32[Array, "B N T"],
) -> Cache:
    _, count, length = ancestors.shape
    _, src_mask = pad_source(config, src, None, length)
    cache = new_cache(params, config, memory, length, src_mask, count, execution)
    return cache._replace(ancestors=ancestors)


def _decode_step(
    like: Cache,
    execution: SearchExecution,
    config: TransformerConfig,
    params: Params,
    cache: Named,
    tokens: Int32[Array, "B N"],
) -> tuple[Float[Array, "B N V"], Named]:
    logits, cache = next_step(params, config, as_tree(cache, like), tokens, execution)
    return logits, named(cache)


def _search(
    options: GenerationConfig,
    execution: SearchExecution,
    config: TransformerConfig,
    params: Params,
    src: Source,
    prefix: Int32[Array, "B T"],
    limits: Int32[Array, " B"],
) -> tuple[Int32[Array, "B K T"], Float[Array, "B K"], Int32[Array, "B K"]]:
    length = prefix.shape[1]
    limits = within_factor(jnp.clip(limits, 1, length), options, config, src)
    rules = make_rules(options, config, src, prefix).replace(limits=limits)
    hypotheses, _ = search(
        (params,),
        (config,),
        src,
        rules,
        target_length=length,
        beam_size=options.beam_size,
        execution=execution,
    )
    return tuple(hypotheses)
