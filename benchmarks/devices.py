"""Training and generation on a GPU or a TPU, timed or only compiled: python -m benchmarks.devices.

`run --device gpu` times the training step of base and big in bfloat16 on one device, beside
nn.Transformer where PyTorch finds the GPU, and generation: tokens a second, and the share of the
device's peak (MFU). `compile --topology v5e:2x4` compiles for devices that are not there and prints
XLA's estimates: memory beside the computed budget, cycles by kind of work, kernels, exchanges.
Needs the extra "cuda" or "tpu", or to compile "cuda" or "tpu-compile".
"""

import itertools
import os
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import SingleDeviceSharding

from benchmarks.nn_transformer import (
    Size,
    Steps,
    draw_batch,
    model_config,
    our_steps,
    prepared,
    torch_steps,
)
from benchmarks.systems import processor, spread, start, stop, time_in_turn
from jax_transformer import GenerationConfig, TransformerConfig, generate, init_params
from jax_transformer.decoding import slots
from jax_transformer.decoding.rules import make_rules
from jax_transformer.kernels.attention_backend import execution_on
from jax_transformer.kernels.execution import SearchExecution
from jax_transformer.runtime import sharding
from jax_transformer.runtime.topologies import (
    OutOfMemory,
    compile_for_topology,
    data_sheet,
    is_gpu,
    topology_devices,
)
from jax_transformer.training.budget import (
    SIZES,
    Workload,
    budget,
    compile_step,
    step_flops,
)
from jax_transformer.training.config import TrainingConfig
from tests.compiled import GPU_CLOCK, report

VOCABULARY, ROWS, LENGTH = 32_000, 64, 128  # rows on each device
VOCABULARIES = "src_vocab_size", "tgt_vocab_size"
SETTINGS = TrainingConfig(
    schedule="constant", learning_rate=1e-4, warmup_steps=1, compute_dtype="bfloat16"
)
STEPS = 10  # of a timed block
TINY = {"d_model": 32, "num_heads": 2, "d_ff": 64, "num_encoder_layers": 1, "num_decoder_layers": 1}
T5_BASE = {"d_model": 768, "num_heads": 12, "d_ff": 3072}  # Raffel et al. 2020, section 3.1.1
SLOTS = {  # a model of Helsinki-NLP/opus-mt, and facebook/nllb-200-distilled-600M
    "opus-mt": {"preset": "marian", "sizes": dict.fromkeys(VOCABULARIES, 58_101)},
    "nllb-600m": {
        "preset": "m2m100",
        "sizes": {"d_model": 1024, "num_heads": 16, "d_ff": 4096, "num_encoder_layers": 12}
        | {"num_decoder_layers": 12, **dict.fromkeys(VOCABULARIES, 256_206)},
    },
}
BACKENDS = {"gpu": "cuda", "tpu": "tpu", "cpu": "cpu"}  # as jax_platforms names them
System = Callable[[Size, float], float]  # of a size and a dropout rate or a number of beams


class Task(NamedTuple):
    """A training step to compile."""

    model: str
    layers: int
    mesh: str
    dropout: float = 0.1
    scan_layers: bool = False
    length: int = LENGTH  # tokens of a row of sources; a device has `ROWS * LENGTH` tokens
    target_length: int | None = None  # of a row of targets; None: as long
    batching: str = "buckets"


def shape(model: str, **fields: Any) -> TransformerConfig:
    """Return the config of base, big, tiny, t5-base, or of the preset "modern"."""
    preset = {"modern": "modern", "t5-base": "t5"}.get(model, "vaswani2017")
    sizes = {"modern": {}, "tiny": TINY, "t5-base": T5_BASE}
    sizes |= {name: size for name, (size, _) in SIZES.items()}
    vocabulary = dict.fromkeys(VOCABULARIES, VOCABULARY)
    return TransformerConfig.preset(preset, **sizes[model] | vocabulary | fields)


def tasks(devices: int, quick: bool) -> list[Task]:
    """Return the steps for this number of devices; `quick` leaves out deep models."""
    data = f"data={devices}"
    shallow = [Task("base", 1, data), Task("base", 1, data, length=2048), Task("modern", 1, data)]
    if devices % 4 == 0:
        meshes = (f"data={devices // 2},fsdp=2", f"data={devices // 4},fsdp=2,tensor=2")
        shallow += [Task("base", 1, mesh) for mesh in meshes]
    deep = [Task("base", 6, data), Task("base", 6, data, dropout=0.0), Task("modern", 6, data)]
    # The rows of T5's pre-training: 512 tokens of the corrupted text, 114 of its spans.
    t5 = Task("t5-base", 12, data, 0.1, True, 512, 114, "packed")
    return shallow if quick else [*deep, *shallow, Task("big", 6, data, scan_layers=True), t5]


