"""The zip archives of torch.save: checked before torch.load, and their tensors after it."""

import os
import pickletools
import struct
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from jax_transformer.errors import shorten
from jax_transformer.storage.reading import errors_naming, open_regular
from jax_transformer.storage.weights.arrays import as_numpy, as_torch
from jax_transformer.storage.weights.checks import (
    MAX_HEADER,
    WeightFileError,
    check_dtype,
    check_name,
    check_shape,
)

# The only names that the pickle of a state_dict needs. torch's own list also lets a file of a
# hundred bytes build a bytearray of any size.
_GLOBALS = {
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
    *(
        f"torch {kind}Storage"
        for kind in "Double Float Half BFloat16 Long Int Short Char Byte Bool".split()
    ),
}
_FOLDER = 0x10  # in the attributes of a record: torch reads no byte of it, and uses free memory
# The end of an archive, from APPNOTE.TXT of the zip format. torch also writes the longer record and
# its locator, before the short one.
_END = struct.Struct("<4s4H2LH")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR_64 = struct.Struct("<4sLQL")
_MAX_RECORDS = 10_000  # one for each tensor, and a handful more
_GLOBALS_ELSEWHERE = {"STACK_GLOBAL", "INST", "OBJ", "EXT1", "EXT2", "EXT4"}
USUAL_KEYS = ("model", "model_state_dict", "state_dict", "ema")  # of a state_dict
_ALONE = "save model.state_dict() alone"
# A trainer's checkpoint also holds its settings, and its vocabularies token by token: more bytes
# than the names of tensors, but no more operations, which are what costs memory.
_NAMESPACE = "argparse Namespace"
MAX_CHECKPOINT_PICKLE = 2**24  # bytes
MAX_OPERATIONS = 2**20


class Namespace:
    """What a checkpoint's argparse.Namespace is read as: attributes, and no code."""


class Checkpoint(NamedTuple):
    """A file of torch.save that holds more than tensors."""

    path: Path
    size: int  # in bytes
    content: Any  # dicts, lists, numbers, text, tensors and `Namespace`s

    def arrays(self, tensors: object) -> dict[str, np.ndarray]:
        """Return a state_dict of the content as arrays; tied tensors are one array."""
        return _measured_arrays(self.path, self.size, _state_dict(self.path, tensors, None))


def read(path: Path, file: BinaryIO, key: str | None) -> dict[str, np.ndarray]:
    """Return the state_dict of a file, or that under `key`; tied tensors are one array."""
    size, loaded = _load(path, file, MAX_HEADER, _GLOBALS, _ALONE)
    return _measured_arrays(path, size, _state_dict(path, loaded, key))


def read_usual(path: Path) -> tuple[str | None, dict[str, np.ndarray]]:
    """Return the usual key under which a file has a state_dict, or None, and the state_dict."""
    with open_regular(path, "cannot be read", error=WeightFileError) as file:
        size, loaded = _load(path, file, MAX_HEADER, _GLOBALS, _ALONE)
    entries = loaded if isinstance(loaded, dict) else {}
    key = next((name for name in USUAL_KEYS if _holds_tensors(entries.get(name))), None)
    return key, _measured_arrays(path, size, _state_dict(path, loaded, key))


def read_checkpoint(path: Path, remedy: str) -> Checkpoint:
    """Read a trainer's checkpoint: a file of torch.save, of any name, that holds its settings too.

    An argparse.Namespace is read as its attributes; objects of other classes are refused.

    Args:
        remedy: What to do about a file that holds objects of other classes.

    Raises:
        WeightFileError: The file is missing, damaged, hostile or holds such objects.
    """
    allowed = {*_GLOBALS, _NAMESPACE}
    with open_regular(path, "cannot be read", error=WeightFileError) as file:
        return Checkpoint(path, *_load(path, file, MAX_CHECKPOINT_PICKLE, allowed, remedy))


