"""A compilation cache that cannot be written to is one sentence."""

import warnings

import jax
import pytest

from manualpar.system.storage.compilation_cache import check_compilation_cache


@pytest.fixture
def cache():
    """Sets JAX's cache folder, and restores it at the end."""
    before = jax.config.values["jax_compilation_cache_dir"]
    with warnings.catch_warnings():
        yield lambda folder: jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_dir", before)


def _is_used() -> bool:
    return jax.config.values["jax_compilation_cache_dir"] is not None


def test_a_folder_that_can_be_made_is_not_spoken_about(cache, tmp_path, capsys):
    for folder in (tmp_path, tmp_path / "new", "gs://bucket/cache"):
        cache(folder)
        check_compilation_cache()
        assert _is_used()
    assert capsys.readouterr().err == ""
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_made_is_not_used(cache, tmp_path, capsys):
    (tmp_path / "file").touch()
    cache(tmp_path / "file" / "cache")
    check_compilation_cache()
    assert not _is_used()
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{tmp_path}/file is a file, not a folder; programs are compiled without it" in error


def test_a_folder_that_can_only_be_read_is_read(cache, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    cache(tmp_path)
    check_compilation_cache()
    assert _is_used()
    assert (
        f"{tmp_path} may not be written to; new programs are not stored" in capsys.readouterr().err
    )
    with warnings.catch_warnings(record=True) as shown:
        warnings.warn("Error writing persistent compilation cache entry for 'f'", stacklevel=1)
    assert not shown
