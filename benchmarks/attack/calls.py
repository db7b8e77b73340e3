"""Tries that call the library with hostile arrays and options."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_transformer
from benchmarks.attack import stock
from benchmarks.attack.mutations import choose
from benchmarks.attack.outcomes import Attempt, Outcome, WrongResult
from jax_transformer import TransformerConfig
from jax_transformer.convert.layouts import LAYOUTS
from jax_transformer.convert.transfer import to_params, to_tensors

BATCH, SOURCE, TARGET = 2, 5, 4
PRESETS = ("vaswani2017", "bart", "t5")


class Call(NamedTuple):
    """A function of the library with valid arguments.

    Attributes:
        run: The function, with the arguments by name.
        arguments: The valid ones; those that are traced under `jit` are arrays.
        static: Options that are no arrays, with hostile values.
        shape: What the result has, given the arguments.
    """

    run: Callable[..., Any]
    arguments: dict[str, Any]
    static: dict[str, tuple[Any, ...]]
    shape: Callable[[dict[str, Any]], tuple[int, ...]]


@functools.cache
def _config(preset: str) -> TransformerConfig:
    return stock.config(preset)


@functools.cache
def _params(preset: str) -> dict[str, Any]:
    return stock.params(_config(preset))


def _ids(rows: int, length: int) -> np.ndarray:
    return np.random.default_rng(0).integers(4, 50, (rows, length)).astype(np.int32)


OPTIONS: dict[str, tuple[Any, ...]] = {
    "max_new_tokens": (0, -1, 10**12, 2**63, 1.5, 63, 65, np.int64(3), True, float("nan")),
    "beam_size": (0, -1, 2, 10**9, 1.5, 61, 2**40, True),
    "num_hypotheses": (0, -1, 2, 10**9, 0.5),
    "length_penalty": (float("nan"), float("inf"), -1e6, 1e308, -1.0, 0.6, True),
    "length_normalization": ("", "x", None, "power"),
    "early_stopping": ("x", None, True, False, 1, 2),
    "start_token": (
        *(-1, 10**9, 2**63, 1.5, np.zeros(2, np.int32), np.zeros(3, np.int32), np.zeros(2)),
    ),
    "eos_ids": ((), (-1,), (10**9,), (1.5,), (2, 2), tuple(range(60)), (2**40,)),
    "length_limits": (
        *(np.zeros(2, np.int32), np.full(2, 100), np.ones(3, np.int32), np.ones((2, 1), np.int32)),
        *(np.ones(2), np.ones(2, np.int32), np.full(2, 2**40), np.full(2, -1), np.ones(2, bool)),
    ),
    "prefix": (
        *(np.zeros((2, 2)), np.full((2, 2), -1), np.full((2, 2), 2**40), np.zeros((3, 2), int)),
        *(np.zeros(2, int), np.zeros((2, 0), int), np.full((2, 2), 5), np.zeros((2, 100), int)),
        np.ones((2, 2), bool),
    ),
    "min_new_tokens": (-1, 3, 100, 1.5, 0),
    "forced_first_token": (-1, 10**9, 1.5, 5),
    "forced_last_token": (-1, 10**9, 2, 1.5),
    "banned_tokens": ((-1,), (10**9,), tuple(range(60)), (1.5,), (5, 5)),
    "banned_sequences": (((),), ((-1, 2),), ((5,) * 100,), ((10**9,),), ((5, 6),), ((1.5,),)),
    "begin_suppressed_tokens": ((-1,), (10**9,), tuple(range(60))),
    "repetition_penalty": (0, -1.0, float("nan"), float("inf"), 1e308, 1e-40, 1.3),
    "no_repeat_ngram_size": (0, -1, 1, 10**9, 1.5, 2**40),
    "encoder_no_repeat_ngram_size": (0, -1, 2, 10**9, 2**40),
    "key": (jax.random.key, 0, np.zeros(2, np.uint32)),
    "temperature": (0, -1.0, float("nan"), float("inf"), 1e-40, 1e308, 0.7),
    "top_k": (0, -1, 10**9, 1.5, 3, 2**40),
    "top_p": (0, -0.5, 1.5, float("nan"), 0.9, 1e-40),
}


FRACTIONS = ("length_penalty", "repetition_penalty", "temperature", "top_p")
TOKENS = (
    *("start_token", "eos_ids", "prefix", "forced_first_token", "forced_last_token"),
    *("banned_tokens", "banned_sequences", "begin_suppressed_tokens"),
)
WHOLE = set(OPTIONS) - {*FRACTIONS, "length_normalization", "early_stopping", "key"}


def _calls(preset: str) -> dict[str, Call]:
    config, params = _config(preset), _params(preset)
    src, tgt = _ids(BATCH, SOURCE), _ids(BATCH, TARGET)
    memory = np.random.default_rng(1).normal(size=(BATCH, SOURCE, config.d_model))
    memory = memory.astype(np.float32)
    vocabulary, width = config.tgt_vocab_size, config.d_model
    masks = {"src_mask": np.ones((BATCH, 1, 1, SOURCE), bool)}
    tgt_mask = {"tgt_mask": np.tril(np.ones((TARGET, TARGET), bool))[None, None]}
    positions = {"src_positions": np.tile(np.arange(SOURCE, dtype=np.int32), (BATCH, 1))}
    library = jax_transformer

    def with_params(function: Callable) -> Callable:
        return functools.partial(function, params, config)

    def generated(**arguments: Any) -> Any:
        options = {"max_new_tokens": 3} | arguments
        if options.get("key") is jax.random.key:
            options["key"] = jax.random.key(0)
        return library.generate(params, config, **options).scores

    def stepped(tokens: Any, memory: Any, src_mask: Any = None, **options: Any) -> Any:
        options = {"max_new_tokens": 3, "beam_size": 1} | options
        cache = library.init_cache(params, config, memory, src_mask=src_mask, **options)
        return library.decode_step(params, config, cache, tokens)[0]

    def logits(given: dict[str, Any]) -> tuple[int, ...]:
        return (*given["tgt"].shape, vocabulary)

    return {
        "encode": Call(
            with_params(library.encode),
            {"src": src, **masks, **positions},
            {},
            lambda given: (*given["src"].shape, width),
        ),
        "decode": Call(
            with_params(library.decode),
            {"tgt": tgt, "memory": memory, **tgt_mask, **masks},
            {},
            logits,
        ),
        "apply": Call(
            with_params(library.apply), {"src": src, "tgt": tgt, **masks, **tgt_mask}, {}, logits
        ),
        "score": Call(
            with_params(library.score),
            {"src": src, "tgt": tgt, **masks},
            {},
            lambda given: given["src"].shape[:1],
        ),
        "generate": Call(generated, {"src": src, **masks}, OPTIONS, lambda given: ()),
        "decode_step": Call(
            stepped,
            {"tokens": _ids(BATCH, 1)[:, 0], "memory": memory, **masks},
            {name: OPTIONS[name] for name in ("max_new_tokens", "beam_size")},
            lambda given: (),
        ),
    }


def hostile(draw: np.random.Generator, valid: np.ndarray) -> tuple[Any, str]:
    """Return an array in the place of a valid one, and what it is."""
    changes: dict[str, Callable[[], Any]] = {
        "float32": lambda: valid.astype(np.float32),
        "float + 0.9": lambda: valid + 0.9,
        "0 and -inf": lambda: np.where(valid.astype(bool), 0.0, -np.inf).astype(np.float32),
        "NaN": lambda: np.full(valid.shape, np.nan, np.float32),
        "int8": lambda: valid.astype(np.int8),
        "uint8": lambda: valid.astype(np.uint8),
        "int64": lambda: valid.astype(np.int64),
        "bool": lambda: valid.astype(bool),
        "inverted": lambda: ~valid if valid.dtype == bool else -valid,
        "negative": lambda: np.full(valid.shape, -1),
        "huge": lambda: np.full(valid.shape, 2**31 - 1),
        "int64 beyond int32": lambda: valid.astype(np.int64) + 2**32,
        "uint64": lambda: np.full(valid.shape, 2**64 - 1, np.uint64),
        "one axis less": lambda: valid[0],
        "one axis more": lambda: valid[None],
        "a number": lambda: valid.reshape(-1)[0],
        "no rows": lambda: valid[:0],
        "no columns": lambda: valid[..., :0],
        "one row": lambda: valid[:1],
        "one row more": lambda: np.concatenate([valid, valid[:1]]),
        "one column less": lambda: valid[..., :-1],
        "one column more": lambda: np.concatenate([valid, valid[..., :1]], -1),
        "100 columns": lambda: np.repeat(valid, 100, -1),
        "turned": lambda: valid.T,
        "complex": lambda: valid.astype(np.complex64),
        "objects": lambda: valid.astype(object),
        "texts": lambda: valid.astype(str),
        "big-endian": lambda: valid.astype(valid.dtype.newbyteorder(">")),
        "all blocked": lambda: np.zeros_like(valid),
        "of jax": lambda: jnp.asarray(valid),
    }
    name = choose(draw, list(changes))
    try:
        return changes[name](), name
    except (IndexError, ValueError):  # the valid one has no such axis
        return valid[:0] if valid.ndim else np.zeros(0), "no rows"


def is_valid(name: str, value: Any, given: dict[str, Any], config: TransformerConfig) -> bool:
    """Return whether an array may be accepted in the place of an argument."""
    rows = next(
        given[other].shape[0]
        for other in ("src", "tgt", "tokens")
        if other in given and getattr(given[other], "ndim", 0)
    )
    integer, floating = (np.issubdtype(value.dtype, kind) for kind in (np.integer, np.floating))
    if name.endswith("mask"):
        return value.dtype == bool and value.ndim == 4
    if name == "memory":
        return bool(floating) and value.ndim == 3 and value.shape[::2] == (rows, config.d_model)
    if name == "tokens":
        return bool(integer) and value.ndim in (1, 2) and value.shape[0] == len(given["memory"])
    if name.endswith("positions"):
        same = value.shape == given[name.replace("positions", "")[:3]].shape
        return bool(integer) and same
    if not integer or value.ndim != 2:
        return False
    if any(len(given[other]) != rows for other in ("src", "tgt") if other in given):
        return False
    return value.shape[1] <= config.max_length or not config.has_position_table


def in_range(name: str, value: Any, config: TransformerConfig, jitted: bool) -> bool:
    """Return whether ids or positions are those of the model; others are not looked at."""
    array = np.asarray(value)
    if jitted:  # jax narrows the type before the library sees the array
        array = array.astype(jax.dtypes.canonicalize_dtype(array.dtype))
    if array.size == 0 or not np.issubdtype(array.dtype, np.integer):
        return True
    limits = {"src": config.src_vocab_size, "tgt": config.tgt_vocab_size}
    limits |= {"tokens": config.tgt_vocab_size}
    if config.has_position_table:
        limits |= {"src_positions": config.max_length}
    limit = limits.get(name)
    return limit is None or (int(array.min()) >= 0 and int(array.max()) < limit)


def option_is_valid(name: str, value: Any, config: TransformerConfig) -> bool:
    """Return whether an option of whole numbers has some, and one of token ids those of the model.

    Other reasons to refuse an option are the library's matter.
    """
    if name not in WHOLE:
        return True
    parts = np.concatenate([np.ravel(part) for part in _leaves(value)] or [np.zeros(0, int)])
    if parts.dtype.kind not in "iu" and not (parts.dtype.kind == "b" and np.isscalar(value)):
        return parts.size == 0
    if name not in TOKENS or not parts.size:
        return True
    return int(parts.min()) >= 0 and int(parts.max()) < config.tgt_vocab_size


def _leaves(value: Any) -> list[Any]:
    return [leaf for part in value for leaf in _leaves(part)] if type(value) is tuple else [value]


def prepare(draw: np.random.Generator, folder: Path, stock_folder: Path, quick: bool) -> Attempt:
    """Return a try on a call; arguments as for the files."""
    del folder, stock_folder
    if draw.random() < 0.2:
        return _converted(draw)
    preset = "vaswani2017" if quick else choose(draw, PRESETS)
    calls = _calls(preset)
    name = choose(draw, list(calls))
    call = calls[name]
    given, changed, done = dict(call.arguments), [], []
    if call.static and draw.random() < 0.6:
        for _ in range(int(choose(draw, (1, 1, 2)))):
            option = choose(draw, list(call.static))
            given[option] = choose(draw, call.static[option])
            done.append(f"{option}={given[option]!r:.30}")
    else:
        for _ in range(int(choose(draw, (1, 1, 2)))):
            argument = choose(draw, list(call.arguments))
            given[argument], what = hostile(draw, call.arguments[argument])
            changed.append(argument)
            done.append(f"{argument}: {what}")
    jitted = bool(draw.random() < 0.4) and all(
        isinstance(given[argument], np.ndarray | jax.Array)
        and given[argument].dtype.kind in "biufc"
        and given[argument].dtype.isnative  # jit itself takes no other arrays
        for argument in changed
    )
    config = _config(preset)

    def run() -> Outcome:
        arrays = {key: given[key] for key in call.arguments}
        options = {key: value for key, value in given.items() if key not in arrays}
        if jitted:
            found = jax.jit(functools.partial(call.run, **options))(**arrays)
        else:
            found = call.run(**given)
        found = np.asarray(found)
        shown = f"a result of shape {found.shape}"
        for argument in changed:
            value = given[argument]
            if not is_valid(argument, value, given, config):
                raise WrongResult(f"{name}, {argument} is accepted ({', '.join(done)}): {shown}")
            if jitted and not in_range(argument, value, config, jitted):
                hidden = any(name.endswith("mask") for name in changed)  # what is masked is not NaN
                if found.size and np.isfinite(found).all() and not hidden:
                    raise WrongResult(f"{name}, jit: {argument} out of range is finite")
                return Outcome.OTHER
            if not jitted and not in_range(argument, value, config, jitted):
                raise WrongResult(f"{name}, {argument} out of range is accepted")
        for option, value in options.items():
            if not option_is_valid(option, value, config):
                raise WrongResult(f"{name}, {option} is accepted ({', '.join(done)})")
        if (wanted := call.shape(given)) and found.shape != wanted:
            raise WrongResult(f"{name}: {shown}, not {wanted}")
        if not changed and np.isnan(found).any():
            raise WrongResult(f"{name}: NaN with {', '.join(done)}")
        return Outcome.OTHER

    return Attempt(f"{name} of {preset}{', jit' * jitted}; {', '.join(done)}", run)


def _converted(draw: np.random.Generator) -> Attempt:
    """Return a try on a state_dict with one hostile tensor."""
    config, expected = _config("vaswani2017"), _params("vaswani2017")
    tensors = dict(to_tensors(expected, config, LAYOUTS["reference"])[0])
    name = choose(draw, list(tensors))
    original = tensors[name]
    what = choose(
        draw, ("changed", "changed", "changed", "removed", "renamed", "added", "no array")
    )
    if what == "changed":
        tensors[name], what = hostile(draw, original)
    elif what == "removed":
        del tensors[name]
    elif what == "renamed":
        tensors[choose(draw, ("", "x", f"{name}.", f" {name}", "é" * 1000))] = tensors.pop(name)
    elif what == "added":
        tensors[choose(draw, ("", "x", f"module.{name}", f"{name}\0"))] = np.zeros(3)
    else:
        tensors[name] = choose(draw, (None, 3, "x", [], {}, object(), jnp.zeros(()), np.float32(1)))

    def run() -> Outcome:
        params, _ = to_params(tensors, config, LAYOUTS["reference"])
        value = tensors.get(name)
        fits = getattr(value, "shape", None) == original.shape and len(tensors) == len(
            expected_names
        )
        if not fits or value.dtype.kind != "f" or not np.isfinite(value).all():
            raise WrongResult(f"to_params: {what} is accepted")
        if jax.tree.map(np.shape, params) != jax.tree.map(np.shape, expected):
            raise WrongResult(f"to_params: other shapes after {what}")
        return Outcome.OTHER

    expected_names = set(to_tensors(expected, config, LAYOUTS["reference"])[0])
    return Attempt(f"to_params; {name}: {what}", run)
