"""Opens a model's weights, and decides which of its matrices are codes of 4 or 8 bits."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from backfill.core.config import LoadFormat, Quantization
from backfill.core.errors import CorruptModel
from backfill.kernels.quantized import INPUT_MULTIPLE, QuantizedWeight, quantize, rounded_format
from backfill.models.fields import Fields
from backfill.models.quantization import stored_quantization
from backfill.models.quantized_checkpoint import QuantizedCheckpoint
from backfill.models.resolve import told_what_to_delete
from backfill.models.safetensors_files import FLOAT_TYPES
from backfill.models.weight_files import find_weights
from backfill.models.weights import Checkpoint, DummyCheckpoint, Part, SafetensorsCheckpoint

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_TABLES = ("embed_tokens.weight", "lm_head.weight")
_TABLE_BITS = 8  # an error in the projection is one in every logit


def open_checkpoint(
    folder: str | Path,
    *,
    dtype: torch.dtype,
    load_format: LoadFormat = "auto",
    quantization: Quantization = "none",
    seed: int = 0,
    device: torch.device = _CPU,
) -> Checkpoint:
    """The weights in ``folder``; with "dummy", random ones of ``seed``, and no file is read.

    Args:
        quantization: auto: matrices as they are stored; none: of ``dtype``; int8, int4: rounded.
        device: where random weights are drawn; a CPU takes a minute for 8 billion.
    Raises:
        ModelNotFound: the folder holds no weights.
        UnsupportedModel: it holds only another format than safetensors or GGUF, or a quantization that is not
            read here.
        CorruptModel: a file is damaged, or the index does not match the files.
    """
    checkpoint: Checkpoint
    with told_what_to_delete(folder, reads_weights=True):
        if load_format == "dummy":
            checkpoint = DummyCheckpoint(dtype=dtype, seed=seed, device=device)
        elif find_weights(Path(folder), load_format).suffix == ".gguf":
            from backfill.models.gguf.checkpoint import GgufCheckpoint

            checkpoint = GgufCheckpoint(Path(folder), dtype=dtype, keeps_codes=quantization == "auto")
        else:
            config = Path(folder) / "config.json"
            stored = stored_quantization(Fields.from_file(config)) if config.is_file() else None
            if stored is None:
                checkpoint = SafetensorsCheckpoint(folder, dtype=dtype)
            else:
                checkpoint = QuantizedCheckpoint(
                    folder, dtype=dtype, stored=stored, keeps_codes=quantization == "auto"
                )
    if quantization in ("int8", "int4"):
        types = checkpoint.file_types
        if not set(types.split()) <= set(FLOAT_TYPES.values()):
            logger.info("the model is stored in %s, and %s rounds it again", types, quantization)
        return RoundedCheckpoint(checkpoint, 8 if quantization == "int8" else 4)
    return checkpoint


class RoundedCheckpoint(Checkpoint):
    """The matrices of another checkpoint rounded to codes of ``bits``; tables of the vocabulary to 8.

    A matrix whose inputs, or whose part's, are no multiple of 32 stays as it is.
    """

    def __init__(self, source: Checkpoint, bits: int) -> None:
        self.dtype = source.dtype
        self._source = source
        self._bits = bits

    @property
    def digest(self) -> str:
        return f"{self._source.digest}-int{self._bits}"

    @property
    def stored_in(self) -> str:
        return f"int{self._bits}"

    @property
    def file_types(self) -> str:
        return self._source.file_types

    def _mean_width(self, of_layers: bool) -> float:
        return rounded_format(self._bits if of_layers else _TABLE_BITS).bytes_per_weight

    def get(self, name: str, shape: Sequence[int], part: Part | None = None) -> Tensor:
        return self._source.get(name, shape, part)

    def weight(self, name: str, shape: Sequence[int], part: Part | None = None) -> Tensor | QuantizedWeight:
        found = self._source.get(name, shape, part)
        starts = part.start if part is not None and part.dim == 1 else 0
        if found.shape[1] % INPUT_MULTIPLE or starts % INPUT_MULTIPLE:
            return found
        bits = _TABLE_BITS if name.endswith(_TABLES) else self._bits
        try:
            return quantize(found, bits)
        except ValueError as error:
            raise CorruptModel(f"tensor {name} cannot be rounded to int{bits}: it has {error}") from None
