"""How fast KV blocks are copied between the two pools, and what the copies cost the steps beside them.

    python benchmarks/kv_copies.py
    python benchmarks/kv_copies.py --only-slots

Copies of 1, 4 and 8 slots of SmolLM2-135M's blocks are timed beside one thread's memcpy of as many
consecutive bytes each, without a model. Then come the blocks of a real one. Copies alone are timed in both
directions, into new and into touched memory, and compared with one thread's memcpy of the same blocks. Steps
of 64 decodes alternate between copies of 0, 1, 4, 16 and 64 blocks that begin with the step.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from in_process import restart_in_engine_environment

from backfill.core.block import BlockCopy, KVLayout, SlotCopy, pack_block_ref
from backfill.core.config import EngineConfig, SchedulerConfig
from backfill.core.plan import (
    AdmittedRequest,
    BlockCopies,
    Compute,
    CopyDirections,
    ScheduledSlice,
    StepPlan,
    WaitForCopies,
)
from backfill.core.request import RequestId
from backfill.core.sampling import SamplingParams
from backfill.execution.copies import BlockCopier, create_copier
from backfill.execution.create import create_torch_executor
from backfill.execution.pool_pair import CompletedCopies, CpuPools
from backfill.execution.torch_executor import TorchExecutor
from backfill.kernels import cpu_copies
from backfill.kernels.slots import SlotRange
from backfill.models.resolve import resolve_model

_NUM_DECODES, _CONTEXT = 64, 256
_COPIES_PER_STEP = (0, 1, 4, 16, 64)
_COPIED_ALONE = 1024
_LAYOUT = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype_bytes=2)
_NUMS_OF_SLOTS = (1, 4, 8)
_SLOT_COPIES = 48  # timed together
_SLOT_POOL_BYTES = 1 << 30


class TimedCopier:
    """A copier that adds up the seconds that the step's own thread spends in it."""

    def __init__(self, copier: BlockCopier) -> None:
        self._copier = copier
        self.spent_s = 0.0

    def begin(self, copies: BlockCopies) -> None:
        began = time.perf_counter()
        self._copier.begin(copies)
        self.spent_s += time.perf_counter() - began

    def take_completed(self) -> CompletedCopies:
        began = time.perf_counter()
        completed = self._copier.take_completed()
        self.spent_s += time.perf_counter() - began
        return completed

    def wait(self, timeout_s: float) -> None:
        self._copier.wait(timeout_s)

    def close(self) -> None:
        self._copier.close()


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def memcpy_bytes_per_s(num_bytes: int, block_bytes: int, rounds: int) -> float:
    """Of one thread that copies blocks in random order with the C library's memcpy."""
    source, target = (torch.full((num_bytes // block_bytes, block_bytes), 1, dtype=torch.uint8).numpy()
                      for _ in range(2))  # fmt: skip
    order = list(range(len(source)))
    samples = []
    for _ in range(rounds):
        random.shuffle(order)
        pairs = [(memoryview(target[a]), memoryview(source[b])) for a, b in enumerate(order)]

        def copy_all(pairs: list[tuple[memoryview, memoryview]] = pairs) -> None:
            for to, of in pairs:
                to[:] = of

        samples.append(len(order) * block_bytes / seconds(copy_all))
    return statistics.median(samples)


def alone(executor: TorchExecutor, rounds: int) -> dict[str, float]:
    """Bytes per second of each direction, with nothing running beside it."""
    info = executor.info
    count = min(_COPIED_ALONE, info.num_blocks, info.num_host_blocks)
    fresh = create_copier(executor._kv_pool, info.num_host_blocks)
    pairs = tuple(map(BlockCopy, random.sample(range(info.num_blocks), count),
                      random.sample(range(info.num_host_blocks), count)))  # fmt: skip
    checkpoint = BlockCopies(checkpoint=pairs, blocking=CopyDirections.CHECKPOINT)
    restore = BlockCopies(restore=pairs, blocking=CopyDirections.RESTORE)
    volume = count * info.block_bytes
    first = volume / seconds(lambda: fresh.begin(checkpoint))
    speeds = {"to_host_untouched": first}
    for name, begin in (
        ("to_host", lambda: fresh.begin(checkpoint)),
        ("to_device", lambda: fresh.begin(restore)),
    ):
        speeds[name] = statistics.median(volume / seconds(begin) for _ in range(rounds))
    fresh.close()
    return speeds


def slot_copies(rounds: int) -> list[dict[str, object]]:
    """Seconds of each copy of some slots, alone, in turn with one thread's memcpy of as many bytes.

    Blocks are random ones of pools that no cache holds. In ``through_thread`` the copier's thread copies, and
    the copies are waited for.
    """
    num_blocks = _SLOT_POOL_BYTES // _LAYOUT.block_bytes
    device, host = (torch.full(_LAYOUT.shape(num_blocks), 1.0, dtype=torch.bfloat16) for _ in range(2))
    packed = torch.ones(_SLOT_COPIES * _LAYOUT.block_bytes // 2, dtype=torch.bfloat16)
    copier = BlockCopier(CpuPools(device, host))
    found: list[dict[str, object]] = []
    for num in _NUMS_OF_SLOTS:
        num_bytes = _LAYOUT.block_bytes // _LAYOUT.block_size * num
        samples: dict[str, list[float]] = {}
        for _ in range(rounds):
            for name, call in _slot_cases(device, host, packed, copier, num, num_bytes).items():
                samples.setdefault(name, []).append(seconds(call) / _SLOT_COPIES)
        times = {name: statistics.median(of_name) for name, of_name in samples.items()}
        times["memcpy"] -= times.pop("call")
        found.append({"slots": num, "bytes": num_bytes, "seconds": times})
    copier.close()
    return found


def _slot_cases(
    device: torch.Tensor,
    host: torch.Tensor,
    packed: torch.Tensor,
    copier: BlockCopier,
    num: int,
    num_bytes: int,
) -> dict[str, Callable[[], object]]:
    """What is timed, each with blocks of its own."""

    def draw() -> tuple[list[int], list[SlotRange]]:
        blocks = random.sample(range(len(device)), 2 * _SLOT_COPIES)
        first = [random.randint(0, _LAYOUT.block_size - num) for _ in range(_SLOT_COPIES)]
        ranges = [SlotRange(*each, num) for each in zip(blocks[_SLOT_COPIES:], first, strict=True)]
        return blocks[:_SLOT_COPIES], ranges

    def memcpy(size: int) -> Callable[[], None]:
        blocks, ranges = draw()
        pairs = [
            (host[to].data_ptr(), device[of.block].data_ptr()) for to, of in zip(blocks, ranges, strict=True)
        ]

        def copy_all() -> None:
            for to, of in pairs:
                ctypes.memmove(to, of, size)

        return copy_all

    through = tuple(SlotCopy(of.block, to, of.first, num) for to, of in zip(*draw(), strict=True))
    through_thread = BlockCopies(slot_checkpoint=through, blocking=CopyDirections.CHECKPOINT)
    (to_host, of_device), (to_device, of_host) = draw(), draw()
    (_, gathered), (_, scattered) = draw(), draw()
    return {
        "memcpy": memcpy(num_bytes),
        "call": memcpy(0),
        "to_host": lambda: cpu_copies.copy_slots(host, to_host, device, of_device),
        "to_device": lambda: cpu_copies.copy_slots(device, to_device, host, of_host),
        "gather": lambda: cpu_copies.gather_slots(device, gathered, packed),
        "scatter": lambda: cpu_copies.scatter_slots(packed, host, scattered),
        "through_thread": lambda: copier.begin(through_thread),
    }


def print_slots(found: list[dict[str, object]]) -> None:
    for each in found:
        times = each["seconds"]
        assert isinstance(times, dict)
        limit = times["memcpy"]
        others = ", ".join(f"{name} {value / limit:.2f}" for name, value in times.items() if name != "memcpy")
        print(f"{each['slots']} slots: memcpy {1e6 * limit:.1f} us; times of it: {others}")
    print(json.dumps({"benchmark": "slot_copies", "copies": found}))


def decode_step(executor: TorchExecutor) -> StepPlan:
    """Decodes in the pool's first blocks. None samples, so the plan can run any number of times."""
    blocks_each = -(-(_CONTEXT + 1) // executor.info.block_size)
    slices = tuple(
        ScheduledSlice(
            RequestId(f"r{index}"),
            _CONTEXT,
            1,
            tuple(pack_block_ref(index * blocks_each + block) for block in range(blocks_each)),
            samples=False,
        )
        for index in range(_NUM_DECODES)
    )
    tokens, sampling = (5,) * (_CONTEXT + 1), SamplingParams(max_tokens=1)
    admitted = tuple(AdmittedRequest(scheduled.request_id, tokens, sampling) for scheduled in slices)
    executor.run(StepPlan(step=0, work=Compute(slices=()), admitted=admitted))
    return StepPlan(step=0, work=Compute(slices))


def drain(executor: TorchExecutor, in_flight: int) -> None:
    idle = StepPlan(step=0, work=WaitForCopies())
    while in_flight:
        in_flight -= len(executor.run(idle).completed_copies)


def beside_steps(executor: TorchExecutor, copier: TimedCopier, rounds: int) -> list[dict[str, object]]:
    """For each direction and number of copies, the step's time over that without copies in the same round."""
    info, plan = executor.info, decode_step(executor)
    first_unused = _NUM_DECODES * len(plan.slices[0].blocks)
    unused = range(first_unused, info.num_blocks)
    cases = [("none", 0)]
    cases += [(name, count) for name in ("checkpoint", "restore") for count in _COPIES_PER_STEP]
    ratios: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    own_s: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    left: dict[tuple[str, int], list[int]] = {case: [] for case in cases}
    plain_s = []
    for _ in range(rounds):
        random.shuffle(cases)
        times = {}
        for case in cases:
            name, count = case
            copies = tuple(map(BlockCopy, random.sample(unused, count),
                               random.sample(range(info.num_host_blocks), count)))  # fmt: skip
            checkpoint, restore = (copies, ()) if name == "checkpoint" else ((), copies)
            with_copies = replace(plan, copies=BlockCopies(checkpoint, restore))
            copier.spent_s = 0.0
            began = time.perf_counter()
            outcome = executor.run(with_copies)
            times[case] = time.perf_counter() - began
            own_s[case].append(copier.spent_s)
            left[case].append(count - len(outcome.completed_copies))
            drain(executor, left[case][-1])
        plain_s.append(times["none", 0])
        for case in cases:
            ratios[case].append(times[case] / times["none", 0])
    step_s = statistics.median(plain_s)
    return [
        {
            "kind": case[0], "blocks": case[1], "over_plain": statistics.median(ratios[case]),
            "begin_and_take_us": 1e6 * statistics.median(own_s[case]),
            "left_at_step_end": statistics.median(left[case]), "plain_step_s": step_s,
        }
        for case in sorted(ratios)
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--only-slots", action="store_true")
    options = parser.parse_args()
    restart_in_engine_environment()
    random.seed(0)
    print_slots(slot_copies(options.rounds))
    if options.only_slots:
        return
    executor = create_torch_executor(
        EngineConfig(
            model_dir=str(resolve_model(options.model)),
            host_kv_gib=1.0,
            scheduler=SchedulerConfig(checkpointing="adaptive"),
        )
    )
    executor.fill_kv_pool(executor.info.num_blocks)
    info = executor.info
    volume = _COPIED_ALONE * info.block_bytes
    limit = memcpy_bytes_per_s(volume, info.block_bytes, rounds=8) if info.device == "cpu" else None
    speeds = alone(executor, rounds=8)
    assert executor._copier is not None
    # Touch the whole host pool: the first copy into a page is slower.
    everything = tuple(BlockCopy(index % info.num_blocks, index) for index in range(info.num_host_blocks))
    executor._copier.begin(BlockCopies(everything, blocking=CopyDirections.CHECKPOINT))
    copier = TimedCopier(executor._copier)
    executor._copier = copier
    steps = beside_steps(executor, copier, options.rounds)
    print(f"block {info.block_bytes / 2**20:.2f} MiB; GB/s: " + ", ".join(
        f"{name} {speed / 1e9:.1f}" for name, speed in speeds.items())
        + ("" if limit is None else f", memcpy {limit / 1e9:.1f}"))  # fmt: skip
    for case in steps:
        print(f"{case['kind']:>10} {case['blocks']:3} blocks: step {case['over_plain']:.3f}, own thread "
              f"{case['begin_and_take_us']:.0f} us, left {case['left_at_step_end']:.0f}")  # fmt: skip
    print(json.dumps({
        "benchmark": "kv_copies", "block_bytes": info.block_bytes, "bytes_per_s": speeds,
        "memcpy_bytes_per_s": limit, "beside_steps": steps,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
