"""NVIDIA GPUs of a host on a machine that has none, to compile programs for them.

The compiler is in JAX's plugin for CUDA (the extra "cuda"), which compiles without a GPU. It cannot
time alternatives there: kernels that XLA would choose by timing them are default ones. A program
cannot be run, and has no estimate of its time.
"""

import importlib.util
import re
from collections.abc import Sequence

import jax
from jax.experimental import topologies

from jax_transformer import InputError

PLUGINS, CUDA = "jax_plugins", "jax_plugins.xla_cuda13"

# As XLA describes the GPU: xla/backends/gpu/target_config/specs/h100_sxm.txtpb. The versions are
# those of CUDA and cuDNN that a program is compiled for.
H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  l2_cache_size: 52428800
  device_memory_size: 84942979072
  memory_bandwidth: 3352320000000
}
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
runtime_version { major: 13 minor: 0 }
dnn_version_info { major: 9 minor: 10 }
"""
GPUS = {"H100": H100}


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
        platform="cuda", target_config=GPUS[word], topology=f"1x1x{count}"
    ).devices
