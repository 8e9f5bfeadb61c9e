"""Random inputs for the CPU kernels, and the tolerance of their results."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.kernels.reference import ReferenceKernels

REFERENCE = ReferenceKernels()
EPS = 1e-5


def seeded(*key: object) -> torch.Generator:
    return torch.Generator().manual_seed(sum(ord(c) * 31**i for i, c in enumerate(repr(key))) % 2**31)


def assert_close(actual: Tensor, expected: Tensor, name: str = "") -> None:
    tolerance = 2e-5 if actual.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(
        actual, expected, rtol=tolerance, atol=tolerance, msg=lambda message: f"{name} {message}"
    )


def random_rows(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=generator).to(dtype)
