from __future__ import annotations

import sys
from pathlib import Path

# The benchmarks are programs, not a package, and import one another by bare names.
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
