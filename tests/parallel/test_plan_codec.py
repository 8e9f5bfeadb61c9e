"""Plans and outcomes come out of their codecs as they went in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from backfill.core.block import BlockCopy, BlockMove, BlockRef, SlotCopy
from backfill.core.plan import (
    AdmittedRequest,
    BlockCopies,
    Compute,
    CopyDirections,
    DeviceMemory,
    RankTiming,
    Resume,
    Safepoints,
    SampledToken,
    ScheduledSlice,
    StepOutcome,
    StepPlan,
    TokenLogprobs,
    WaitForCopies,
    WeightTransfers,
    Work,
)
from backfill.core.request import RequestId
from backfill.core.sampling import SamplingParams
from backfill.parallel.messages import StepDone, outcome_of, sampled_of, step_done
from backfill.parallel.plan_codec import PlanDecoder, PlanEncoder, Sampled
from tests.shared import examples

IDS = st.sampled_from([RequestId(name) for name in "abcdef"])
NUMBERS = st.integers(0, 2000)
TABLES = st.lists(NUMBERS.map(BlockRef), max_size=5).map(tuple)
SAFEPOINTS = st.builds(Safepoints, st.integers(1, 9), st.booleans())
BLOCK_COPIES = st.lists(st.builds(BlockCopy, NUMBERS, NUMBERS), max_size=2).map(tuple)
SLOT_COPIES = st.lists(st.builds(SlotCopy, NUMBERS, NUMBERS, NUMBERS, NUMBERS), max_size=2).map(tuple)
DIRECTIONS = st.integers(0, 3).map(CopyDirections)
COPIES = st.builds(BlockCopies, BLOCK_COPIES, BLOCK_COPIES, DIRECTIONS, SLOT_COPIES, SLOT_COPIES)
SAMPLING = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 9),
    temperature=st.floats(0, 2),
    stop_token_ids=st.lists(NUMBERS, max_size=2).map(tuple),
    logit_bias=st.dictionaries(NUMBERS, st.floats(-9, 9), max_size=2),
)
ADMITTED = st.builds(AdmittedRequest, IDS, st.lists(NUMBERS, min_size=1, max_size=4).map(tuple), SAMPLING)
SAMPLED = st.lists(st.builds(SampledToken, IDS, NUMBERS), max_size=4)
SLICES = st.lists(
    st.builds(ScheduledSlice, IDS, NUMBERS, st.integers(1, 9), TABLES, st.booleans(), st.booleans()),
    max_size=4,
    unique_by=lambda scheduled: scheduled.request_id,
).map(tuple)
OTHERS: dict[str, st.SearchStrategy[Any]] = {
    "admitted": st.lists(ADMITTED, max_size=2).map(tuple),
    "released": st.lists(IDS, max_size=2).map(tuple),
    "copies": COPIES,
    "offload_interval": st.none() | st.integers(1, 9),
    "memory": st.none() | st.builds(DeviceMemory, NUMBERS, NUMBERS),
    "moves": st.lists(st.builds(BlockMove, NUMBERS, NUMBERS), max_size=2).map(tuple),
    "dropped": st.lists(IDS, max_size=2).map(tuple),
    "bus_share": st.none() | st.floats(0, 1),
}


def sampling_ids(plan: StepPlan) -> tuple[RequestId, ...]:
    return tuple(scheduled.request_id for scheduled in plan.slices if scheduled.samples)


def _with_tuples(plan: StepPlan) -> StepPlan:
    """A decoded table is a list, which may grow."""
    if isinstance(plan.work, WaitForCopies):
        return plan
    slices = tuple(each._replace(blocks=tuple(each.blocks)) for each in plan.slices)
    return replace(plan, work=replace(plan.work, slices=slices))


class Codec(RuleBasedStateMachine):
    """Any plans, and those that follow the plan before as decodes do."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoders = PlanEncoder(), [PlanDecoder(), PlanDecoder()]
        self.slices: list[tuple[ScheduledSlice, ...]] = [(), ()]  # of the last steps
        self.step = 0

    def send(self, work: Work, sampled: Sequence[SampledToken], **others: Any) -> int:
        plan = StepPlan(self.step, work, **others)
        self.step += 1
        columns = Sampled(*zip(*((each.request_id, each.token_id) for each in sampled), strict=True))
        data = self.encoder.encode(plan, columns)
        for decoder in self.decoders:
            decoded, tokens = decoder.decode(data)
            assert _with_tuples(decoded) == plan
            assert tokens == [(each.request_id, each.token_id) for each in sampled]
        if not isinstance(work, WaitForCopies):
            self.slices = [work.slices, self.slices[0]]
        return len(data)

    @rule(slices=SLICES, points=st.none() | SAFEPOINTS, sampled=SAMPLED, data=st.data())
    def compute(
        self,
        slices: tuple[ScheduledSlice, ...],
        points: Safepoints | None,
        sampled: list[SampledToken],
        data: st.DataObject,
    ) -> None:
        others = {name: data.draw(strategy) for name, strategy in OTHERS.items() if data.draw(st.booleans())}
        self.send(Compute(slices, 0.5, points), sampled, **others)

    @rule(slices=SLICES, points=SAFEPOINTS, num_layers=st.integers(1, 9), sampled=SAMPLED)
    def resume(
        self,
        slices: tuple[ScheduledSlice, ...],
        points: Safepoints,
        num_layers: int,
        sampled: list[SampledToken],
    ) -> None:
        self.send(Resume(slices, num_layers, 0.25, points), sampled)

    @rule()
    def wait(self) -> None:
        self.send(WaitForCopies(), ())

    @rule(ago=st.integers(0, 1), new_block=st.none() | NUMBERS)
    def decode(self, ago: int, new_block: int | None) -> None:
        last = self.slices[ago]
        sampled = [SampledToken(each.request_id, 5) for each in last]
        tail = () if new_block is None else (BlockRef(new_block),)
        slices = tuple(
            each._replace(
                start=each.start + each.num_tokens, blocks=(*each.blocks, *tail) if tail else each.blocks
            )
            for each in last
        )
        self.send(Compute(slices), sampled)


