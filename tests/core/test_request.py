from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backfill.core.block import BlockCopy, block_index, pack_block_ref
from backfill.core.errors import RequestError
from backfill.core.plan import (
    BlockCopies,
    Compute,
    CopyDirections,
    Resume,
    Safepoints,
    ScheduledSlice,
    StepPlan,
    WaitForCopies,
    Work,
)
from backfill.core.prefixes import CHUNK_BYTES, CHUNK_TOKENS, PrefixIndex, text_keys, token_keys
from backfill.core.request import (
    MAX_CACHE_SALT_CHARS,
    MAX_PAUSES,
    FinishReason,
    RequestId,
    RequestStatus,
    check_cache_salt,
)
from tests.builders import make_request


def test_progress_is_one_difference() -> None:
    request = make_request(prompt_tokens=5)
    assert request.num_pending_tokens == 5
    assert not request.is_decoding
    request.num_computed_tokens = 5
    request.append(9)
    assert request.num_pending_tokens == 1
    assert request.is_decoding


@pytest.mark.parametrize(
    ("path", "illegal"),
    [
        ([], RequestStatus.PREEMPTED),
        ([RequestStatus.RUNNING], RequestStatus.WAITING),
        ([RequestStatus.RUNNING, RequestStatus.PREEMPTED], RequestStatus.WAITING),
        ([RequestStatus.FINISHED], RequestStatus.RUNNING),
    ],
)
def test_illegal_moves_assert(path: list[RequestStatus], illegal: RequestStatus) -> None:
    request = make_request()
    for status in path:
        request.move_to(status)
    with pytest.raises(AssertionError):
        request.move_to(illegal)


def test_the_first_pauses_of_a_request_are_kept_and_all_are_counted() -> None:
    request = make_request()
    request.resume(1.0)
    assert request.pauses == [], "it starts"
    for at_s in range(MAX_PAUSES + 5):
        request.pause(at_s)
        request.resume(at_s + 0.5)
    assert request.pauses == [(at_s, at_s + 0.5) for at_s in range(MAX_PAUSES)]
    assert request.num_preemptions == MAX_PAUSES + 5
    assert request.paused_at_s is None


def test_a_request_finishes_once() -> None:
    request = make_request()
    request.finish(FinishReason.ABORT)
    with pytest.raises(AssertionError):
        request.finish(FinishReason.STOP)


def test_order_is_priority_then_arrival_then_submission() -> None:
    late = make_request(arrived_at_s=2.0)
    early = make_request(arrived_at_s=1.0)
    tied = make_request(arrived_at_s=1.0)
    tied.enqueue(1)
    urgent = make_request(priority=-1, arrived_at_s=9.0)
    ordered = sorted([late, tied, early, urgent], key=lambda request: request.order_key)
    assert ordered == [urgent, early, tied, late]


def test_a_block_reference_is_an_index_and_a_direction() -> None:
    forward, reverse = pack_block_ref(5), pack_block_ref(5, reverse=True)
    assert (forward, reverse) == (10, 11)
    assert block_index(forward) == block_index(reverse) == 5


@pytest.mark.parametrize("salt", ["a", " ", "\0", "é" * MAX_CACHE_SALT_CHARS, "\U0001f9c2"])
def test_any_short_text_is_a_salt(salt: str) -> None:
    check_cache_salt(salt)


@pytest.mark.parametrize(
    ("salt", "problem"),
    [
        ("", "cache_salt must have 1 to 256 characters, got 0."),
        ("secret" * 50, "cache_salt must have 1 to 256 characters, got 300."),
        ("secret\ud800", "cache_salt must be valid Unicode, got half of a surrogate pair."),
        (b"secret", "cache_salt must be a string, got a value of type bytes."),
        (5, "cache_salt must be a string, got a value of type int."),
        (None, "cache_salt must be a string, got a value of type NoneType."),
    ],
)
def test_anything_else_is_refused_without_being_repeated(salt: object, problem: str) -> None:
    with pytest.raises(RequestError) as refused:
        check_cache_salt(salt)
    assert (str(refused.value), refused.value.param) == (problem, "cache_salt")


BLOCKS = tuple(pack_block_ref(index) for index in range(5))
SLICES = (
    ScheduledSlice(RequestId("chat"), start=8, num_tokens=1, blocks=BLOCKS[:3], samples=True),
    ScheduledSlice(RequestId("job"), start=0, num_tokens=6, blocks=BLOCKS[3:], samples=False, stoppable=True),
)
POINTS = Safepoints(2, suspends=True)
COPY = BlockCopy(0, 0)
CHECKPOINT, RESTORE = CopyDirections.CHECKPOINT, CopyDirections.RESTORE


