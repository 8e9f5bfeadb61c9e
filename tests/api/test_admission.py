from __future__ import annotations

import pytest

from backfill.api.admission import Admission, Overloaded
from backfill.api.quarantine import LineAlone
from backfill.core.clock import VirtualClock
from backfill.core.errors import RequestError
from backfill.core.request import ServiceClass

ONLINE, OFFLINE = ServiceClass.ONLINE, ServiceClass.OFFLINE


def make_admission(online: int = 4, offline: int = 2) -> tuple[Admission, VirtualClock]:
    clock = VirtualClock()
    return Admission({ONLINE: online, OFFLINE: offline}, clock), clock


def retry_after_s(admission: Admission, service_class: ServiceClass, num_choices: int) -> int:
    """The time to retry of a refused request."""
    with pytest.raises(Overloaded) as caught:
        admission.reserve("a", service_class, num_choices)
    assert (caught.value.service_class, caught.value.reason) == (service_class, "queue_full")
    return caught.value.retry_after_s


def test_a_full_class_does_not_limit_the_other() -> None:
    admission, _ = make_admission()
    admission.reserve("a", OFFLINE, 2)
    retry_after_s(admission, OFFLINE, 1)
    for _ in range(4):
        admission.reserve("a", ONLINE, 1)
    retry_after_s(admission, ONLINE, 1)
    assert admission.num_open == 6


def test_more_choices_than_the_limit_are_an_error_of_the_request() -> None:
    admission, _ = make_admission()
    with pytest.raises(RequestError, match="at most 4 online choices") as caught:
        admission.reserve("a", ONLINE, 5)
    assert caught.value.param == "n"
    assert admission.num_open == 0


def test_a_body_is_not_read_when_every_class_is_full() -> None:
    admission, _ = make_admission()
    admission.reserve("a", ONLINE, 4)
    admission.check_capacity("a")
    reservation = admission.reserve("a", OFFLINE, 2)
    with pytest.raises(Overloaded):
        admission.check_capacity("a")
    reservation.release()
    admission.check_capacity("a")


def test_a_reservation_that_cannot_grow_is_unchanged() -> None:
    admission, _ = make_admission()
    reservation = admission.reserve("a", ONLINE, 1)
    admission.reserve("a", ONLINE, 2)
    reservation.resize(2, ONLINE)
    with pytest.raises(Overloaded):
        reservation.resize(3, ONLINE)
    assert admission.num_open == 4
    reservation.resize(1, ONLINE)
    assert admission.num_open == 3
    reservation.release()
    reservation.release()
    assert admission.num_open == 2


def test_a_request_may_turn_out_to_be_of_the_other_class() -> None:
    admission, _ = make_admission()
    reservation = admission.reserve("a", ONLINE, 4)
    reservation.resize(2, OFFLINE)
    admission.reserve("a", ONLINE, 4)
    with pytest.raises(Overloaded):
        reservation.resize(2, ONLINE)
    with pytest.raises(Overloaded):
        admission.reserve("a", OFFLINE, 1)
    assert admission.num_open == 6
    reservation.release()
    admission.reserve("a", OFFLINE, 2)


def test_choices_are_released_one_by_one() -> None:
    admission, _ = make_admission()
    reservation = admission.reserve("a", ONLINE, 3)
    reservation.release_choice()
    assert admission.num_open == 2
    reservation.release()
    reservation.release_choice()
    assert admission.num_open == 0


def test_the_time_to_retry_follows_from_the_rate_of_the_class() -> None:
    admission, clock = make_admission(online=8)
    reservation = admission.reserve("a", ONLINE, 8)
    for _ in range(4):
        clock.advance(3.0)
        reservation.release_choice()
    assert retry_after_s(admission, ONLINE, 6) == 5  # 2 too many; 4 ended in the 9 s since the first did
    admission.reserve("a", OFFLINE, 2)
    assert retry_after_s(admission, OFFLINE, 1) == 1, "no offline choice has ended yet"
    clock.advance(1e6)
    assert retry_after_s(admission, ONLINE, 8) == 120


def test_requests_that_never_ran_do_not_shorten_the_time_to_retry() -> None:
    admission, clock = make_admission(online=4)
    reservation = admission.reserve("a", ONLINE, 4)
    for _ in range(2):
        clock.advance(10.0)
        reservation.release_choice()
    for _ in range(50):
        admission.reserve("a", ONLINE, 1).release()
    clock.advance(10.0)
    admission.reserve("a", ONLINE, 2)
    assert retry_after_s(admission, ONLINE, 1) == 10  # 2 ended in the 20 s since the first did


