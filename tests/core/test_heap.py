"""Garbage collection around loading."""

from __future__ import annotations

import gc

from backfill.core.heap import freeze_heap, pause_collection


def test_collection_is_on_again_once_everything_is_loaded() -> None:
    try:
        pause_collection()
        assert not gc.isenabled()
        freeze_heap()
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
    finally:
        gc.enable()
        gc.unfreeze()
