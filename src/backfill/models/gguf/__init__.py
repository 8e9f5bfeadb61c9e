"""Converts a GGUF file to a model folder, so that all other code reads one format."""

from backfill.models.gguf.convert import convert_gguf
from backfill.models.gguf.file import GgufFile
from backfill.models.gguf.tensors import Progress

__all__ = ["GgufFile", "Progress", "convert_gguf"]
