import pytest

from jax_transformer.text import prepare, samples


@pytest.fixture
def write(tmp_path):
    def write_file(name, content):
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return write_file


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(prepare, "BLOCK_PAIRS", 40)
    monkeypatch.setattr(samples, "BLOCK_PAIRS", 40)


@pytest.fixture
def one_process(small_blocks, monkeypatch):
    """Encode in this process: others would import for seconds."""
    monkeypatch.setattr(prepare, "_on_all_cores", lambda works: (work() for work in works))
