"""bf16 weights in oneDNN's blocked layout, which torch keeps in opaque tensors."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from backfill.core.errors import ConfigError
from backfill.kernels.reference import as_bytes

# The row count for which oneDNN chooses a packed weight's layout. Measured: layouts for 16, 64 and 512 rows
# are equal within the noise at nearly all row counts; the layout for 1 row takes up to twice as long for 64
# rows of a wide output.
_PACKED_FOR_ROWS = 16
_LAYOUT_MKLDNN = 3  # c10::Layout::Mkldnn


class PackedLinear:
    """A bf16 weight in oneDNN's blocked layout, which takes as much memory as the plain one.

    Args:
        weight: opaque, ``[out, in]``.
        owner: what owns the weight's memory, if not the weight.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, owner: object = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight = weight
        self._bias = bias
        self._owner = owner
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    @staticmethod
    def pack(weight: Tensor, bias: Tensor | None) -> PackedLinear:
        """Pack a plain weight ``[out, in]``."""
        return PackedLinear(torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS), bias)

    def __call__(self, x: Tensor) -> Tensor:
        product: Tensor = self._multiply(x, self._weight, self._bias, "none", [], "")
        return product

    @property
    def layout(self) -> str:
        """The blocks depend on the machine, on oneDNN's version and on the shape."""
        return "oneDNN " + hashlib.sha256(_descriptor(self._weight).numpy().tobytes()).hexdigest()[:16]

    @property
    def memory(self) -> tuple[Tensor, ...]:
        num_bytes = int(torch.ops.mkldnn._nbytes(self._weight))
        blocks = (ctypes.c_uint8 * num_bytes).from_address(torch.ops.mkldnn.data_ptr(self._weight))
        return torch.frombuffer(blocks, dtype=torch.uint8), *as_bytes(self._bias)

    def placed(self, memory: Sequence[Tensor]) -> PackedLinear:
        bias = memory[1].view(self._bias.dtype) if self._bias is not None else None
        return PackedLinear(_tensor_over(memory[0], self._weight), bias, owner=memory[0])


def _descriptor(weight: Tensor) -> Tensor:
    """oneDNN's description of an opaque tensor's layout: uint8."""
    descriptor: Tensor = torch.ops.mkldnn._get_mkldnn_serialized_md(weight)
    return descriptor


def _tensor_over(memory: Tensor, like: Tensor) -> Tensor:
    """An opaque bf16 tensor in ``memory``, which it does not own, with the shape and layout of ``like``.

    As programs compiled by torch make theirs from a file of constants: Python has no other way to one.

    Raises: ConfigError where this torch cannot.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    try:
        create = library.aoti_torch_create_tensor_from_blob_v2
        adopt = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr
    except AttributeError:
        raise ConfigError(
            f"needs another version of torch for this processor: {torch.__version__} cannot place packed "
            "weights.",
            field="offload_interval",
        ) from None
    pointer, integer, small = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    create.argtypes = [
        pointer, integer, pointer, pointer, integer, small, small, small, pointer, small, pointer, integer
    ]  # fmt: skip
    rows, columns = like.shape
    sizes, strides = (integer * 2)(rows, columns), (integer * 2)(columns, 1)
    descriptor, handle = _descriptor(like), pointer()
    failed = create(
        memory.data_ptr(), 2, sizes, strides, 0, library.aoti_torch_dtype_bfloat16(),
        library.aoti_torch_device_type_cpu(), 0, ctypes.byref(handle), _LAYOUT_MKLDNN, descriptor.data_ptr(),
        descriptor.numel(),
    )  # fmt: skip
    if failed:
        raise RuntimeError("a packed weight could not be placed in a buffer")
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [pointer, ctypes.c_char_p, pointer]
    placed: Tensor = adopt(capsule(handle, None, None))
    return placed
