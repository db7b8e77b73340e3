"""Which folder keeps compiled programs, and that no damaged one is run."""

import os
import pwd
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_transformer.commands.compilation_cache import keep_compilations
from jax_transformer.commands.sealed_cache import SealedCache
from jax_transformer.storage.hub import user_cache

KEY, PROGRAM = "jit_step-0123", np.random.default_rng(0).bytes(1_000)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Return the user's cache, which keeps every program while JAX is given no other one."""
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = {name: getattr(jax.config, name) for name in names}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, value in zip(names, (None, 0), strict=True):
        jax.config.update(name, value)
    yield tmp_path / "jax-transformer"
    for name, value in before.items():
        jax.config.update(name, value)
    keep_compilations()


@pytest.fixture
def kept(tmp_path):
    """Return a cache with one entry, and the entry's file."""
    cache = SealedCache(str(tmp_path), max_size=-1)
    cache.put(KEY, PROGRAM)
    (entry,) = tmp_path.iterdir()
    return cache, entry


def test_an_entry_with_a_flipped_bit_or_without_its_end_is_replaced(kept):
    cache, entry = kept
    whole, random = entry.read_bytes(), np.random.default_rng(1)
    versions = [whole[:length] for length in (0, 1, 31, 32, 33, 1_031)]
    for bit in random.choice(8 * len(whole), 500, replace=False):
        versions.append(bytearray(whole))
        versions[-1][bit // 8] ^= 1 << bit % 8
    for damaged in versions:
        entry.write_bytes(damaged)
        assert cache.get(KEY) is None
        cache.put(KEY, PROGRAM)
        assert cache.get(KEY) == PROGRAM


def test_the_entry_of_another_program_is_not_returned(kept):
    cache, entry = kept
    other = KEY.replace("0123", "4567")
    entry.rename(entry.with_name(entry.name.replace(KEY, other)))
    assert cache.get(other) is None


def test_a_program_whose_entry_was_damaged_is_compiled_again(folder, fresh_caches):
    keep_compilations()

    def run():
        jax.clear_caches()
        return np.asarray(jax.jit(lambda x: jnp.sin(x) @ x)(jnp.eye(3)))

    expected = run()
    entries = {path: path.read_bytes() for path in folder.iterdir()}
    assert entries
    for path, content in entries.items():
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    np.testing.assert_array_equal(run(), expected)
    assert sorted(folder.iterdir()) == sorted(entries)
    assert all(
        SealedCache(str(folder), max_size=-1).get(path.name.removesuffix("-sealed-cache"))
        for path in entries
    )


def test_the_users_cache_is_made_for_the_user_alone(folder):
    keep_compilations()
    assert jax.config.jax_compilation_cache_dir == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700


def test_another_folder_that_jax_was_given_stays(folder):
    jax.config.update("jax_compilation_cache_dir", "mine")
    keep_compilations()
    assert jax.config.jax_compilation_cache_dir == "mine"
    assert not folder.exists()


@pytest.mark.parametrize("fault", ["mode", "owner", "file"])
def test_a_folder_that_others_may_write_is_not_used(folder, monkeypatch, capsys, fault):
    if fault == "file":
        folder.write_text("")
    else:
        folder.mkdir(mode=0o700)
    if fault == "mode":
        folder.chmod(0o770)
    elif fault == "owner":
        monkeypatch.setattr(os, "getuid", lambda: 1234)
    keep_compilations()
    assert jax.config.jax_compilation_cache_dir is None
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("compiled programs are not kept: ")
    assert str(folder) in line


def test_without_a_home_nothing_is_kept(folder, monkeypatch, capsys):
    def nobody(uid):
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which is ignored
    keep_compilations()
    assert jax.config.jax_compilation_cache_dir is None
    assert "there is no home folder; set XDG_CACHE_HOME" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["", "relative"])
def test_a_cache_that_is_no_absolute_path_is_ignored(monkeypatch, tmp_path, value):
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_cache() == tmp_path / ".cache" / "jax-transformer"


def test_with_another_jax_nothing_is_kept(folder, monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "jax_transformer.commands.sealed_cache")
    monkeypatch.delattr("jax_transformer.commands.sealed_cache")
    monkeypatch.setitem(sys.modules, "jax._src.lru_cache", None)
    keep_compilations()
    assert jax.config.jax_compilation_cache_dir is None
    assert "has another cache than this library knows" in capsys.readouterr().err
