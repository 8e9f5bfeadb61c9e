"""Backfill: latency-critical and batch LLM requests on the same accelerators."""

from importlib.metadata import version

__version__ = version("backfill")
