"""One style for all pictures: it reads in grey, and by people who see colours differently.

Two things that are compared differ in lightness and in their line or marker, not in hue alone.
"""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

PICTURES = Path(__file__).parents[1] / "pictures"
INK, MIDDLE, FAINT, PAPER = "#1b1b1b", "#767676", "#c9c9c9", "#ffffff"
JAX, TORCH = "#0b3c6f", "#e69f00"  # dark and light: blue and orange of Okabe and Ito's kind
FILLS = (
    "#0b3c6f",
    "#e69f00",
    "#7fb3d5",
    "#5e5e5e",
    "#f4dca0",
    "#b0b0b0",
)  # neighbours differ in grey
STYLE = {
    "font.size": 10,
    "axes.edgecolor": MIDDLE,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.grid": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "savefig.dpi": 160,
}


def save(figure: Figure, name: str) -> None:
    """Write a figure as docs/pictures/NAME.png, without the version of matplotlib in it."""
    PICTURES.mkdir(exist_ok=True)
    figure.savefig(PICTURES / f"{name}.png", metadata={"Software": None})
    print(f"docs/pictures/{name}.png")


def bare(axes: Axes) -> None:
    """Remove ticks and frame: the picture is a drawing and not a plot."""
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set_visible(False)
