"""Make the checkout that contains this folder importable as `plumbline`, whether it is installed or not.

`python launcher/pretrain.py` puts launcher/ first on the path, under any launcher, so `import plumbline` finds this
file rather than an installed package. None of our modules is imported as `model`, `data` or `launcher`, so a user's own
packages with these names do not conflict with them.
"""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parents[1])]
