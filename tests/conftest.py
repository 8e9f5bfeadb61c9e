from __future__ import annotations

import os
from pathlib import Path

import pytest

# Threads that wait must not spin: on a machine with other work, each barrier would cost a time slice.
# Read when the OpenMP runtime is loaded, so before the first import of torch.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Tests use whatever model folders they are given; nothing may be looked up on a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def default_model() -> Path:
    """Folder of the default model, fetched and converted on first use."""
    from backfill.models.resolve import resolve_model

    return resolve_model("smollm2-135m-instruct")
