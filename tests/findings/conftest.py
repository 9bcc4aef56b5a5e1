"""The described host of ``tests/host_case.py`` serves the tests of the rules too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
