from __future__ import annotations

import pytest

from backfill.core.block import block_index, is_reversed, pack_block_ref, slot_in_block
from backfill.core.request import FinishReason, RequestStatus
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


def test_a_reversed_block_is_filled_from_its_end() -> None:
    ref = pack_block_ref(5, reverse=True)
    assert (block_index(ref), is_reversed(ref)) == (5, True)
    assert [slot_in_block(offset, 4, is_reversed(ref)) for offset in range(4)] == [3, 2, 1, 0]
    assert not is_reversed(pack_block_ref(5))
