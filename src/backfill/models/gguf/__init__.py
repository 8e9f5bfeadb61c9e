"""Convert a GGUF file to a model folder, so that everything downstream reads one format."""

from backfill.models.gguf.convert import convert_gguf
from backfill.models.gguf.file import GgufFile
from backfill.models.gguf.tensors import Progress

__all__ = ["GgufFile", "Progress", "convert_gguf"]