@pytest.mark.parametrize("work", [Compute(SLICES, 0.5, POINTS), Resume(SLICES, 3, 0.5, POINTS)])
def test_a_plan_shows_what_its_work_computes(work: Work) -> None:
    plan = StepPlan(0, work)
    assert (plan.slices, plan.predicted_s, plan.safepoints) == (SLICES, 0.5, POINTS)
    assert plan.num_tokens == 7


def test_a_plan_that_waits_for_copies_computes_nothing() -> None:
    plan = StepPlan(0, WaitForCopies())
    assert (plan.slices, plan.predicted_s, plan.safepoints, plan.num_tokens) == ((), 0.0, None, 0)


@pytest.mark.parametrize(
    ("copies", "stalls"),
    [
        (BlockCopies(), False),
        (BlockCopies(blocking=CHECKPOINT | RESTORE), False),
        (BlockCopies((COPY,), (COPY,)), False),
        (BlockCopies((COPY,), (), RESTORE), False),
        (BlockCopies((), (COPY,), CHECKPOINT), False),
        (BlockCopies((COPY,), (), CHECKPOINT), True),
        (BlockCopies((), (COPY,), RESTORE), True),
    ],
)
def test_slices_wait_for_copies_of_a_blocking_direction_only(copies: BlockCopies, stalls: bool) -> None:
    assert copies.stalls is stalls


@pytest.mark.parametrize(
    ("plan", "does_nothing"),
    [
        (StepPlan(0, Compute(())), True),
        (StepPlan(0, Compute(()), dropped=(RequestId("preempted"),)), False),
        (StepPlan(0, Compute(SLICES)), False),
        (StepPlan(0, Resume(SLICES, 3, 0.5, POINTS)), False),
        (StepPlan(0, WaitForCopies()), False),
        (StepPlan(0, Compute(()), released=(RequestId("ended"),)), False),
        (StepPlan(0, Compute(()), copies=BlockCopies(checkpoint=(COPY,), blocking=CHECKPOINT)), False),
        (StepPlan(0, Compute(()), copies=BlockCopies(restore=(COPY,), blocking=RESTORE)), False),
    ],
)
def test_a_plan_that_begins_copies_or_releases_does_something(plan: StepPlan, does_nothing: bool) -> None:
    assert plan.does_nothing is does_nothing


def test_keys_are_equal_up_to_the_first_difference() -> None:
    first = text_keys(b"a" * 4 * CHUNK_BYTES + b"end")
    second = text_keys(b"a" * 2 * CHUNK_BYTES + b"b" * 2 * CHUNK_BYTES)
    assert len(first) == len(second) == 4
    assert first[:2] == second[:2]
    assert not set(first[2:]) & set(second[2:])
    assert not set(first) & set(text_keys(b"a" * 4 * CHUNK_BYTES, salt=b"another"))
    assert len(token_keys(tuple(range(3 * CHUNK_TOKENS - 1)))) == 2


def test_the_longest_prefix_of_each_replica_is_found() -> None:
    index = PrefixIndex()
    for name in ("a", "b", "c"):
        index.add(name, 100 * CHUNK_TOKENS)
    index.note_sent("a", [1, 2, 3])
    index.note_sent("b", [1, 2, 8, 9])
    assert index.match([1, 2, 3, 4], ["a", "b", "c"]) == {"a": 3, "b": 2, "c": 0}
    index.remove("a")
    assert index.match([1, 2, 3], ["b", "c"]) == {"b": 2, "c": 0}
    index.add("d", 100 * CHUNK_TOKENS)  # takes the place of the one that left, not what it held
    assert index.match([1, 2], ["d"]) == {"d": 0}


def test_the_end_of_what_was_sent_least_lately_is_forgotten_first() -> None:
    index = PrefixIndex()
    index.add("a", 4 * CHUNK_TOKENS)
    index.note_sent("a", [1, 2, 3])
    index.note_sent("a", [1, 7])
    index.note_sent("a", [8])
    assert index.match([1, 2, 3], ["a"]) == {"a": 2}
    assert index.match([1, 7], ["a"]) == {"a": 2}
    assert index.share_used("a") == 1.0


Chain = st.lists(st.integers(0, 3), min_size=1, max_size=6).map(
    lambda path: [hash(tuple(path[: end + 1])) for end in range(len(path))]
)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.one_of(Chain, st.none())), max_size=40))
def test_a_match_is_what_was_sent_and_memory_is_bounded(steps: list[tuple[str, list[int] | None]]) -> None:
    index, sent = PrefixIndex(), dict[str, set[int]]()
    for name, keys in steps:
        if keys is None:
            if name in sent:
                index.remove(name)
                del sent[name]
            continue
        if name not in sent:
            index.add(name, 5 * CHUNK_TOKENS)
            sent[name] = set()
        for other, num in index.match(keys, sent).items():
            assert set(keys[:num]) <= sent[other]
        index.note_sent(name, keys)
        sent[name].update(keys)
        assert index.share_used(name) <= 1.0
        assert index.match(keys, [name])[name] == min(len(keys), 5)
