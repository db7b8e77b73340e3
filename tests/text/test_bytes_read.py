"""Of several processes each reads its own rows: together they read the ids of an epoch once."""

import dataclasses
from functools import partial

import numpy as np
import pytest

from jax_transformer.text import plan as planning
from jax_transformer.text.batches import epoch_batches
from jax_transformer.text.corpus import INDEX_TYPE, FileArray
from jax_transformer.text.plan import epoch_layout, take_rows
from jax_transformer.text.prepare import open_folder
from jax_transformer.training.config import TrainingConfig
from tests.text.texts import corpus, lines, write
from tests.tiers import tiered

SETTINGS = TrainingConfig(max_tokens=512, bucket_count=2, pack_length=64)


@pytest.fixture
def folder(tmp_path, one_process, monkeypatch):
    monkeypatch.setattr(planning, "WINDOW_PAIRS", 100)
    monkeypatch.setattr(planning, "WINDOW_BATCHES", 0)
    return corpus(tmp_path / "store", write(tmp_path, *lines(300))).parts[0].folder


def part(planned, process, processes):
    """Return the rows of one process; the first ones take the rows that are left over."""
    rows = np.array_split(np.arange(planned.rows), processes)[process]
    return take_rows(planned, rows)


@pytest.mark.parametrize("batching", ["buckets", "packed"])
@pytest.mark.parametrize("processes", tiered([2, 4], quick=[2]))
def test_the_ids_are_read_once_by_all_processes_together(folder, batching, processes, monkeypatch):
    bytes_read, read_slice = [0], FileArray.__getitem__

    def counted(array, span):
        part = read_slice(array, span)
        bytes_read[-1] += part.nbytes
        return part

    monkeypatch.setattr(FileArray, "__getitem__", counted)
    settings = dataclasses.replace(SETTINGS, batching=batching)
    corpus = open_folder(folder)
    layout = epoch_layout(corpus, settings)
    assert layout.windows == 3
    expected = list(epoch_batches(corpus, settings, layout, 0))
    index = 300 * INDEX_TYPE.itemsize
    ids = corpus.tokens + len(corpus)  # of one byte
    assert bytes_read == [index + index + ids]  # for the plan, and for the batches

    batches = []
    for process in range(processes):
        bytes_read.append(0)
        rows_to_read = partial(part, process=process, processes=processes)
        corpus = open_folder(folder)
        batches.append(list(epoch_batches(corpus, settings, layout, 0, (0, 0), rows_to_read)))
    assert sum(bytes_read[1:]) == processes * index + index + ids
    assert max(bytes_read[1:]) - index < 1.35 * (index + ids) / processes
    for place, batch in enumerate(expected):
        for name in ("src", "tgt_in", "tgt_out"):
            rows = [getattr(parts[place].batch, name) for parts in batches]
            np.testing.assert_array_equal(np.concatenate(rows), getattr(batch.batch, name))
