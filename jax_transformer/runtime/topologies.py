"""Data sheets of accelerators, and their devices as a target to compile for without having any.

The compiler for TPUs is in libtpu, that for GPUs in JAX's plugin for CUDA (the extra "cuda"); both
work without a device. XLA estimates the time of a GPU's kernels, those of cuDNN apart.
"""

import importlib.util
import math
import os
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import jax
from jax.experimental import topologies

from jax_transformer.errors import InputError


class Device(NamedTuple):
    """An accelerator: a GPU, or a chip of a TPU."""

    flops: float  # peak of dense bfloat16 products, FLOP/s, without sparsity
    memory: float  # bytes that a program may use
    clock: float | None = None  # cycles a second of a TPU's TensorCores; None for a GPU


GIBI = 2**30
DEVICES = {
    # "NVIDIA A100 80GB Tensor Core GPU" data sheet.
    "A100": Device(312e12, 80e9),
    # "NVIDIA H100 Tensor Core GPU" and "NVIDIA H200 Tensor Core GPU" data sheets, SXM; they print
    # 1,979 teraFLOPS with sparsity, twice as many.
    "H100": Device(989e12, 80e9),
    "H200": Device(989e12, 141e9),
    # "NVIDIA HGX B200" data sheet; it prints 36 petaFLOPS of 8 GPUs with sparsity.
    "B200": Device(2250e12, 180e9),
    # Google Cloud, "TPU versions": peak compute of a chip. The memory is what XLA leaves a program
    # of the 32, 16, 95 and 32 GB there, as its message RESOURCE_EXHAUSTED names it. The clock is
    # the peak over the FLOPs that the matrix units finish in a cycle: 2 * 128 * 128 in each of 8, 4
    # and 8 units, and 2 * 256 * 256 in each of 4 units.
    "TPU-v4": Device(275e12, 30.75 * GIBI, 1.05e9),
    "TPU-v5e": Device(197e12, 15.75 * GIBI, 1.5e9),
    "TPU-v5p": Device(459e12, 95.74 * GIBI, 1.75e9),
    "TPU-v6e": Device(918e12, 31.25 * GIBI, 1.75e9),
}


class Generation(NamedTuple):
    """How slices of a generation of TPUs are cut."""

    dimensions: int  # of a slice, as in 2x4
    whole_host: int  # most chips of a slice on a single host
    most: int  # chips of the largest slice (Google Cloud, "TPU versions")
    # What libtpu is told where the two TensorCores of a chip are one device.
    options: Mapping[str, str] = MappingProxyType({})


GENERATIONS = {
    "v4": Generation(3, 4, 4096, {"chip_config_name": "megacore"}),
    "v5e": Generation(2, 8, 256),
    "v5p": Generation(3, 4, 8960),
    "v6e": Generation(2, 8, 256),
}

HOST = (2, 2, 1)  # chips of one of several hosts, along each dimension, in every generation
# What libtpu looks for on a TPU's host. Without these values it asks a server of Google Cloud, and
# only one process at a time may load it.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}
PLUGINS, CUDA = "jax_plugins", "jax_plugins.xla_cuda13"
EXAMPLES = "v4:2x2x1, v5e:1x1, v5e:2x4, v5p:2x2x1, v6e:2x4 and H100:8"

# "(26.84G) exceeds available HBM (15.75G)" or "Used 20.30G of 15.75G hbm".
OVERFLOW = r"\b([\d.]+)([KMGT])\b"
UNITS = {unit: 2.0**power for unit, power in (("K", 10), ("M", 20), ("G", 30), ("T", 40))}


class Gpu(NamedTuple):
    """A GPU as XLA describes it (xla/backends/gpu/target_config/specs)."""

    capability: int  # compute capability, whose minor part is 0
    cores: int
    units: int  # float32 units of a core
    gigahertz: float
    bytes_of_memory: int
    bytes_per_second: int
    bytes_of_cache: int  # of level 2
    shared_bytes: int  # of a core
    shared_bytes_of_block: int


GPUS = {
    "A100": Gpu(8, 108, 64, 1.41, 85100068864, 2039040000000, 41943040, 167936, 166912),
    "H100": Gpu(9, 132, 128, 1.98, 84942979072, 3352320000000, 52428800, 233472, 232448),
    "H200": Gpu(9, 132, 128, 1.98, 151397597184, 4800000000000, 52428800, 233472, 232448),
    "B200": Gpu(10, 148, 128, 1.965, 191514411008, 7672320000000, 132644864, 233472, 232448),
}
# The versions are those of CUDA and cuDNN that a program is compiled for.
TARGET = """
gpu_device_info {{
  cuda_compute_capability {{ major: {0.capability} }}
  core_count: {0.cores}
  fpus_per_core: {0.units}
  clock_rate_ghz: {0.gigahertz}
  device_memory_size: {0.bytes_of_memory}
  memory_bandwidth: {0.bytes_per_second}
  l2_cache_size: {0.bytes_of_cache}
  shared_memory_per_core: {0.shared_bytes}
  shared_memory_per_block_optin: {0.shared_bytes_of_block}
  shared_memory_per_block: 49152
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
device_description_str: "NVIDIA {1}"
runtime_version {{ major: 13 minor: 0 }}
dnn_version_info {{ major: 9 minor: 10 }}
"""


