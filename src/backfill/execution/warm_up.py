"""Steps that a new executor runs before any request: libraries do slow work on their first use."""

from __future__ import annotations

from backfill.core.block import SlotCopy, pack_block_ref
from backfill.core.plan import (
    AdmittedRequest,
    BlockCopies,
    Compute,
    CopyDirections,
    ScheduledSlice,
    StepPlan,
)
from backfill.core.request import RequestId
from backfill.core.sampling import SamplingParams
from backfill.execution.torch_executor import TorchExecutor


def warm_up(executor: TorchExecutor) -> None:
    """Run one prefill and one decode step."""
    info = executor.info
    num_tokens = min(64, info.max_model_len - 1, info.num_blocks * info.block_size - 1)
    if num_tokens < 1:
        return
    request_id = RequestId("warm-up")
    blocks = tuple(pack_block_ref(index) for index in range(-(-(num_tokens + 1) // info.block_size)))
    admitted = AdmittedRequest(request_id, (0,) * num_tokens, SamplingParams(max_tokens=2, temperature=0.0))
    prefill = ScheduledSlice(request_id, 0, num_tokens, blocks, samples=True)
    decode = prefill._replace(start=num_tokens, num_tokens=1)
    executor.run(StepPlan(step=0, work=Compute((prefill,)), admitted=(admitted,)))
    executor.run(StepPlan(step=1, work=Compute((decode,))))
    executor.run(StepPlan(step=2, work=Compute(slices=()), released=(request_id,)))


def warm_up_slot_copies(executor: TorchExecutor) -> None:
    """Copy slots both ways: on CUDA the first copies allocate buffers and compile kernels.

    There is a kernel for each power of two that the values of a head's slots are padded to, so the numbers of
    slots are powers of two, and the largest one.
    """
    size, both = executor.info.block_size, CopyDirections.CHECKPOINT | CopyDirections.RESTORE
    for num in {*(1 << exponent for exponent in range(size.bit_length())), size}:
        slots = (SlotCopy(0, 0, 0, num),)
        copies = BlockCopies(blocking=both, slot_checkpoint=slots, slot_restore=slots)
        executor.run(StepPlan(step=0, work=Compute(slices=()), copies=copies))
