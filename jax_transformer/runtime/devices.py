"""What accelerators can do, by their vendors' data sheets."""

from typing import NamedTuple


class Device(NamedTuple):
    """An accelerator: a GPU, or a chip of a TPU."""

    flops: float  # peak of dense bfloat16 products, FLOP/s, without sparsity
    memory: float  # bytes that a program may use
    clock: float | None = None  # cycles a second of a TPU's TensorCores; None for a GPU

    @property
    def flops_per_cycle(self) -> float:
        """Peak FLOPs in a cycle of the chip."""
        return self.flops / self.clock


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
