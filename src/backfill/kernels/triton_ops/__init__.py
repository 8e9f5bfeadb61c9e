"""CUDA kernels in Triton. The meaning of every operator is in ``kernels/base.py``.

A kernel and its launcher share a file; ``TritonKernels`` checks the tensors and calls the launchers. Grids
depend on shapes and on the integers of ``AttentionMetadata`` only. No launcher reads a tensor's contents on
the host: launches need no synchronisation and can be captured in a CUDA graph. Where the contents decide
the amount of work, the grid is an upper bound and surplus programs return at once. mypy allows untyped
definitions here: a kernel's arguments (pointers, tensors, compile-time values) have no Python types.

Import this package only where Triton is installed. On CPU it runs in Triton's interpreter, for tests: set
``TRITON_INTERPRET=1`` before anything imports ``triton``.
"""

from backfill.kernels.triton_ops.kernel_set import TritonKernels

__all__ = ["TritonKernels"]
