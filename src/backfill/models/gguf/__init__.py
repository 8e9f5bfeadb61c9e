"""Models in GGUF files: their folders, and their weights as they are stored."""

from backfill.models.gguf.file import GgufFile
from backfill.models.gguf.folder import WEIGHTS_FILE, folder_of_gguf

__all__ = ["WEIGHTS_FILE", "GgufFile", "folder_of_gguf"]
