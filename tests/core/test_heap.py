"""Garbage collection around loading."""

from __future__ import annotations

import gc

from backfill.core.heap import freeze_heap, freeze_imports, pause_collection


def test_collection_is_on_again_once_everything_is_loaded() -> None:
    before = gc.get_freeze_count()
    kept: list[list[object]] = [[] for _ in range(1000)]
    try:
        pause_collection()
        assert not gc.isenabled()
        freeze_heap()
        assert gc.isenabled()
        assert gc.get_freeze_count() >= before + len(kept)
    finally:
        gc.enable()


def test_what_is_imported_is_not_looked_at_before_collection_begins_again() -> None:
    pause_collection()
    try:
        imported: list[object] = []
        imported.append(imported)
        freeze_imports()
        assert not gc.isenabled()
        assert not any(each is imported for each in gc.get_objects())
    finally:
        gc.enable()
