from __future__ import annotations

import os
from pathlib import Path

import pytest

from backfill.engine.environment import engine_environment

# Before torch loads the libraries that read it.
os.environ.update(engine_environment(os.environ))
# Tests use whatever model folders they are given; nothing may be looked up on a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch

if not torch.cuda.is_available():
    # Triton decides whether its kernels are interpreted when it is first imported, by whatever library.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def default_model() -> Path:
    """Folder of the default model, fetched and converted on first use."""
    from backfill.models.resolve import resolve_model

    return resolve_model("smollm2-135m-instruct")
