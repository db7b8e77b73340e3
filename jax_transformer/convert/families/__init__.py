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
_EXPERTS = ("nllb-moe", "nllb_moe", "switch_transformers")
_SPARSE = ("led", "longt5", "bigbird_pegasus", "pegasus_x")
# Encoder-decoders of transformers that no config of this library describes.
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(_EXPERTS, "its layers are mixtures of experts"),
    **dict.fromkeys(_SPARSE, "its attention is sparse"),
    **dict.fromkeys(("t5gemma", "t5gemma2"), "its positions are rotary"),
    "prophetnet": "its decoder predicts several tokens at once",
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
