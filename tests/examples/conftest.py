"""The examples are programs, not a package: their folder goes on the path, as when an example is run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
