"""Sources of BlendServe's pools that make small pools: short videos, and few subjects of MMLU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import cast
from unittest import mock

from backfill.workloads.lengths import LengthDistribution
from experiments.blendserve.sources import SOURCES, Source


@contextmanager
def small_sources() -> Iterator[None]:
    """Each token of a video takes a step, and a pool needs several videos."""
    videos = replace(SOURCES["openvid"], outputs=LengthDistribution(2500, 0.1, "lognormal"))
    questions = replace(SOURCES["mmlu"], num_prefixes=3)
    with mock.patch.dict(cast("dict[str, Source]", SOURCES), openvid=videos, mmlu=questions):
        yield
