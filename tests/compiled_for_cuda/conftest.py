"""The stand-in for a GPU lies beside its tests."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
