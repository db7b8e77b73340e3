"""Model families of Hugging Face transformers: one file each, and one line each in `FAMILIES`.

Whatever differs from family to family is in its `Family`; the reader of folders, the command line
and the tests look it up here. A program can add its own: `FAMILIES[family.model_type] = family`.
"""

from jax_transformer.convert.families import marian, mt5, pegasus, t5, umt5
from jax_transformer.convert.families.family import Family
from jax_transformer.errors import InputError

FAMILIES: dict[str, Family] = {
    "marian": marian.FAMILY,
    "pegasus": pegasus.FAMILY,
    "t5": t5.FAMILY,
    "mt5": mt5.FAMILY,
    "umt5": umt5.FAMILY,
}


def get_family(model_type: object) -> Family:
    """Return the family of a model type.

    Raises:
        InputError: The model type is unknown; lists the known model types.
    """
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise InputError(f"model_type={model_type!r} is unknown; this library knows {known}")
    return FAMILIES[model_type]
