"""What the types of options say to mistakes."""

import argparse
from pathlib import Path

import pytest

from plumbline.launcher.runtime.system import cli


def test_a_path_that_is_not_there_is_answered_with_those_most_like_it(tmp_path: Path) -> None:
    for name in ("corpora", "runs", ".corpra", ".git", *"abcdefghijkl"):
        (tmp_path / name).touch()
    with pytest.raises(argparse.ArgumentTypeError) as refused:
        cli.existing(str(tmp_path / "corpra"))
    start, _, names = str(refused.value).partition(f"; {tmp_path} holds ")
    assert start == f"{tmp_path / 'corpra'}: no such file or folder"
    assert names.split(", ")[0] == "corpora"
    assert len(names.split(", ")) == 10
    assert ", ." not in names
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".hidden").touch()
    with pytest.raises(argparse.ArgumentTypeError, match=r"empty holds nothing like it$"):
        cli.existing(str(tmp_path / "empty" / "hidden"))
