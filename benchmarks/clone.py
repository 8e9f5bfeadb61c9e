"""Import this before ``experiments``, which is beside the benchmarks in a clone, and not installed."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
