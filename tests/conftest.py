from __future__ import annotations

import os
from pathlib import Path

import pytest

from backfill.engine.process import limit_spinning

limit_spinning()
# Tests use whatever model folders they are given; nothing may be looked up on a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def default_model() -> Path:
    """Folder of the default model, fetched and converted on first use."""
    from backfill.models.resolve import resolve_model

    return resolve_model("smollm2-135m-instruct")
