"""Model families of Hugging Face transformers: one file each, and one name each in `_FILES`.

Whatever differs from family to family is in its `Family`; the reader of folders, the command line
and the tests look it up here. A program can add its own: `FAMILIES[family.model_type] = family`.
"""

from collections.abc import Mapping

from jax_transformer.convert.families import (
    bart,
    blenderbot,
    m2m_100,
    marian,
    mbart,
    mt5,
    mvp,
    pegasus,
    plbart,
    t5,
    umt5,
)
from jax_transformer.convert.families.family import Family
from jax_transformer.errors import InputError

_FILES = (marian, pegasus, bart, mbart, plbart, mvp, blenderbot, m2m_100, t5, mt5, umt5)
FAMILIES: dict[str, Family] = {file.FAMILY.model_type: file.FAMILY for file in _FILES}
_EXPERTS = "its layers are mixtures of experts"
_SPARSE = "its attention is sparse"
_ROTARY = "its positions are rotary"
# Encoder-decoders of transformers that no config of this library describes.
REFUSED: Mapping[str, str] = {
    "nllb-moe": _EXPERTS,
    "nllb_moe": _EXPERTS,
    "switch_transformers": _EXPERTS,
    "led": _SPARSE,
    "longt5": _SPARSE,
    "bigbird_pegasus": _SPARSE,
    "pegasus_x": _SPARSE,
    "prophetnet": "its decoder predicts several tokens at once",
    "t5gemma": _ROTARY,
    "t5gemma2": _ROTARY,
    "fsmt": "its encoder and decoder have tables and widths of their own",
    "blenderbot-small": "its decoder norms the embeddings before the positions are added",
}


def get_family(model_type: object) -> Family:
    """Return the family of a model type."""
    name = model_type if isinstance(model_type, str) else None
    if name in FAMILIES:
        return FAMILIES[name]
    fault = f"cannot be converted: {REFUSED[name]}" if name in REFUSED else "is unknown"
    raise InputError(f"model_type={model_type!r} {fault}; this library knows {', '.join(FAMILIES)}")