class OutOfMemory(Exception):
    """A program needs more memory than the device has: bytes needed and available to it."""

    def __init__(self, message: str, needed: float, available: float) -> None:
        super().__init__(message)
        self.needed, self.available = needed, available


def is_gpu(name: str) -> bool:
    """Return whether a topology is one of GPUs."""
    return name.partition(":")[0] in GPUS


def compile_for_topology(lowered: jax.stages.Lowered, name: str = "") -> jax.stages.Compiled:
    """Compile a program that is lowered for the devices of a topology of this name."""
    options = None
    if is_gpu(name):
        options = {
            # XLA cannot time alternatives here. It has a table of times for cuBLAS's products; for
            # Triton's it would take a slow default.
            "xla_gpu_enable_triton_gemm": False,
            # XLA writes its estimates into the compiled text; for sm_80 it has none, and fails.
            "xla_gpu_collect_cost_model_stats": not name.startswith("A100"),
            "xla_gpu_disable_gpuasm_optimizations": True,  # of code that is not run
        }
    # Without a device, JAX's cache of compiled programs could not be read again.
    seconds = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", math.inf)
    try:
        compiled = lowered.compile(options)
    except jax.errors.JaxRuntimeError as error:
        sizes = [float(size) * UNITS[unit] for size, unit in re.findall(OVERFLOW, str(error))]
        if "RESOURCE_EXHAUSTED" not in str(error) or len(sizes) < 2:
            raise
        raise OutOfMemory(" ".join(str(error).split()), *sizes[:2]) from error
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)
    if is_gpu(name):  # whose compiler refuses nothing
        needed = float(compiled.memory_analysis().peak_memory_in_bytes)
        available = data_sheet(name).memory
        if needed > available:
            raise OutOfMemory(f"{name}: {needed:,} of {available:,} bytes", needed, available)
    return compiled


def topology_devices(name: str) -> Sequence[jax.Device]:
    """Return the devices of a TPU slice, as v5e:2x4, or the GPUs of a host, as H100:8."""
    if is_gpu(name):
        return _gpu_devices(name)
    generation, sizes = _parse(name)
    if importlib.util.find_spec("libtpu") is None:
        raise InputError(
            f"topology={name!r} needs libtpu, which is not installed: "
            'pip install "jax-transformer[tpu-compile]"'
        )
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    single = math.prod(sizes) <= generation.whole_host
    try:
        return topologies.get_topology_desc(
            platform="tpu",
            topology_name=name,
            chips_per_host_bounds=(*sizes, 1)[:3] if single else HOST,
            **generation.options,
        ).devices
    except jax.errors.JaxRuntimeError as error:
        line = " ".join(str(error).split())
        raise InputError(f"topology={name!r} cannot be made ({line}); try {EXAMPLES}") from error


def _gpu_devices(name: str) -> Sequence[jax.Device]:
    """Return NVIDIA GPUs of one host, as in "H100:8"."""
    word, _, count = name.partition(":")
    if not re.fullmatch("[1-8]", count, re.ASCII):
        raise InputError(f"topology={name!r} must be {word} and a number from 1 to 8, as {word}:8")
    if importlib.util.find_spec(PLUGINS) is None or importlib.util.find_spec(CUDA) is None:
        raise InputError(
            f"topology={name!r} needs JAX's plugin for CUDA, which is not installed: "
            'pip install "jax-transformer[cuda]"'
        )
    return topologies.get_topology_desc(
        platform="cuda", target_config=TARGET.format(GPUS[word], word), topology=f"1x1x{count}"
    ).devices


def data_sheet(name: str) -> Device:
    """Return what one chip of a slice, or one GPU, can do."""
    if is_gpu(name):
        return DEVICES[name.partition(":")[0]]
    _parse(name)
    return DEVICES[f"TPU-{name.partition(':')[0]}"]


def _parse(name: str) -> tuple[Generation, tuple[int, ...]]:
    """Return the generation of a topology and its chips along each dimension."""
    word, _, sizes = name.partition(":")
    if word not in GENERATIONS:
        known = ", ".join((*GENERATIONS, *GPUS))
        raise InputError(f"topology={name!r}: {word!r} must be one of {known}; as in {EXAMPLES}")
    generation = GENERATIONS[word]
    pattern = "x".join(["[1-9][0-9]*"] * generation.dimensions)
    if not re.fullmatch(pattern, sizes, re.ASCII):
        raise InputError(
            f"topology={name!r}: a slice of {word} has {generation.dimensions} dimensions, each "
            f"at least 1; as in {EXAMPLES}"
        )
    chips = tuple(map(int, sizes.split("x")))
    if math.prod(chips) > generation.most:
        raise InputError(
            f"topology={name!r} has {math.prod(chips):,} chips, but the largest slice of {word} "
            f"has {generation.most:,}"
        )
    return generation, chips
