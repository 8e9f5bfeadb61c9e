"""Models in GGUF files: their folders, and their weights as they are stored."""

from backfill.models.gguf.file import GgufFile
from backfill.models.gguf.folder import describe_gguf, write_folder

__all__ = ["GgufFile", "describe_gguf", "write_folder"]
