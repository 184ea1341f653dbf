"""Let the scripts of this folder import the checkout that they lie in as `plumbline`, installed or not.

`python launcher/pretrain.py` puts launcher/ first on the path, under any launcher, so `import plumbline` finds this
file, and whatever is installed elsewhere stays out of the way. Nothing of ours is ever imported as `model`, `data` or
`launcher`: a user's own folders of these names stay the user's.
"""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parents[1])]
