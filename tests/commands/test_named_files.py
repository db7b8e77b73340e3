"""Whatever lies where a file is named, each reader refuses it in one short line and waits never."""

import os
import threading
import tracemalloc
from pathlib import Path

import pytest
from rich.console import Console

from jax_transformer import InputError
from jax_transformer.commands.convert import file_config
from jax_transformer.commands.train_arguments import named_settings
from jax_transformer.convert import read_layout
from jax_transformer.convert.origin import read_origin
from jax_transformer.porting import read_recording
from jax_transformer.porting.trainers import read_trainer
from jax_transformer.runs.loop import read_nonfinite
from jax_transformer.runs.metrics import read_metrics
from jax_transformer.runs.model_settings import read_tokenizer
from jax_transformer.storage import weights as files
from jax_transformer.storage.reading import file_digest
from jax_transformer.storage.weights.shards import read_weights
from jax_transformer.storage.yaml_file import read_yaml
from jax_transformer.text.parallel_text import TextFiles
from jax_transformer.text.prepare import open_folder
from jax_transformer.text.store import with_known_facts
from jax_transformer.text.text_files import count_lines, open_stream, open_text
from jax_transformer.translation.model_folder import load
from jax_transformer.translation.resumable_file import resumable_file
from tests.fuzz.mutations import PLACE_CHANGES
from tests.tiers import tiered


def training_text(path):
    text = TextFiles((path,), (path,))
    with_known_facts(path.parent / "store", text, Console(quiet=True))


def unfinished_output(path):
    (path.parent / "out.part").write_bytes(b"")
    with resumable_file(path.parent / "out", {}, resume=True, overwrite=False):
        pass


# By what a user calls it: the name of the file, and what reads it.
READERS = {
    "settings": ("settings.yaml", read_yaml),
    "settings of train": ("settings.yaml", lambda path: named_settings([f"--config={path}"])),
    "layout": ("layout.toml", read_layout),
    "config of convert": ("c.json", lambda path: file_config(Path("x.pt"), path, "reference")),
    "weights": ("model.safetensors", files.read),
    "metadata of weights": ("model.safetensors", files.read_metadata),
    "weights of torch": ("model.pt", files.read),
    "weights of a folder": ("model.safetensors", lambda path: read_weights(path.parent)),
    "digest": ("model.safetensors", file_digest),
    "checkpoint": ("model.pt", lambda path: read_trainer(path, "fairseq")),
    "recording": ("recorded.pt", read_recording),
    "config of a model": ("config.json", lambda path: load(path.parent)),
    "config of Hugging Face": ("config.json", lambda path: read_origin(path.parent)),
    "tokenizer of train": ("tokenizer.json", read_tokenizer),
    "lines": ("text", count_lines),
    "open text": ("text", open_text),
    "training text": ("text", training_text),
    "validation text": ("text", lambda path: TextFiles((path,), (path,)).read()),
    "manifest": ("manifest.json", lambda path: open_folder(path.parent)),
    "log": ("metrics.jsonl", read_metrics),
    "nonfinite batches": ("nonfinite_batches.json", lambda path: read_nonfinite(path.parent)),
    "state of a translation": ("out.part.json", unfinished_output),
}
# The readers to which a file of any size and any bytes may be right.
ANY_SIZE = {"digest", "lines", "open text", "text", "training text", "validation text"}
ANY_BYTES = {"digest", "lines", "open text", "training text", "log"}
NEVER_MISSING = {"log", "nonfinite batches", "state of a translation"}


# What is put in the place of the file: the readers to which it is right.
KINDS = dict.fromkeys(("a FIFO", "a folder", "a link to /dev/zero"), ())
KINDS |= {"64 GiB of zeros": ANY_SIZE, "removed": NEVER_MISSING, "bytes": ANY_BYTES}
CASES = [(reader, kind) for reader in READERS for kind in KINDS if reader not in KINDS[kind]]
EVERY_KIND = ("settings", "weights", "open text")  # one reader of each sort of file
QUICK = [case for case in CASES if case[0] in EVERY_KIND or case[1] == "a FIFO"]


@pytest.mark.parametrize("case", tiered(CASES, quick=QUICK), ids=" ".join)
def test_what_is_not_a_readable_file_is_one_line_at_once(tmp_path, case):
    reader, kind = case
    name, read = READERS[reader]
    (tmp_path / name).write_bytes(b"\xff\xfe\x00\xd8" * 100)
    if kind in PLACE_CHANGES:
        PLACE_CHANGES[kind](tmp_path / name)
    tracemalloc.start()
    try:
        with pytest.raises(InputError) as refused:
            read(tmp_path / name)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    message = str(refused.value)
    assert "\n" not in message
    assert len(message) < 500 + len(str(tmp_path))
    assert peak < 100e6


def test_a_fifo_is_a_text_to_translate(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    writer = threading.Thread(target=(tmp_path / "fifo").write_bytes, args=(b"a\nb\n",))
    writer.start()
    with open_stream(tmp_path / "fifo") as file:
        assert file.read() == b"a\nb\n"
    writer.join()
