import struct
from pathlib import Path

import pytest

from backfill.core.errors import CorruptModel, ModelNotFound, UnsupportedModel
from backfill.models.gguf import GgufFile
from tests.models.gguf.builders import write_tiny


def test_every_truncation_is_found(tmp_path: Path) -> None:
    whole = write_tiny(tmp_path / "m.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    end = len(whole) - 64  # the last tensor is 64 float32 and fills its alignment
    for size in [*range(1, 200), *range(200, end, 997), end - 1, end]:
        path.write_bytes(whole[:size])
        with pytest.raises(CorruptModel):
            GgufFile(path)


def test_lengths_beyond_the_file_are_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    preamble = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q1s", 1, b"k")
    for value in (
        struct.pack("<IIQ", 9, 0, 1 << 60),
        struct.pack("<IIQ", 9, 8, 1 << 60),
        struct.pack("<IQ", 8, 1 << 63),
        struct.pack("<IIQ", 9, 9, 1 << 60),
        struct.pack("<I", 77),
    ):
        path.write_bytes(preamble + value + bytes(1000))
        with pytest.raises(CorruptModel):
            GgufFile(path)


def test_other_files(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with pytest.raises(ModelNotFound):
        GgufFile(path)
    path.touch()
    with pytest.raises(CorruptModel):
        GgufFile(path)
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CorruptModel, match="not a GGUF file"):
        GgufFile(path)
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 1, 0, 0))
    with pytest.raises(UnsupportedModel, match="version 1"):
        GgufFile(path)
