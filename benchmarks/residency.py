"""Offline throughput and online latency: fixed offloading intervals, and one that is chosen while serving.

Simulated, on the virtual clock: a device with 32 layers of 1 ms in a step of few tokens, weights of 32 MiB a
layer, and KV blocks of 1 MiB. All settings divide the same memory. Offline requests wait all the time; online
requests come every two seconds, or with a seed at random as often, in phases. With ``--think`` each chat asks
again some time after its answer, and the prefix cache is kept for online requests in three ways: as weighed
against offline work (``KeptCache``), as much as is used again (reuse), or not at all (none).

Usage: residency.py [--transfer-ms 8] [--blocks 64] [--seconds 240] [--phase 40] [--tpot-ms 45] [--seed 1]
[--ttft-ms 1000] [--chats 8] [--prefix 800] [--answer 100] [--think 20]. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import random
import statistics
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal, get_args

import clone  # noqa: F401

from backfill.core.clock import VirtualClock
from backfill.core.config import SchedulerConfig
from backfill.core.measured_on import MeasuredOn
from backfill.core.request import Request, RequestId, ServiceClass
from backfill.core.sampling import SamplingParams
from backfill.core.slo import SLO
from backfill.costs.model import CostModel, PiecewiseLinear
from backfill.costs.profile import CopySpeed, CostProfile, FitError
from backfill.engine.engine import Engine
from backfill.execution.executor import ExecutorInfo
from backfill.offloading.interval import step_bounds
from backfill.offloading.residency import residencies
from backfill.scheduling.prediction import StreamedCost
from experiments.layered_device import LayeredDevice, LayeredExecutor

_NUM_LAYERS, _LAYER_BYTES, _BLOCK_BYTES = 32, 32 << 20, 1 << 20
_LARGEST, _NUM_HOST_BLOCKS = 8, 2000
_COST = CostModel(
    rows_s=PiecewiseLinear((1.0, 1000.0), (0.032, 0.082)),
    sampled_s=PiecewiseLinear((0.0, 1.0), (0.0, 0.0)),
    request_s=0.0,
    prefill_pair_s=0.0,
    prefill_context_s=1e-7,
    decode_context_s=1e-7,
)
_COPIES = CopySpeed(1e10, 1e10)

CacheRule = Literal["weighed", "reuse", "none"]


@dataclass(frozen=True)
class Device:
    """Seconds for a layer's weights; KV blocks with the largest interval."""

    transfer_s: float
    num_blocks: int


@dataclass(frozen=True)
class Load:
    """Seconds; ``seed`` is None for online requests at even intervals, which ``num_chats`` send in turn.

    ``prefix`` is the tokens that a chat begins with each time; without any no two prompts are alike. With
    ``think_s``, the mean time from a chat's answer to its next request, chats do not send in turn.
    """

    seconds: float
    phase_s: float
    slo: SLO
    seed: int | None
    num_chats: int
    prefix: int
    num_output: int
    think_s: float | None


@dataclass(frozen=True)
class Outcome:
    """
    Attributes:
        offline: output tokens a second.
        kept: share of the gaps between online tokens that kept to the objective.
        p99_gap_ms: of online requests.
        mean_ttft_s: of theirs.
        first_in_time: share of the first tokens that kept to the objective.
        num_late_while_draining: late gaps that began or ended while the pool was drained.
        num_changes: how often memory was divided anew, or was about to be.
    """

    offline: float
    kept: float
    p99_gap_ms: float
    mean_ttft_s: float
    first_in_time: float
    num_late: int
    num_late_while_draining: int
    preemptions: int
    num_changes: int


