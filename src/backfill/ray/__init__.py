"""Backfill on Ray (``pip install 'backfill[ray]'``): datasets of Ray Data as offline work."""

from __future__ import annotations

from backfill.ray.processor import Processor, ProcessorConfig, build_processor

__all__ = ["Processor", "ProcessorConfig", "build_processor"]
