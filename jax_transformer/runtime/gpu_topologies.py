"""NVIDIA GPUs of a host on a machine that has none, to compile programs for them.

The compiler is in JAX's plugin for CUDA (the extra "cuda"), which compiles without a GPU. A program
cannot be run. XLA estimates the time of its kernels, those of cuDNN apart.
"""

import importlib.util
import re
from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.experimental import topologies

from jax_transformer.errors import InputError

PLUGINS, CUDA = "jax_plugins", "jax_plugins.xla_cuda13"


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


def gpu_devices(name: str) -> Sequence[jax.Device]:
    """Return NVIDIA GPUs of one host, without a GPU.

    Args:
        name: GPU and their number, as in "H100:8".

    Raises:
        InputError: The GPU is unknown, their number is no number from 1 to 8, or JAX's plugin for
            CUDA is not installed.
    """
    word, _, count = name.partition(":")
    if word not in GPUS or not re.fullmatch("[1-8]", count, re.ASCII):
        raise InputError(
            f"topology={name!r} must be one of {', '.join(GPUS)} and a number from 1 to 8, as in "
            "H100:8"
        )
    if importlib.util.find_spec(PLUGINS) is None or importlib.util.find_spec(CUDA) is None:
        raise InputError(
            f"topology={name!r} needs JAX's plugin for CUDA, which is not installed: "
            'pip install "jax-transformer[cuda]"'
        )
    return topologies.get_topology_desc(
        platform="cuda", target_config=TARGET.format(GPUS[word], word), topology=f"1x1x{count}"
    ).devices


def gpu_compiler_options(name: str) -> dict[str, bool]:
    """Return the options of XLA to compile for a GPU of `gpu_devices` without running anything."""
    return {
        # XLA cannot time alternatives here: it takes cuBLAS's products, of which it has a table of
        # times, and not Triton's, of which it would take a slow default.
        "xla_gpu_enable_triton_gemm": False,
        # XLA writes its estimates into the compiled text; for sm_80 it has none, and fails.
        "xla_gpu_collect_cost_model_stats": not name.startswith("A100"),
        "xla_gpu_disable_gpuasm_optimizations": True,  # of code that is not run
    }
