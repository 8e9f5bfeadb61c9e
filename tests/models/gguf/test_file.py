import struct
import tracemalloc
from pathlib import Path

import pytest

from backfill.core.errors import CorruptModel, ModelNotFound, UnsupportedModel
from backfill.models.gguf.file import GgufFile
from tests.models.gguf.builders import array_field, header, string, tensor_header, write_tiny

U8, U32, STRING, U64 = 0, 4, 8, 10


def test_every_truncation_is_found(tmp_path: Path) -> None:
    whole = write_tiny(tmp_path / "m.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    end = len(whole) - 64  # the last tensor is 64 float32 and fills its alignment
    for size in [*range(1, 200), *range(200, end, 997), end - 1, end]:
        path.write_bytes(whole[:size])
        with pytest.raises(CorruptModel):
            GgufFile(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            header(num_tensors=1 << 60),
            f"byte 24 begins {1 << 60} tensors, but the file can hold at most 41666",
        ),
        (header(num_tensors=41_667), "41667 tensors, but the file can hold at most 41666"),
        (header(num_fields=1 << 63), f"{1 << 63} metadata fields, but the file can hold at most 76923"),
        (header(num_fields=76_924), "76924 metadata fields, but the file can hold at most 76923"),
        (header(num_fields=1) + array_field(U8, 1 << 60), f"{1 << 60} values of an array.* at most 1000000"),
        (header(num_fields=1) + array_field(U32, 250_001), "250001 values of an array.* at most 250000"),
        (header(num_fields=1) + array_field(U64, 1 << 61), f"{1 << 61} values of an array.* at most 125000"),
        (header(num_fields=1) + array_field(STRING, 125_001), "125001 strings of an array.* at most 125000"),
        (header(num_fields=1) + array_field(9, 1 << 60), "metadata value of type 9"),
        (header(num_fields=1) + string("k") + struct.pack("<I", 77), "metadata value of type 77"),
        (header(num_fields=1) + string("", 1 << 63), f"{1 << 63} bytes of a string.* at most 1000000"),
        (header(num_tensors=1) + string("", 1_000_001), "1000001 bytes of a string.* at most 1000000"),
        (header(num_tensors=1) + tensor_header("t", num_dims=5), "tensor 't' has 5 dimensions, more than 4"),
        (header(num_tensors=1) + tensor_header("t", num_dims=1 << 31), "has 2147483648 dimensions"),
        (
            header(num_tensors=1) + tensor_header("t", 1 << 62, 1 << 62, 1 << 62, 1 << 62),
            rf"takes {4 << 248} bytes, but the file holds 9999\d\d",
        ),
        (header(num_tensors=1) + tensor_header("t", 250_001), r"takes 1000004 bytes, but the file holds"),
        (
            header(num_tensors=1) + tensor_header("t", 1, offset=1 << 63),
            "takes 4 bytes, but the file holds 0",
        ),
    ],
)
def test_counts_beyond_the_file_are_refused_before_memory_is_taken(
    content: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content + bytes(1_000_000))
    tracemalloc.start()
    try:
        with pytest.raises(CorruptModel, match=message):
            GgufFile(path)
        assert tracemalloc.get_traced_memory()[1] < 500_000
    finally:
        tracemalloc.stop()


def test_tensors_are_counted_again_after_the_metadata(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    fields = string("k") + struct.pack("<I", STRING) + string("x" * 2400)
    path.write_bytes(header(num_tensors=100, num_fields=1) + fields + bytes(240))
    with pytest.raises(CorruptModel, match="100 tensors, but the file can hold at most 10"):
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
    with pytest.raises(UnsupportedModel, match=r"version 1 GGUF .* 2 and 3"):
        GgufFile(path)
    path.write_bytes(struct.pack(">4sIQQ", b"GGUF", 3, 0, 0))
    with pytest.raises(UnsupportedModel, match="big-endian GGUF"):
        GgufFile(path)


def test_an_unknown_type_is_refused_with_those_that_are_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    of_float = tensor_header("t", 1)
    path.write_bytes(header(num_tensors=1) + of_float[:-12] + struct.pack("<IQ", 999, 0) + bytes(64))
    with pytest.raises(
        UnsupportedModel, match=r"tensor 't' has unknown type 999; supported: F32, F16, .*Q4_K"
    ):
        GgufFile(path)
