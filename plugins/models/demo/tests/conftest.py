"""Makes the training scripts, which are no part of the installed package, importable as `train`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
