"""What a host lacks to compile code is named before training starts."""

import sysconfig
from pathlib import Path

import pytest

from plumbline.launcher.runtime.system.compilers import missing_to_compile


@pytest.mark.parametrize(("on_gpu", "variable"), [(True, "CC"), (False, "CXX")])
def test_a_compiler_that_a_variable_names_must_be_there(
    on_gpu: bool, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert missing_to_compile(on_gpu) is None, "the tests themselves need both"
    monkeypatch.setenv(variable, "no-such-compiler")
    assert "compiler 'no-such-compiler'" in (missing_to_compile(on_gpu) or "")


@pytest.mark.parametrize("there", ["gcc", "clang", None])
def test_triton_takes_gcc_or_clang(there: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    if there is not None:
        (tmp_path / there).touch(mode=0o755)
    assert (missing_to_compile(on_gpu=True) is None) == (there is not None)


def test_the_headers_of_python_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: str(tmp_path))
    assert "Python.h not found: install the headers" in (missing_to_compile(on_gpu=True) or "")
    assert missing_to_compile(on_gpu=False) is None