def compile_task(task: Task, topology: str, clock: float) -> None:
    """Compile a step; print what XLA says of it beside the computed budget."""
    layers = dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), task.layers)
    config, devices = shape(task.model, dropout=task.dropout, **layers), topology_devices(topology)
    shards = len(devices) // sharding.parse_sizes(task.mesh, len(devices))[2]
    rows = max(ROWS * LENGTH // task.length, 1) * shards
    settings = TrainingConfig(
        compute_dtype="bfloat16", scan_layers=task.scan_layers, batching=task.batching
    )
    workload = Workload(rows, task.length, task.mesh, settings)
    computed = budget(config, workload).total("none")
    started = time.process_time()
    try:
        step = compile_step(config, workload, topology, task.target_length)
    except OutOfMemory as error:
        needed, available = error.needed / 1e9, error.available / 1e9
        print(f"{task}: does not fit, XLA needs at least {needed:.2f} GB of {available:.2f} GB")
        return
    found = report(step)
    flops = step_flops(config, rows, task.length, task.target_length) / len(devices)
    share = found.utilisation(flops, data_sheet(topology).flops / clock)
    print(
        f"\n{task}: peak {found.peak / 1e9:.2f} GB (temporary {found.temporary / 1e9:.2f}), "
        f"computed {computed / found.peak:.2f} of it; {found.total_cycles:,} cycles "
        f"({1e3 * found.total_cycles / clock:.1f} ms), estimated utilisation {share:.1%}; "
        f"{found.kernels} operations; without an estimate: {found.unestimated or 'nothing'}; "
        f"compiled in {time.process_time() - started:.0f} s\n{shares(found.cycles)}"
    )
    print(*(f"  {one}" for one in found.collectives), sep="\n")


def compile_search(model: str, beam_size: int, topology: str) -> None:
    """Compile a search of a model with 2 + 2 layers for one device: 32 rows, 64 + 64 tokens."""
    config = shape(model, num_encoder_layers=2, num_decoder_layers=2, dropout=0.0)
    device = topology_devices(topology)[0]
    execution = execution_on(device, "bfloat16", config, kind=SearchExecution)

    def search(params: Any, src: jax.Array) -> Any:
        options = {"beam_size": beam_size, "execution": execution}
        return generate(params, config, src, max_new_tokens=64, **options)

    place = partial(jax.ShapeDtypeStruct, sharding=SingleDeviceSharding(device))
    params = jax.eval_shape(lambda: init_params(jax.random.key(0), config))
    params = jax.tree.map(lambda leaf: place(leaf.shape, jnp.bfloat16), params)
    lowered = jax.jit(search).lower(params, place((32, 64), jnp.int32))
    found = report(compile_for_topology(lowered, topology))
    (loop,) = found.loops
    print(
        f"\n{model}, search, beam {beam_size}: {sum(loop.cycles.values()):,} cycles a step, "
        f"{loop.kernels} operations; peak {found.peak / 1e6:,.0f} MB\n{shares(loop.cycles)}"
    )


def compile_slots(model: str, num_slots: int, topology: str) -> None:
    """Compile the loop of a search in slots, greedy, of sources of at most 32 tokens.

    A step extends the target in each slot by one token, so its time bounds the tokens a second.
    """
    fields, source_length, target_length = SLOTS[model], 32, 42
    config = TransformerConfig.preset(fields["preset"], **fields["sizes"])
    device = topology_devices(topology)[0]
    execution = execution_on(device, "bfloat16", config, kind=SearchExecution)
    place = partial(jax.ShapeDtypeStruct, sharding=SingleDeviceSharding(device))

    def placed(tree: Any, dtype: Any = None) -> Any:
        return jax.tree.map(lambda leaf: place(np.shape(leaf), dtype or leaf.dtype), tree)

    params = (placed(jax.eval_shape(lambda: init_params(jax.random.key(0), config)), jnp.bfloat16),)
    src = np.zeros((num_slots // 8, source_length), np.int32)
    rules = make_rules(GenerationConfig(max_new_tokens=target_length), config, src)
    sizes = source_length, target_length, 1, execution
    group = jax.eval_shape(
        lambda *given: slots._enter(given[0], (config,), *given[1:], *sizes), params, src, rules
    )
    state = jax.eval_shape(lambda group: slots._empty(group, num_slots), group)
    arranged = jax.eval_shape(
        lambda tree: slots._arrange(tree, config, execution, num_slots), *params
    )
    numbers = np.zeros(len(src), np.int32), np.int32(0), np.int32(0)
    places, *bounds = placed(numbers)
    given = placed((arranged,)), (config,), placed(state), placed(group), places
    lowered = slots._advance.lower(*given, placed(rules), *bounds, execution)
    found = report(compile_for_topology(lowered, topology))
    (loop,) = found.loops
    cycles = sum(loop.cycles.values())
    clock = GPU_CLOCK if is_gpu(topology) else data_sheet(topology).clock
    print(
        f"\n{model}, {num_slots} slots: {1e3 * cycles / clock:.2f} ms a step, at most "
        f"{num_slots * clock / cycles:,.0f} tokens/s; {loop.kernels} operations; "
        f"peak {found.peak / 1e9:.2f} GB\n{shares(loop.cycles)}"
    )


def shares(cycles: dict[str, int]) -> str:
    """Return cycles by kind of work, with their shares."""
    whole = sum(cycles.values())
    return "  " + ", ".join(
        f"{kind} {n // 1000:,} k ({n / whole:.0%})" for kind, n in cycles.items()
    )


def compile_all(topology: str = "v5e:2x4", quick: bool = False, only: str | None = None) -> None:
    """Compile the programs and print what XLA estimates; nothing is timed.

    The topology is as for `jax-transformer budget --compile`; `quick` leaves out deep models, and
    `only` all steps but those of a model, for example "t5-base", and the searches; "slots" is the
    loops of searches in slots.
    """
    jax.config.update("jax_platforms", "cpu")
    clock = GPU_CLOCK if is_gpu(topology) else data_sheet(topology).clock
    print(
        f"{topology}, bfloat16, {ROWS} rows of {LENGTH} a device, jax {jax.__version__}, not timed"
    )
    for task in tasks(len(topology_devices(topology)), quick):
        if only in (None, task.model):
            compile_task(task, topology, clock)
    if only in (None, "slots"):
        for model, num_slots in itertools.product(SLOTS, (64, 256, 1024)):
            compile_slots(model, num_slots, topology)
    if only is not None:
        return
    for model, beam_size in itertools.product(("base", "modern"), (1, 4)):
        compile_search(model, beam_size, topology)


def load_ours(device: str) -> System:
    """Return the training step of this library."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the others need memory as well
    jax.config.update("jax_platforms", BACKENDS[device])
    print(f"{jax.devices()[0].device_kind}, {processor()}", flush=True)
    return prepared(lambda size, dropout: our_steps(size, dropout, SETTINGS, STEPS))


def load_torch(device: str, compiled: bool = False) -> System:
    """Return the training step of nn.Transformer."""
    import torch

    jax.config.update("jax_platforms", "cpu")  # it draws the weights, and takes no memory there
    torch.set_float32_matmul_precision("high")  # as JAX on a GPU
    options = {"compiled": compiled, "device": BACKENDS[device]}
    return prepared(lambda size, rate: torch_steps(size, rate, SETTINGS, STEPS, **options))


def load_generation(device: str) -> System:
    """Return the generation of this library: the number of tokens that it made."""
    jax.config.update("jax_platforms", BACKENDS[device])
    return prepared(_generation)


def _generation(size: Size, beam_size: float) -> Steps:
    config = model_config(size, dropout=0.0)
    execution = execution_on(jax.devices()[0], "bfloat16", config, kind=SearchExecution)
    params = init_params(jax.random.key(0), config)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    options = {"max_new_tokens": size.length, "min_new_tokens": size.length - 1}
    options |= {"beam_size": int(beam_size), "execution": execution}
    src = draw_batch(size).src

    def run() -> float:
        return float(np.sum(generate(params, config, src, **options).lengths[:, 0]))

    return run


def run(
    device: Literal["gpu", "tpu", "cpu"] = "gpu",
    models: tuple[Literal["base", "big", "tiny"], ...] = ("base", "big"),
    rows: int = 128,
    length: int = 128,
    rounds: int = 5,
    peak_tflops: float | None = None,
) -> None:
    """Time training and generation on a device; print tokens a second and shares of the peak.

    Args:
        device: An NVIDIA GPU, a chip of a TPU, or the CPU.
        models: "tiny" is for machines without an accelerator.
        rows: Sentence pairs of a batch, with at most `length` tokens a side.
        peak_tflops: Peak of the device in bfloat16, by its data sheet.
    """
    loaders: dict[str, Callable[..., System]] = {"ours": load_ours}
    if device != "tpu":
        loaders |= {"torch": load_torch, "torch.compile": partial(load_torch, compiled=True)}
    for model in models:
        config = shape(model)
        layers, sizes = config.num_encoder_layers, (config.d_model, config.num_heads, config.d_ff)
        size = Size(*sizes, layers, VOCABULARY, rows, length)
        flops = step_flops(model_config(size, 0.0), rows, length)
        tokens = int(np.count_nonzero(draw_batch(size).tgt_out))
        for loaded, options in ((loaders, (0.0, 0.1)), ({"generate": load_generation}, (1, 4))):
            systems = start(loaded, device)
            for option in options:
                results, seconds = time_in_turn(systems, (size, option), rounds)
                for name, taken in seconds.items():
                    step, shown = median(taken) / STEPS, f"loss {results[name]:.4f}"
                    if name == "generate":
                        step, tokens, shown = median(taken), results[name], "beam"
                    elif peak_tflops:
                        shown += f", MFU {flops / step / peak_tflops / 1e12:.1%}"
                    ratio = spread(np.divide(taken, seconds[next(iter(seconds))]))
                    print(
                        f"{model}, {name} {option}: {1e3 * step:,.1f} ms, {tokens / step:,.0f} "
                        f"tokens/s, / ours {ratio}, {shown}"
                    )
            stop(systems)


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"run": run, "compile": compile_all})
