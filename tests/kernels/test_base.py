"""Every set of kernels refuses tensors and sizes that it cannot read, and names the argument."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from backfill.core.block import KVLayout
from backfill.kernels.base import Kernels
from backfill.kernels.cpu import CpuKernels
from backfill.kernels.inputs import AttentionMetadata
from tests.kernels.batches import make_batch, make_pool
from tests.kernels.cpu import EPS, seeded


@dataclasses.dataclass
class Arguments:
    """A correct call of both attention operators: H = 2, G = 1, D = 16, L = 2."""

    qkv: Tensor
    pool: Tensor
    batch: AttentionMetadata
    layer: int = 1
    num_heads: int = 2
    scale: float = 0.25
    cos_sin: Tensor | None = None
    q_norm: Tensor | None = None
    kernels: Kernels = dataclasses.field(default_factory=CpuKernels)

    def attention(self) -> None:
        self.kernels.attention(self.qkv, self.pool, self.layer, self.batch, self.num_heads, self.scale)

    def rotate(self) -> None:
        self.kernels.rotate_and_write_kv(
            self.qkv, self.pool, self.layer, self.batch, self.num_heads, self.cos_sin, self.q_norm
        )


def make_arguments() -> Arguments:
    generator = seeded("arguments")
    pool = make_pool(KVLayout(2, 1, 16, 8, 4), 4, torch.float32, generator)
    batch = make_batch([(3, 3)], block_size=8, num_blocks=4, generator=generator)
    return Arguments(torch.zeros(3, 64), pool, batch)


def _with_batch(name: str, value: Callable[[Tensor], Tensor]) -> Callable[[Arguments], None]:
    def change(arguments: Arguments) -> None:
        changed = value(getattr(arguments.batch, name))
        arguments.batch = dataclasses.replace(arguments.batch, **{name: changed})

    return change


def _with(name: str, value: Callable[[Arguments], object]) -> Callable[[Arguments], None]:
    return lambda arguments: setattr(arguments, name, value(arguments))


@pytest.mark.parametrize(
    ("named", "change"),
    [
        ("qkv", _with("qkv", lambda a: a.qkv.half())),
        ("qkv", _with("qkv", lambda a: a.qkv[:, :-1])),
        ("qkv", _with("qkv", lambda a: a.qkv[:, :48].contiguous())),
        ("qkv", _with("pool", lambda a: a.pool.bfloat16())),
        ("kv_pool", _with("pool", lambda a: a.pool[0])),
        ("kv_pool", _with("pool", lambda a: a.pool.transpose(0, 1))),
        ("kv_pool", _with("pool", lambda a: a.pool[..., :12].contiguous())),
        ("layer", _with("layer", lambda a: 2)),
        ("layer", _with("layer", lambda a: -1)),
        ("kv_pool", _with("pool", lambda a: a.pool.double())),
        ("num_heads", _with("num_heads", lambda a: 0)),
        ("qkv", _with("num_heads", lambda a: 3)),
        ("batch.positions", _with_batch("positions", Tensor.int)),
        ("batch.slot_mapping", _with_batch("slot_mapping", lambda t: t[1:])),
        ("batch.seq_lens", _with_batch("seq_lens", Tensor.long)),
        ("batch.cu_seqlens_q", _with_batch("cu_seqlens_q", lambda t: t[1:])),
        ("batch.block_table_offsets", _with_batch("block_table_offsets", Tensor.long)),
        ("batch.block_table", _with_batch("block_table", Tensor.long)),
    ],
)
def test_attention_operators_refuse_what_does_not_fit(
    named: str, change: Callable[[Arguments], None]
) -> None:
    arguments = make_arguments()
    arguments.attention()
    arguments.rotate()
    change(arguments)
    with pytest.raises(ValueError, match=f"^{named}:"):
        arguments.attention()
    with pytest.raises(ValueError, match=f"^{named}:"):
        arguments.rotate()


def test_attention_refuses_a_scale_that_is_not_positive() -> None:
    arguments = make_arguments()
    arguments.scale = 0.0
    with pytest.raises(ValueError, match=r"^scale:"):
        arguments.attention()


@pytest.mark.parametrize(
    ("named", "change"),
    [
        ("cos_sin", _with("cos_sin", lambda a: torch.zeros(4, 8))),
        ("cos_sin", _with("cos_sin", lambda a: torch.zeros(4, 16).bfloat16())),
        ("cos_sin", _with("cos_sin", lambda a: torch.zeros(16, 4).t())),
        ("k_norm", _with("q_norm", lambda a: torch.ones(16))),
    ],
)
def test_rotate_and_write_kv_refuses(named: str, change: Callable[[Arguments], None]) -> None:
    arguments = make_arguments()
    change(arguments)
    with pytest.raises(ValueError, match=f"^{named}:"):
        arguments.rotate()


def test_row_operators_refuse_what_does_not_fit() -> None:
    kernels, x, weight = CpuKernels(), torch.zeros(3, 16), torch.ones(16)
    with pytest.raises(ValueError, match=r"^x:"):
        kernels.rms_norm(x.t(), weight, EPS)
    with pytest.raises(ValueError, match=r"^weight:"):
        kernels.rms_norm(x, weight[1:], EPS)
    with pytest.raises(ValueError, match=r"^weight:"):
        kernels.add_rms_norm(x, x.clone(), weight.bfloat16(), EPS)
    with pytest.raises(ValueError, match=r"^residual:"):
        kernels.add_rms_norm(x, x[1:], weight, EPS)
    with pytest.raises(ValueError, match=r"^gate_up:"):
        kernels.silu_and_mul(x[:, 1:])
    with pytest.raises(ValueError, match=r"^x:"):
        kernels.rms_norm(x.half(), weight.half(), EPS)
    with pytest.raises(ValueError, match=r"^x:"):
        kernels.linear(x)(x[:, 1:])
    with pytest.raises(ValueError, match=r"^weight:"):
        kernels.linear(weight)
    with pytest.raises(ValueError, match=r"^bias:"):
        kernels.linear(x.bfloat16(), weight.bfloat16())
