"""Every program of the library is exported for CPUs, NVIDIA's and AMD's GPUs, and TPUs.

`jax.export` lowers a program for a platform that the machine does not have, and refuses what that
platform cannot do. Each program is written as bytes, read back, and on a CPU called.
"""

import dataclasses
import re
from functools import partial

import jax
import numpy as np
import pytest

from jax_transformer import generate
from jax_transformer.decoding import slots
from jax_transformer.kernels.execution import SearchExecution
from jax_transformer.text.batches import Batch
from jax_transformer.training.config import TrainingConfig
from jax_transformer.training.step import init_state, make_evaluation_step, make_run_step
from jax_transformer.translation.translate import translate
from tests.models import random_params, random_tokens, shallow_config, tiny_model
from tests.tiers import tiered

PLATFORMS = {"cpu": ("cpu",), "gpu": ("cuda", "rocm"), "tpu": ("tpu",)}
CONFIG = shallow_config("vaswani2017", d_model=16, num_heads=2, dropout=0.1)
SETTINGS = TrainingConfig(compute_dtype="bfloat16")
NEW_TOKENS = 4
LINES = ["one two", "three"]
CUDNN_KERNELS = [
    f"__cudnn$fmha{scores}Softmax{backward}"
    for scores in ("", "ScaleBias")
    for backward in ("", "Backward")
]


def batch(packed=False):
    src, tgt = random_tokens(CONFIG)
    length = min(src.shape[1], tgt.shape[1])
    src, tgt = src[:, :length], tgt[:, :length]
    segments = np.where(np.arange(length) < length // 2, 1, 2) * np.ones_like(src)
    return Batch(src, tgt, np.roll(tgt, -1, axis=1), *(segments, segments) if packed else ())


def training(packed=False, **fields):
    """Return a training step as a function of an execution and arrays, and the arrays.

    `fields` are those of the execution too.
    """
    settings = dataclasses.replace(SETTINGS, **fields)

    def program(execution, state, rows):
        own = dataclasses.replace(execution, **fields)
        return make_run_step(CONFIG, settings, own)(state, rows)

    return program, (init_state(CONFIG, settings), batch(packed))


def evaluation():
    def program(execution, params, rows):
        return make_evaluation_step(CONFIG, SETTINGS, execution)(params, rows)

    return program, (random_params(CONFIG), batch())


def search(**options):
    def program(execution, params, src, *key):
        drawn = {"key": key[0]} if key else {}
        limit = {"max_new_tokens": NEW_TOKENS}
        return generate(params, CONFIG, src, execution=execution, **limit, **options, **drawn)

    arrays = random_params(CONFIG), random_tokens(CONFIG)[0]
    return program, (*arrays, jax.random.key(0)) if "temperature" in options else arrays


def translation():
    """Return the search that `translate` starts for its lines."""
    found = []

    class Found(Exception):
        pass

    def keep(params, configs, src, *arguments, execution, **named):
        found.append((params, configs, src, arguments, named))
        raise Found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slots, "search", keep)
        with pytest.raises(Found):
            list(translate(tiny_model(LINES, 30), LINES, beam_size=2))
    ((params, configs, src, arguments, named),) = found

    def program(execution, params, src):
        return slots.search(params, configs, src, *arguments, execution=execution, **named)

    return program, (params, src)


PROGRAMS = {
    "train, buckets": training,
    "train, packed, remat": partial(training, packed=True, remat="layers"),
    "train, scan": partial(training, scan_layers=True),
    "evaluate": evaluation,
    "greedy": search,
    "beam": partial(search, beam_size=2),
    "sampling": partial(search, temperature=0.8, top_k=5),
    "translate": translation,
}


def flattened(name, execution):
    """Return a program as a function of a list of arrays that returns one, and its arrays.

    Lists need no names in the exported bytes, as the tuples of states and batches would.
    """
    program, arguments = PROGRAMS[name]()
    leaves, tree = jax.tree.flatten(arguments)

    @jax.jit
    def run(leaves):
        return jax.tree.leaves(program(execution, *jax.tree.unflatten(tree, leaves)))

    return run, leaves


def export(name, execution, platforms, **options):
    """Return an exported program, written and read back, and the arrays it is called with."""
    run, leaves = flattened(name, execution)
    exported = jax.export.export(run, platforms=platforms, **options)(leaves)
    return jax.export.deserialize(exported.serialize()), run, leaves


def bits(array):
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize("name", tiered(PROGRAMS, ["train, scan", "beam"]))
def test_a_program_is_exported_for_a_platform_that_is_not_here(name, platform):
    exported, _, leaves = export(name, SearchExecution.for_platform(platform), PLATFORMS[platform])
    assert exported.platforms == PLATFORMS[platform]
    assert len(exported.in_avals) == len(leaves)
    with pytest.raises(ValueError, match="platform"):
        exported.call(leaves)


@pytest.mark.parametrize("name", tiered(PROGRAMS, ["beam"]))
def test_what_was_exported_for_a_cpu_computes_the_same_there(name):
    exported, run, leaves = export(name, SearchExecution(), ("cpu",))
    found, expected = exported.call(leaves), run(leaves)
    assert len(found) == len(expected) > 0
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert np.array_equal(bits(ours), bits(theirs))


@pytest.mark.parametrize("name", ["train, buckets", "train, packed, remat", "evaluate"])
def test_with_cudnns_attention_a_program_is_exported_for_cuda(name, monkeypatch):
    version = "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version"
    monkeypatch.setattr(version, lambda: 91000)  # the installed one's, where there is one
    cudnn = SearchExecution.for_platform("gpu", attention="cudnn")
    unchecked = [jax.export.DisabledSafetyCheck.custom_call(kernel) for kernel in CUDNN_KERNELS]
    exported, *_ = export(name, cudnn, ("cuda",), disabled_checks=unchecked)
    kernels = re.findall(r"custom_call @__cudnn\$fmha(\w+)", exported.mlir_module())
    backward = sum(kernel.endswith("Backward") for kernel in kernels)
    attentions = CONFIG.num_encoder_layers + 2 * CONFIG.num_decoder_layers
    assert backward == (attentions if name.startswith("train") else 0)
    assert len(kernels) - backward == attentions * (2 if name.endswith("remat") else 1)
