"""The mesh: what each of eight devices holds of one kernel and of one batch."""

import jax
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from docs.draw.style import FILLS, INK, MIDDLE, PAPER, bare, save
from jax_transformer import TransformerConfig, init_params, make_mesh, parameter_shardings
from jax_transformer.runtime.sharding import row_sharding

MESH = "data=2,fsdp=2,tensor=2"
ROWS = 8  # of a batch
COLUMNS = 4  # of the picture


def part(axes: Axes, shape: tuple[int, int], index: tuple[slice, ...], x: float, y: float) -> None:
    """Draw a matrix as a square, and in it the part that a device holds."""
    (top, bottom), (left, right) = (
        (cut.start or 0, length if cut.stop is None else cut.stop)
        for cut, length in zip(index, shape, strict=True)
    )
    axes.add_patch(Rectangle((x, y), 1, 1, facecolor=PAPER, edgecolor=MIDDLE))
    corner = (x + left / shape[1], y + 1 - bottom / shape[0])
    size = ((right - left) / shape[1], (bottom - top) / shape[0])
    axes.add_patch(Rectangle(corner, *size, facecolor=FILLS[0], edgecolor=INK))


def draw() -> None:
    """Ask the library where arrays lie on a mesh of eight devices, and draw it."""
    sizes = {"src_vocab_size": 40, "tgt_vocab_size": 40, "d_model": 32, "num_heads": 4, "d_ff": 64}
    config = TransformerConfig(**sizes)
    mesh = make_mesh(MESH)
    shapes = jax.eval_shape(lambda: init_params(jax.random.key(0), config))
    layer = parameter_shardings(mesh, shapes, config)["encoder"]["layers_0"]
    kernel = layer["self_attention"]["query"]["kernel"]
    matrices = {"kernel of queries\n[width, heads]": (kernel, (32, 32))}
    matrices["batch\n[rows, length]"] = (row_sharding(mesh), (ROWS, 16))
    figure = Figure(figsize=(5.6, 5), layout="constrained")
    axes = figure.subplots()
    devices = list(mesh.devices.flat)
    for number, place in enumerate(np.ndindex(mesh.devices.shape)):
        x, y = 1.2 * (number % COLUMNS), -3.2 * (number // COLUMNS)
        names = "\n".join(f"{axis} {i}" for axis, i in zip(mesh.axis_names, place, strict=True))
        axes.text(x + 0.5, y + 1.1, names, ha="center", va="bottom", fontsize=9)
        for row, (name, (sharding, shape)) in enumerate(matrices.items()):
            index = sharding.devices_indices_map(shape)[devices[number]]
            part(axes, shape, index, x, y - 1.15 * row)
            if number % COLUMNS == 0:
                axes.text(x - 0.15, y - 1.15 * row + 0.5, name, ha="right", va="center")
    axes.set(xlim=(-2.6, 4.7), ylim=(-4.5, 1.9), aspect="equal")
    bare(axes)
    save(figure, "mesh")
