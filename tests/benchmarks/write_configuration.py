"""Write docs/configuration.md and configs/schema.json: every key of a configuration, for people and for editors.

    python tests/benchmarks/write_configuration.py

tests/launcher/runtime/config/test_keys.py compares both with the schema.
"""

import json
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

from plumbline.launcher.runtime.config.keys import for_editors
from plumbline.launcher.runtime.config.page import page

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE, SCHEMA = REPOSITORY / "docs" / "configuration.md", REPOSITORY / "configs" / "schema.json"


def written() -> dict[Path, str]:
    """Return file -> text."""
    return {PAGE: page(), SCHEMA: json.dumps(for_editors(), indent=1) + "\n"}


if __name__ == "__main__":
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    for file, text in written().items():
        file.write_text(text, encoding="utf-8")
        print(file.relative_to(REPOSITORY))