def write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays as a state_dict; one array under several names stays tied."""
    torch = _import_torch(path)
    tensors = {id(array): as_torch(array) for array in arrays.values()}
    with path.open("wb") as file:  # given a path, torch writes its name into the file
        torch.save({name: tensors[id(array)] for name, array in arrays.items()}, file)


def _load(
    path: Path, file: BinaryIO, longest: int, allowed: Collection[str], remedy: str
) -> tuple[int, Any]:
    """Return the size of a file and what it holds, with a pickle of at most `longest` bytes."""
    torch, size = _import_torch(path), os.fstat(file.fileno()).st_size
    # On damaged files zipfile and torch raise a dozen kinds of errors, and torch advises to switch
    # its protection off.
    with errors_naming(
        path, "is damaged or no file of torch.save", Exception, error=WeightFileError
    ):
        _check_globals(path, _check_archive(path, file, size, longest), allowed, remedy)
        with torch.serialization.safe_globals([(Namespace, _NAMESPACE.replace(" ", "."))]):
            return size, torch.load(file, map_location="cpu", weights_only=True)


def _import_torch(path: Path) -> ModuleType:
    try:
        import torch
    except ImportError as error:
        raise WeightFileError(
            f"{path}: {path.suffix} files need torch; install jax-transformer[torch] or use "
            ".safetensors"
        ) from error
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 10):
        raise WeightFileError(
            f"{path}: a weight file can corrupt the memory of torch {torch.__version__} "
            "(CVE-2026-24747); install torch 2.10 or newer, or use .safetensors"
        )
    return torch


def _check_archive(path: Path, file: BinaryIO, size: int, longest: int) -> bytes:
    """Return the pickle, of `longest` bytes at most, of an archive whose records are whole."""
    if not zipfile.is_zipfile(file):
        raise WeightFileError(
            f"{path} is no zip archive, as torch.save has written since 1.6; files without "
            "checksums are not read: load it with the program it is from and save it again"
        )
    # zipfile reads the whole directory at once, whatever its length.
    file.seek(0)
    entries = sum(chunk.count(b"PK\1\2") for chunk in iter(lambda: file.read(2**20), b""))
    if entries > _MAX_RECORDS:
        raise WeightFileError(f"{path}: {entries} records are more than {_MAX_RECORDS}")
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
        if (
            _directory_offset(file) != archive.start_dir
            or min((record.header_offset for record in records), default=1) != 0
        ):
            raise WeightFileError(
                f"{path} holds something before or behind its zip archive, and torch could load "
                "that instead; save the state_dict again"
            )
        if sum(record.file_size for record in records) > size:
            raise WeightFileError(f"{path}: the records claim more than the file's {size} bytes")
        pickles = [record for record in records if record.filename.split("/")[1:] == ["data.pkl"]]
        if len(pickles) != 1 or len({record.filename for record in records}) != len(records):
            raise WeightFileError(f"{path}: the archive must hold one data.pkl and no name twice")
        if pickles[0].file_size > longest:
            raise WeightFileError(
                f"{path}: data.pkl of {pickles[0].file_size} bytes is longer than {longest}"
            )
        for record in records:
            if record.external_attr & _FOLDER:
                raise WeightFileError(
                    f"{path}: the record {shorten(record.filename)} is marked as a folder; the "
                    "file is damaged, fetch or convert it again"
                )
        damaged = archive.testzip()  # torch does not look at the checksums
        if damaged:
            raise WeightFileError(
                f"{path}: the record {shorten(damaged)} differs from its CRC-32; the file is "
                "damaged, fetch or convert it again"
            )
        data = archive.read(pickles[0])
    file.seek(0)
    return data


def _directory_offset(file: BinaryIO) -> int:
    """Return where the end of a zip archive says that its directory lies; -1 if it does not.

    zipfile takes the bytes before the end for the directory; torch goes where the end says.
    """
    size, longest = os.fstat(file.fileno()).st_size, _END_64.size + _LOCATOR_64.size + _END.size
    file.seek(max(0, size - longest))
    content = file.read()
    signature, *_, offset, comment = _END.unpack(content[-_END.size :])
    if signature != b"PK\5\6" or comment:
        return -1
    locator = content[: -_END.size][-_LOCATOR_64.size :]
    if not locator.startswith(b"PK\6\7"):
        return offset
    if _LOCATOR_64.unpack(locator)[2] != size - longest:
        return -1
    return _END_64.unpack(content[: _END_64.size])[-1]


def _check_globals(path: Path, data: bytes, allowed: Collection[str], remedy: str) -> None:
    """Refuse a pickle that names anything but the allowed classes; nothing in it runs."""
    for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        if count >= MAX_OPERATIONS:
            raise WeightFileError(f"{path}: data.pkl has more than {MAX_OPERATIONS} operations")
        if opcode.name == "PROTO" and argument != 2:
            raise WeightFileError(
                f"{path} has pickle protocol {argument}; save it with torch.save's default, 2"
            )
        is_allowed = argument in allowed if opcode.name == "GLOBAL" else True
        if not is_allowed or opcode.name in _GLOBALS_ELSEWHERE:
            raise WeightFileError(
                f"{path} holds {shorten(argument or opcode.name)}, no part of a state_dict; "
                f"nothing was run: {remedy}"
            )


def _state_dict(path: Path, loaded: object, key: str | None) -> dict[Any, Any]:
    """Return the saved dict of tensors, or the dict under `key`."""
    if not isinstance(loaded, dict):
        raise WeightFileError(f"{path} holds a {type(loaded).__name__}, not a dict of tensors")
    names = ", ".join(f"{name!r} ({type(value).__name__})" for name, value in loaded.items())
    if key is not None:
        if not isinstance(loaded.get(key), dict):
            raise WeightFileError(f"{path} has no dict under key={key!r}; it holds {names[:500]}")
        return _state_dict(path, loaded[key], None)
    if not _holds_tensors(loaded):
        raise WeightFileError(
            f"{path} holds more than tensors: {names[:500]}; name the state_dict among them by "
            "key=, on the command line --key"
        )
    return loaded


def _holds_tensors(value: object) -> bool:
    """Return whether a value is a dict of tensors alone."""
    kinds = ("Tensor", "Parameter")
    return isinstance(value, dict) and all(type(v).__name__ in kinds for v in value.values())


def _measured_arrays(path: Path, size: int, tensors: dict[Any, Any]) -> dict[str, np.ndarray]:
    """Return the tensors as arrays, which share their memory where they can."""
    arrays, views, claimed = {}, {}, 0
    for name, tensor in tensors.items():
        check_name(path, name)
        check_shape(path, name, tensor.shape, size)
        view = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_neg())
        if view not in views:
            # Strides of 0 and overlapping views make a few bytes look like terabytes.
            claimed += tensor.numel() * tensor.itemsize
            if claimed > size:
                raise WeightFileError(
                    f"{path}: {name} of shape {list(tensor.shape)} brings the tensors to {claimed} "
                    f"bytes, but the file has {size}"
                )
            views[view] = as_numpy(tensor.contiguous())
            check_dtype(path, name, views[view].dtype)
        arrays[name] = views[view]
    return arrays
