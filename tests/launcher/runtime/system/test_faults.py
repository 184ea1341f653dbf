"""A command that has no more memory says so in one line; another error of torch is a bug, with its traceback."""

import pytest
import torch

from plumbline.launcher.runtime.commands import cli
from plumbline.launcher.runtime.system.exit_codes import UNUSABLE


def test_a_command_without_memory_says_what_it_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        torch.empty(2**60, dtype=torch.uint8)

    assert cli.code_of(main) == UNUSABLE
    said = capsys.readouterr().err
    assert said.startswith("error: no memory is left on ")
    assert "you tried to allocate 1152921504606846976 bytes" in said
    assert "a smaller batch" in said


def test_another_error_of_torch_is_a_bug() -> None:
    def main() -> None:
        torch.zeros(2) @ torch.zeros(3)

    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        cli.code_of(main)
