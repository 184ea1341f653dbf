"""Read the Python standard library's own source code, which is on every machine."""

import sysconfig
from pathlib import Path

from plumbline.data.inputs.files import Files, files_under


class StandardLibrary(Files):
    """Read the files of Python source of the standard library, by the name `stdlib`."""

    @classmethod
    def is_meant_by(cls, spec: str) -> bool:
        """Return whether an argument is the name of this source."""
        return spec == "stdlib"

    def named(self) -> list[Path]:
        """Return the files of Python source, sorted."""
        return [path for path in files_under(Path(sysconfig.get_path("stdlib"))) if path.suffix == ".py"]