TestCodec = Codec.TestCase
TestCodec.settings = settings(max_examples=examples(40), stateful_step_count=10, deadline=None)


def test_a_step_of_decodes_costs_bytes_for_its_tokens_alone() -> None:
    ids = [RequestId(f"chatcmpl-{number:032x}") for number in range(256)]
    table = tuple(BlockRef(300 + number) for number in range(200))
    codec = Codec()
    for step in range(6):
        mine = ids[:128] if step % 2 else ids[128:]  # two steps in flight have different requests
        slices = tuple(ScheduledSlice(each, 3200 + step // 2, 1, table, samples=True) for each in mine)
        size = codec.send(Compute(slices), [SampledToken(each, 1000) for each in mine] if step > 1 else ())
    assert size < 10 * 128


TIMES = st.lists(st.floats(0, 1e6), max_size=2).map(tuple)
TIMINGS = st.lists(st.builds(RankTiming, TIMES, TIMES, TIMES, NUMBERS), max_size=2).map(tuple)
TRANSFERS = st.builds(
    WeightTransfers,
    st.none() | NUMBERS,
    NUMBERS,
    st.just(0.5),
    st.just(0.25),
    NUMBERS,
    st.just(0.125),
    TIMINGS,
    st.just(0.0625),
)
OUTCOMES = st.builds(
    StepOutcome,
    sampled=st.just(()),
    suspended=st.lists(IDS, max_size=2).map(tuple),
    discarded=st.lists(IDS, max_size=2).map(tuple),
    layers_done=st.integers(0, 9),
    stopped_at_s=st.none() | st.floats(0, 1e6),
    completed_copies=BLOCK_COPIES,
    completed_slot_copies=SLOT_COPIES,
    weight_transfers=TRANSFERS,
)


@given(SLICES, OUTCOMES | st.just(StepOutcome(())), st.data())
def test_outcomes(slices: tuple[ScheduledSlice, ...], outcome: StepOutcome, data: st.DataObject) -> None:
    plan = StepPlan(3, Compute(slices))
    sampling = [each.request_id for each in slices if each.samples]
    if sampling and data.draw(st.booleans()):
        stopped = data.draw(st.sampled_from(sampling))
        sampling.remove(stopped)
        outcome = replace(outcome, discarded=(stopped,))
    logprobs = st.none() | st.builds(TokenLogprobs, st.just(-0.5), st.just(1), st.just(((7, -0.5),)))
    tokens = tuple(SampledToken(each, data.draw(NUMBERS), data.draw(logprobs)) for each in sampling)
    outcome = replace(outcome, sampled=tokens)
    report = msgspec.msgpack.decode(msgspec.msgpack.encode(step_done(plan.step, outcome)), type=StepDone)
    assert outcome_of(report, sampled_of(report, sampling_ids(plan))) == outcome
