from __future__ import annotations

import sys
from pathlib import Path

# The benchmarks are programs, not a package; they import one another by bare names, as Python lets programs do.
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
