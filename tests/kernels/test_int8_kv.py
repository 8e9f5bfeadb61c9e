"""KV of 8 bits: what is kept of a row, on every variant of the C++ kernels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from backfill.kernels.cpu import CpuKernels, available_isas
from tests.kernels.batches import make_metadata
from tests.kernels.reference import quantized_rows

HEAD_DIMS = [8, 16, 24, 40, 64, 128]


def written(kernels: CpuKernels, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of int8 KV ``[D + 4]`` of a token, as the kernels write them, and its attention to itself."""
    pool = torch.full((1, 1, 2, 1, 8, len(key) + 4), -1, dtype=torch.int8)
    qkv, batch = torch.cat((key, key, value))[None], make_metadata([(1, 1, [0])], block_size=8)
    kernels.rotate_and_write_kv(qkv, pool, 0, batch, 1, None)
    return pool[0, 0, :, 0, 0], kernels.attention(qkv, pool, 0, batch, 1, 1.0)[0]


def scale_of(rows: Tensor) -> Tensor:
    return rows[..., -4:].contiguous().view(torch.float32)


@given(
    isa=st.sampled_from(available_isas()),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    head_dim=st.sampled_from(HEAD_DIMS),
    exponent=st.integers(-90, 90),
    seed=st.integers(0, 999),
    data=st.data(),
)
def test_a_row_is_off_by_half_a_scale_at_most(
    isa: str, dtype: torch.dtype, head_dim: int, exponent: int, seed: int, data: st.DataObject
) -> None:
    rows = torch.randn(2, head_dim, generator=torch.Generator().manual_seed(seed))
    for place, value in data.draw(
        st.lists(st.tuples(st.integers(0, head_dim - 1), st.floats(-1e3, 1e3, width=32)), max_size=5)
    ):
        rows[:, place] = value  # outliers, ties and zeros
    rows = (rows * 2.0**exponent).to(dtype)
    kept, _ = written(CpuKernels(isa), *rows)
    assert torch.equal(kept, quantized_rows(rows))
    largest = rows.double().abs().amax(-1, keepdim=True)
    off = (kept[:, :-4].double() * scale_of(kept).double() - rows.double()).abs()
    bound = torch.where(largest < 1e-30, largest, largest / 254 * (1 + 1e-5))
    assert (off <= bound).all()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_row_of_zeros_stays_zero_and_one_with_a_nan_is_nan(
    kernels: CpuKernels, dtype: torch.dtype, head_dim: int
) -> None:
    zeros, ones = torch.zeros(head_dim, dtype=dtype), torch.ones(head_dim, dtype=dtype)
    kept, out = written(kernels, zeros, zeros)
    assert not kept.any()
    assert not out.any()
    for bad in (float("nan"), float("inf")):
        value = ones.clone()
        value[-1] = bad
        _, out = written(kernels, ones, value)
        assert out.isnan().all(), "a number that is not finite must not look like one"


def test_attention_reads_its_own_step_as_rounded(kernels: CpuKernels, dtype: torch.dtype) -> None:
    """A token's attention to itself is its value, as the pool has it."""
    key, value = torch.randn(2, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    kept, out = written(kernels, key, value)
    rounded = (kept[1, :-4] * scale_of(kept[1])).to(dtype)
    is_exact = dtype == torch.float32 or kernels.isa not in ("avx512_bf16", "amx")
    tolerance = 0.0 if is_exact else 2**-7  # the scale is rounded to bf16, and the result
    torch.testing.assert_close(out, rounded, rtol=tolerance, atol=0.0)
    assert not torch.equal(out, value)