class OnlineArrivals:
    """When online requests come, in the phases that have any, and of which chat."""

    def __init__(self, load: Load) -> None:
        self._load, self._rng, self._num = load, random.Random(load.seed), 0
        self._due: list[tuple[float, int]] = [(0.0, 0)]
        if load.think_s is not None:
            self._due = [(self._rng.uniform(0.0, load.think_s), chat) for chat in range(load.num_chats)]
            heapq.heapify(self._due)
        self._chat_of: dict[RequestId, int] = {}

    def take(self, now_s: float) -> list[Request]:
        """Those that have come."""
        load, taken = self._load, list[Request]()
        while self._due and self._due[0][0] <= now_s:
            at_s, chat = heapq.heappop(self._due)
            is_in_phase = at_s % (2 * load.phase_s) < load.phase_s
            if load.think_s is None:
                next_s = 2.0 if load.seed is None else self._rng.expovariate(0.5)
                chat = self._num % load.num_chats
                heapq.heappush(self._due, (at_s + next_s, 0))
            elif not is_in_phase:  # the chat waits for the next one
                begins_s = (at_s // (2 * load.phase_s) + 1) * 2 * load.phase_s
                heapq.heappush(self._due, (begins_s + self._rng.uniform(0.0, load.think_s), chat))
            if is_in_phase:
                prefix = _tokens(f"chat-{chat}", load.prefix)
                taken.append(_request(f"online-{self._num}", 50, load.num_output, now_s, load.slo, prefix))
                self._chat_of[taken[-1].request_id] = chat
                self._num += 1
        return taken

    def end(self, request_id: RequestId, now_s: float) -> None:
        """The chat has its answer."""
        if self._load.think_s is not None:
            again_s = now_s + self._rng.expovariate(1.0 / self._load.think_s)
            heapq.heappush(self._due, (again_s, self._chat_of[request_id]))


def serve(
    device: Device, interval: int, min_interval: int | None, load: Load, cache: CacheRule = "weighed"
) -> Outcome:
    clock, arrivals = VirtualClock(), OnlineArrivals(load)
    engine = _create_engine(device, interval, min_interval, clock)
    if cache != "weighed":
        engine.scheduler._planner._kept_cache = None
        engine.scheduler.kv.protection.max_blocks = math.inf if cache == "reuse" else 0.0
    draining_at_s = set[float]()
    arrived_at_s: dict[RequestId, float] = {}
    tokens_at_s: dict[RequestId, list[float]] = {}
    num_offline = num_tokens = num_changes = 0
    num_blocks = engine.scheduler.kv.num_blocks
    while clock.now_s() < load.seconds:
        waiting = engine.scheduler.count_by_class()[ServiceClass.OFFLINE][1]
        for _ in range(64 - waiting):
            engine.add(_request(f"offline-{num_offline}", 100, 400, clock.now_s(), None))
            num_offline += 1
        for request in arrivals.take(clock.now_s()):
            engine.add(request)
            arrived_at_s[request.request_id] = clock.now_s()
        for output in engine.step():
            if output.request_id in arrived_at_s:
                tokens_at_s.setdefault(output.request_id, []).append(clock.now_s())
                if output.finish_reason is not None:
                    arrivals.end(output.request_id, clock.now_s())
            else:
                num_tokens += output.token_id is not None
        stats = engine.stats()
        if stats.num_draining_blocks:
            draining_at_s.add(clock.now_s())
        num_changes += stats.num_blocks != num_blocks
        num_blocks = stats.num_blocks
        clock.advance(0.8e-3)
    pairs = [pair for each in tokens_at_s.values() for pair in itertools.pairwise(each)]
    late = [(a, b) for a, b in pairs if b - a > load.slo.tpot_s]
    gaps = sorted(b - a for a, b in pairs)
    ttfts_s = [each[0] - arrived_at_s[name] for name, each in tokens_at_s.items()]
    return Outcome(
        offline=round(num_tokens / clock.now_s(), 1),
        kept=round(1.0 - len(late) / len(gaps), 4),
        p99_gap_ms=round(1e3 * gaps[int(0.99 * len(gaps))], 1),
        mean_ttft_s=round(statistics.fmean(ttfts_s), 3),
        first_in_time=round(sum(each <= load.slo.ttft_s for each in ttfts_s) / len(arrived_at_s), 4),
        num_late=len(late),
        num_late_while_draining=sum(not draining_at_s.isdisjoint(pair) for pair in late),
        preemptions=engine.scheduler.counters[ServiceClass.OFFLINE].num_preemptions,
        num_changes=num_changes,
    )


def _create_engine(device: Device, interval: int, min_interval: int | None, clock: VirtualClock) -> Engine:
    every = residencies(_NUM_LAYERS, 1, _LARGEST, device.num_blocks, _LAYER_BYTES, _BLOCK_BYTES)
    info = ExecutorInfo(
        num_blocks=next(each.num_blocks for each in every if each.interval >= interval),
        block_size=16,
        max_model_len=2048,
        vocab_size=32_000,
        end_token_ids=(),
        device="simulated",
        dtype="bfloat16",
        num_layers=_NUM_LAYERS,
        num_host_blocks=_NUM_HOST_BLOCKS,
        block_bytes=_BLOCK_BYTES,
        offload_interval=interval,
        layer_bytes=_LAYER_BYTES,
    )
    if min_interval is not None:
        sizes = info.num_blocks, _LAYER_BYTES, _BLOCK_BYTES
        info = replace(info, residencies=residencies(_NUM_LAYERS, min_interval, interval, *sizes))
    layered = LayeredDevice(_COST, copies=_COPIES, layer_transfer_s=device.transfer_s)
    profile = CostProfile(
        key=MeasuredOn("made up", "simulated", "bfloat16"),
        quality="full",
        num_layers=_NUM_LAYERS,
        # As it would be measured with the interval.
        cost=StreamedCost.of(_COST, step_bounds(_NUM_LAYERS, interval, device.transfer_s)),
        error=FitError(0.01, 0.02, 3),
        known_tokens=8192,
        known_chunk_tokens=8192,
        copies=_COPIES,
        provenance="made up",
    )
    config = SchedulerConfig(policy="slo", checkpointing="adaptive")
    return Engine(config, LayeredExecutor(info, layered, clock), clock, profile)


def _tokens(name: str, count: int) -> list[int]:
    first = zlib.crc32(name.encode()) % 31_000
    return [(first + index) % 32_000 for index in range(count)]


def _request(
    name: str, num_prompt: int, num_output: int, now_s: float, slo: SLO | None, begins: Sequence[int] = ()
) -> Request:
    return Request(
        request_id=RequestId(name),
        prompt_token_ids=[*begins, *_tokens(name, num_prompt)],
        sampling=SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True),
        service_class=ServiceClass.OFFLINE if slo is None else ServiceClass.ONLINE,
        arrived_at_s=now_s,
        slo=slo,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--transfer-ms", type=float, default=8.0, help="of the weights of one layer")
    parser.add_argument("--blocks", type=int, default=64, help="of KV, with interval 8")
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--phase", type=float, default=40.0, help="seconds with online requests, and without")
    parser.add_argument("--tpot-ms", type=float, default=45.0, help="objective of the online requests")
    parser.add_argument("--seed", type=int, help="of online arrivals; at even intervals without it")
    parser.add_argument("--chats", type=int, default=8, help="that online requests belong to, in turn")
    parser.add_argument(
        "--prefix", type=int, default=0, help="tokens that each request of a chat begins with"
    )
    parser.add_argument("--ttft-ms", type=float, default=1000.0, help="objective of the online requests")
    parser.add_argument("--answer", type=int, default=100, help="tokens of each answer to an online request")
    parser.add_argument("--think", type=float, help="mean seconds from a chat's answer to its next request")
    options = parser.parse_args()
    device = Device(options.transfer_ms / 1e3, options.blocks)
    slo = SLO(ttft_s=options.ttft_ms / 1e3, tpot_s=options.tpot_ms / 1e3)
    load = Load(
        options.seconds,
        options.phase,
        slo,
        options.seed,
        options.chats,
        options.prefix,
        options.answer,
        options.think,
    )
    intervals: list[tuple[int, int | None]] = [(each, None) for each in (8, 5, 4, 3, 2)]
    intervals.append((8, 2))
    rules: Sequence[CacheRule] = ("weighed",) if options.think is None else get_args(CacheRule)
    found = {}
    print(
        f"{'interval':>10} {'cache':>8} {'offline tokens/s':>17} {'in time':>8} {'P99 gap, ms':>12} "
        f"{'TTFT, s':>8} {'in time':>8} {'changes':>8}"
    )
    for (interval, least), rule in itertools.product(intervals, rules):
        name = str(interval) if least is None else f"{least} to {interval}"
        outcome = serve(device, interval, least, load, rule)
        found[name if len(rules) == 1 else f"{name}, {rule}"] = asdict(outcome)
        kept, first = f"{outcome.kept:.1%}", f"{outcome.first_in_time:.1%}"
        print(
            f"{name:>10} {rule:>8} {outcome.offline:>17.0f} {kept:>8} {outcome.p99_gap_ms:>12.1f} "
            f"{outcome.mean_ttft_s:>8.2f} {first:>8} {outcome.num_changes:>8}"
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
