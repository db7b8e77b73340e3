"""Of several processes each reads its own rows: together they read the ids of an epoch once."""

import dataclasses
from functools import partial

import numpy as np
import pytest

from jax_transformer.text import plan as planning
from jax_transformer.text.batches import epoch_batches
from jax_transformer.text.plan import epoch_layout, take_rows
from jax_transformer.text.prepared.corpus import open_folder
from jax_transformer.text.prepared.shards import INDEX_TYPE
from jax_transformer.training.config import TrainingConfig
from tests.text.prepared.texts import corpus, lines, write

SETTINGS = TrainingConfig(max_tokens=512, bucket_count=2, pack_length=64)


@pytest.fixture
def folder(tmp_path, one_process, monkeypatch):
    monkeypatch.setattr(planning, "WINDOW_PAIRS", 100)
    monkeypatch.setattr(planning, "WINDOW_BATCHES", 0)
    return corpus(tmp_path / "store", write(tmp_path, *lines(300))).folder


def part(planned, process, processes):
    """Return the rows of one process; the first ones take the rows that are left over."""
    rows = np.array_split(np.arange(planned.rows), processes)[process]
    return take_rows(planned, rows)


@pytest.mark.parametrize("batching", ["buckets", "packed"])
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_the_ids_are_read_once_by_all_processes_together(folder, batching, processes):
    settings = dataclasses.replace(SETTINGS, batching=batching)
    whole = open_folder(folder)
    layout = epoch_layout(whole, settings)
    assert layout.windows == 3
    expected = list(epoch_batches(whole, settings, layout, 0))
    row = INDEX_TYPE.itemsize
    ids = whole.facts.ids * np.dtype(whole.facts.dtype).itemsize
    assert whole.bytes_read == 300 * row + 300 * row + ids  # for the plan, and for the batches

    read, made = [], []
    for process in range(processes):
        own = open_folder(folder)
        takes = partial(part, process=process, processes=processes)
        made.append(list(epoch_batches(own, settings, layout, 0, (0, 0), takes)))
        read.append(own.bytes_read)
    assert sum(read) == processes * 300 * row + 300 * row + ids
    assert max(read) - 300 * row < 1.35 * (300 * row + ids) / processes
    for place, batch in enumerate(expected):
        for name in ("src", "tgt_in", "tgt_out"):
            rows = [getattr(parts[place].batch, name) for parts in made]
            np.testing.assert_array_equal(np.concatenate(rows), getattr(batch.batch, name))
