from __future__ import annotations

import pytest

from backfill.core.block import block_index, pack_block_ref
from backfill.core.errors import RequestError
from backfill.core.request import (
    MAX_CACHE_SALT_CHARS,
    MAX_PAUSES,
    FinishReason,
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
