"""Shards of few pairs, encoded in this process."""

import pytest

from jax_transformer.text.prepared import prepare, store


@pytest.fixture
def small_shards(monkeypatch):
    """Shards of 40 pairs of the text."""
    monkeypatch.setattr(prepare, "SHARD_PAIRS", 40)
    monkeypatch.setattr(store, "SHARD_PAIRS", 40)


@pytest.fixture
def one_process(small_shards, monkeypatch):
    """Encode in this process: others would import for seconds."""
    monkeypatch.setattr(prepare, "_on_all_cores", lambda works: map(prepare._do, works))
