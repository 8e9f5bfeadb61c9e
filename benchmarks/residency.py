"""Offline throughput and online latency: fixed offloading intervals, and one that is chosen while serving.

Simulated, on the virtual clock: a device with 32 layers of 1 ms in a step of few tokens, weights of 32 MiB a
layer, and KV blocks of 1 MiB. All settings divide the same memory. Offline requests wait all the time; online
requests come every two seconds, or with a seed at random as often, in phases.

Usage: residency.py [--transfer-ms 8] [--blocks 64] [--seconds 240] [--phase 40] [--tpot-ms 45] [--seed 1]
[--chats 8] [--prefix 800]. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from backfill.core.clock import VirtualClock
from backfill.core.config import SchedulerConfig
from backfill.core.measured_on import MeasuredOn
from backfill.core.request import Request, RequestId, ServiceClass
from backfill.core.sampling import SamplingParams
from backfill.core.slo import SLO
from backfill.costs.behaviour import DeviceBehaviour
from backfill.costs.model import CostModel, PiecewiseLinear
from backfill.costs.profile import CopySpeed, CostProfile, FitError
from backfill.engine.engine import Engine
from backfill.execution.executor import ExecutorInfo
from backfill.execution.simulated_executor import SimulatedExecutor
from backfill.offloading.interval import step_bounds
from backfill.offloading.residency import residencies
from backfill.scheduling.prediction import StreamedCost

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


@dataclass(frozen=True)
class Device:
    """Seconds for a layer's weights; KV blocks with the largest interval."""

    transfer_s: float
    num_blocks: int


@dataclass(frozen=True)
class Load:
    """Seconds; ``seed`` is None for online requests at even intervals, which ``num_chats`` send in turn.

    ``prefix`` is the tokens that a chat begins with each time; without any no two prompts are alike.
    """

    seconds: float
    phase_s: float
    slo: SLO
    seed: int | None
    num_chats: int
    prefix: int


@dataclass(frozen=True)
class Outcome:
    """
    Attributes:
        offline: output tokens a second.
        kept: share of the gaps between online tokens that kept to the objective.
        p99_gap_ms: of online requests.
        mean_ttft_s: of theirs.
        num_late_while_draining: late gaps that began or ended while the pool was drained.
        num_changes: how often memory was divided anew, or was about to be.
    """

    offline: float
    kept: float
    p99_gap_ms: float
    mean_ttft_s: float
    num_late: int
    num_late_while_draining: int
    preemptions: int
    num_changes: int


def serve(device: Device, interval: int, min_interval: int | None, load: Load) -> Outcome:
    clock = VirtualClock()
    engine = _create_engine(device, interval, min_interval, clock)
    draining_at_s = set[float]()
    arrived_at_s: dict[RequestId, float] = {}
    tokens_at_s: dict[RequestId, list[float]] = {}
    num_offline = num_online = num_tokens = num_changes = 0
    next_online_s, num_blocks, rng = 0.0, engine.scheduler.kv.num_blocks, random.Random(load.seed)
    while clock.now_s() < load.seconds:
        waiting = engine.scheduler.count_by_class()[ServiceClass.OFFLINE][1]
        for _ in range(64 - waiting):
            engine.add(_request(f"offline-{num_offline}", 100, 400, clock.now_s(), None))
            num_offline += 1
        if clock.now_s() >= next_online_s:
            if next_online_s % (2 * load.phase_s) < load.phase_s:
                name = f"online-{num_online}"
                chat = _tokens(f"chat-{num_online % load.num_chats}", load.prefix)
                engine.add(_request(name, 50, 100, clock.now_s(), load.slo, chat))
                arrived_at_s[RequestId(name)] = clock.now_s()
                num_online += 1
            next_online_s += 2.0 if load.seed is None else rng.expovariate(0.5)
        for output in engine.step():
            if output.request_id.startswith("online"):
                tokens_at_s.setdefault(output.request_id, []).append(clock.now_s())
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
    return Outcome(
        offline=round(num_tokens / clock.now_s(), 1),
        kept=round(1.0 - len(late) / len(gaps), 4),
        p99_gap_ms=round(1e3 * gaps[int(0.99 * len(gaps))], 1),
        mean_ttft_s=round(
            statistics.fmean(each[0] - arrived_at_s[name] for name, each in tokens_at_s.items()), 3
        ),
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
        min_offload_interval=min_interval,
        layer_bytes=_LAYER_BYTES,
    )
    behaviour = DeviceBehaviour(
        _COST, copies=_COPIES, layer_transfer_s=device.transfer_s, layer_bytes=_LAYER_BYTES
    )
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
    return Engine(config, SimulatedExecutor(info, behaviour, clock), clock, profile)


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
    options = parser.parse_args()
    device = Device(options.transfer_ms / 1e3, options.blocks)
    slo = SLO(ttft_s=1.0, tpot_s=options.tpot_ms / 1e3)
    load = Load(options.seconds, options.phase, slo, options.seed, options.chats, options.prefix)
    settings: list[tuple[int, int | None]] = [(each, None) for each in (8, 5, 4, 3, 2)]
    settings.append((8, 2))
    found = {}
    print(
        f"{'interval':>10} {'offline tokens/s':>17} {'in time':>8} {'P99 gap, ms':>12} {'TTFT, s':>8} "
        f"{'changes':>8}"
    )
    for interval, least in settings:
        name = str(interval) if least is None else f"{least} to {interval}"
        outcome = serve(device, interval, least, load)
        found[name] = asdict(outcome)
        kept = f"{outcome.kept:.1%}"
        print(
            f"{name:>10} {outcome.offline:>17.0f} {kept:>8} {outcome.p99_gap_ms:>12.1f} "
            f"{outcome.mean_ttft_s:>8.2f} {outcome.num_changes:>8}"
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
