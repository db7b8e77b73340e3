"""Options that XLA is given with one program: how its collectives are scheduled."""

from jax.sharding import Mesh

# A gradient of this many bytes or more is reduced alone, as soon as the backward pass has it. XLA
# overlaps only the reduction of a single array; smaller arrays (biases, norms) share a reduction.
REDUCED_TOGETHER = 128 * 2**10

# libtpu reduces asynchronously only where it is told to. All-gathers it starts ahead of their use
# without being told. The names are those in the list of XLA flags of Google's MaxText. XLA
# estimates more cycles for a product that a reduction is spread over, and does not say whether the
# reduction's own are among them: on a TPU, time a step with and without the options.
TPU_OPTIONS = {
    "xla_enable_async_all_reduce": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": True,
    "xla_jf_crs_combiner_threshold_in_bytes": REDUCED_TOGETHER,
}


def compiler_options(mesh: Mesh) -> dict[str, bool | int]:
    """Return the options that a training step for a mesh is compiled with.

    On TPUs, gradients are reduced while the backward pass runs: by default libtpu joins them into
    one reduction at its end, which nothing overlaps. It can overlap only reductions among all
    devices, so a mesh of several axes gets no options. The options are arguments of the
    compilation: other programs of the process are compiled as before. CPUs and GPUs need none:
    their compilers refuse TPU options, and XLA reduces asynchronously on NVIDIA GPUs by default.
    """
    one_axis = mesh.size > 1 and mesh.size in (mesh.shape["data"], mesh.shape["fsdp"])
    return dict(TPU_OPTIONS) if one_axis and mesh.devices.flat[0].platform == "tpu" else {}
