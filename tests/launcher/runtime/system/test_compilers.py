"""What a host lacks to compile code for a GPU is named before training starts."""

import sysconfig
from pathlib import Path

import pytest

from plumbline.launcher.runtime.system.compilers import missing_c_compiler, missing_header


@pytest.mark.parametrize("there", ["gcc", "clang", None])
def test_triton_takes_gcc_or_clang(there: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    if there is not None:
        (tmp_path / there).touch(mode=0o755)
    assert (missing_c_compiler() is None) == (there is not None)


def test_a_compiler_that_cc_names_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own"
    own.touch(mode=0o755)
    monkeypatch.setenv("CC", str(own))
    assert missing_c_compiler() is None
    own.unlink()
    assert f"C compiler '{own}' of CC not found" in (missing_c_compiler() or "")


@pytest.mark.parametrize("scheme", ["posix_prefix", "posix_local"])
def test_the_headers_of_python_must_be_where_triton_looks(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_default_scheme", lambda: scheme)
    monkeypatch.setattr(sysconfig, "get_paths", lambda asked: {"include": str(tmp_path / asked)})
    assert "Python.h not found: install the headers" in (missing_header() or "")
    (tmp_path / "posix_prefix").mkdir()
    (tmp_path / "posix_prefix" / "Python.h").touch()
    assert missing_header() is None