def test_an_owner_with_less_than_its_even_part_is_not_refused_for_a_flood_of_others() -> None:
    admission, _ = make_admission(online=12)
    flood = [admission.reserve("flood", ONLINE, 1) for _ in range(12)]
    with pytest.raises(Overloaded):
        admission.reserve("flood", ONLINE, 1)
    second = [admission.reserve("second", ONLINE, 1) for _ in range(6)]
    third = [admission.reserve("third", ONLINE, 1) for _ in range(4)]
    for owner in ("flood", "second", "third"):
        with pytest.raises(Overloaded):
            admission.reserve(owner, ONLINE, 1)
    assert admission.num_open == 12 + 6 + 4, "nobody loses what it has"
    for each in [*flood[2:], *second]:
        each.release()
    for _ in range(6):  # there is place again, for whoever asks
        admission.reserve("flood", ONLINE, 1)
    with pytest.raises(Overloaded):
        admission.reserve("flood", ONLINE, 1)
    third[0].resize(3, ONLINE)
    with pytest.raises(Overloaded):
        admission.reserve("third", ONLINE, 1)


def test_a_body_is_read_where_its_owner_has_less_than_its_even_part() -> None:
    admission, _ = make_admission()
    admission.reserve("flood", ONLINE, 4)
    admission.reserve("flood", OFFLINE, 2)
    with pytest.raises(Overloaded):
        admission.check_capacity("flood")
    admission.check_capacity("other")
    admission.reserve("other", OFFLINE, 1)
    admission.reserve("other", ONLINE, 2)
    with pytest.raises(Overloaded):
        admission.check_capacity("other")


def is_refused(admission: Admission, alone: str = "") -> bool:
    try:
        admission.reserve("a", OFFLINE, 1, alone=alone).release()
    except LineAlone:
        return True
    return False


def test_a_line_that_is_to_be_alone_begins_once_the_others_have_ended() -> None:
    admission, _ = make_admission(offline=9)
    others = [admission.reserve("a", OFFLINE, 1), admission.reserve("b", OFFLINE, 2)]
    assert is_refused(admission, "x") and admission.is_offline_quarantined
    assert is_refused(admission) and is_refused(admission, "y"), "no more come, so that its turn does"
    admission.reserve("a", ONLINE, 1)
    others[0].release()
    assert is_refused(admission, "x")
    others[1].release_choice()
    others[1].resize(1, OFFLINE)
    others[1].release_choice()
    assert is_refused(admission) and is_refused(admission, "y")
    alone = admission.reserve("a", OFFLINE, 1, alone="x")
    alone.resize(2, OFFLINE)
    assert is_refused(admission) and is_refused(admission, "y")
    assert is_refused(admission, "x"), "its earlier run, whose answer was lost, has not ended"
    alone.release()
    assert not (admission.is_offline_quarantined or is_refused(admission) or is_refused(admission, "y"))


def test_a_line_that_runs_alone_may_take_long_and_one_that_is_to_may_not_come() -> None:
    admission, clock = make_admission(offline=9)
    alone = admission.reserve("a", OFFLINE, 1, alone="x")
    clock.advance(1e6)
    assert is_refused(admission)
    alone.release()
    other = admission.reserve("a", OFFLINE, 1)
    assert is_refused(admission, "x")
    for _ in range(9):
        clock.advance(4.9)
        assert is_refused(admission) and is_refused(admission, "x")
    clock.advance(5.0)
    assert not (admission.is_offline_quarantined or is_refused(admission)), "its router has given it up"
    other.release()


def test_a_line_that_is_to_be_alone_waits_for_the_lines_of_the_server_too() -> None:
    num_lines = 2
    admission = Admission({OFFLINE: 9}, VirtualClock(), num_lines=lambda: num_lines)
    assert is_refused(admission, "x") and admission.is_offline_quarantined
    num_lines = 0
    alone = admission.reserve("a", OFFLINE, 1, alone="x")
    assert admission.is_offline_quarantined
    alone.release()
    num_lines = 1  # they go on
    assert not (admission.is_offline_quarantined or is_refused(admission)) and is_refused(admission, "y")


def test_a_line_that_has_too_many_choices_leaves_no_quarantine() -> None:
    admission, _ = make_admission(offline=2)
    with pytest.raises(RequestError):
        admission.reserve("a", OFFLINE, 3, alone="x")
    assert not (admission.is_offline_quarantined or is_refused(admission))
