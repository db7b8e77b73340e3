"""The .npz format of numpy, as Marian writes it: a zip archive of arrays, not compressed."""

import io
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np

from jax_transformer.storage.reading import errors_naming
from jax_transformer.storage.weights.checks import WeightFileError, check_dtype, check_name

# MemoryError: a header claims more elements than there is memory; nothing was read then.
FAULTS = (zipfile.BadZipFile, EOFError, OSError, ValueError, NotImplementedError, MemoryError)


def read(path: Path, file: BinaryIO, reads: Callable[[str], bool] | None) -> dict[str, np.ndarray]:
    """Return the arrays of an open file that `reads` names; nothing in it is unpickled."""
    arrays: dict[str, np.ndarray] = {}
    with (
        errors_naming(path, "is damaged; copy it again", *FAULTS, error=WeightFileError),
        zipfile.ZipFile(file) as archive,
    ):
        for entry in archive.infolist():
            name = entry.filename.removesuffix(".npy")
            check_name(path, name)
            if name in arrays or entry.compress_type != zipfile.ZIP_STORED:
                fault = "twice" if name in arrays else "compressed"
                raise WeightFileError(f"{path}: has {name} {fault}; save it with numpy.savez")
            if reads is None or reads(name):
                with archive.open(entry) as member:
                    arrays[name] = np.lib.format.read_array(member, allow_pickle=False)
                check_dtype(path, name, arrays[name].dtype)
    return arrays


def write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays by name, with headers that Marian reads."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            content = io.BytesIO()
            np.lib.format.write_array(content, np.ascontiguousarray(array), allow_pickle=False)
            archive.writestr(f"{name}.npy", content.getbuffer())
