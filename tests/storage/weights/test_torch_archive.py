"""The archive that is checked is the archive that torch loads."""

import struct
import zipfile

import pytest
import torch

from jax_transformer.storage import weights as files
from jax_transformer.storage.weights.checks import WeightFileError


def test_a_file_that_is_two_files_is_refused(tmp_path):
    """zipfile finds an archive by the end of a file, torch by its beginning."""
    saved = {}
    for name, zipped in (("legacy", False), ("zip", True), ("other", True)):
        torch.save({name: torch.ones(3)}, tmp_path / name, _use_new_zipfile_serialization=zipped)
        saved[name] = (tmp_path / name).read_bytes()
    with (
        zipfile.ZipFile(tmp_path / "legacy", "a") as both,  # its offsets count from the first byte
        zipfile.ZipFile(tmp_path / "zip") as archive,
    ):
        for name in archive.namelist():
            both.writestr(name, archive.read(name))
    path = tmp_path / "two.pt"
    for content in (
        (tmp_path / "legacy").read_bytes(),
        saved["legacy"] + saved["zip"],
        saved["zip"] + saved["other"],
        saved["zip"] + b"0",
    ):
        path.write_bytes(content)
        with pytest.raises(WeightFileError, match=r"two\.pt holds something before or behind its"):
            files.read(path)


def test_a_directory_elsewhere_is_refused(tmp_path):
    """zipfile takes the directory before the end, torch the one at the place that the end says."""
    path, shift = tmp_path / "w.pt", 46
    torch.save({"weight": torch.ones(3)}, path)
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        place, records = archive.start_dir, archive.infolist()
    end = struct.unpack_from("<Q", content, len(content) - 42 + 8)[0]
    struct.pack_into("<Q", content, end + 48, place + shift)
    for _ in records:
        offset = struct.unpack_from("<L", content, place + 42)[0]
        struct.pack_into("<L", content, place + 42, offset + shift)
        place += 46 + sum(struct.unpack_from("<3H", content, place + 28))
    path.write_bytes(content)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None  # zipfile finds no fault
    with pytest.raises(WeightFileError, match=r"w\.pt holds something before or behind its"):
        files.read(path)
