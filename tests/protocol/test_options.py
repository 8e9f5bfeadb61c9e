from __future__ import annotations

import pytest

from backfill.core.errors import RequestError
from backfill.protocol.options import MAX_RESPONSE_TOKENS, bounded_max_tokens


def bounded(
    requested: int | None, *, choices: int = 1, logprobs: int | None = None, default: int = 8192
) -> int:
    return bounded_max_tokens(
        requested, default, num_choices=choices, num_logprobs=logprobs, most=MAX_RESPONSE_TOKENS
    )


def test_max_tokens_that_fit_are_unchanged() -> None:
    assert bounded(100, choices=128, logprobs=20) == 100
    assert bounded(MAX_RESPONSE_TOKENS) == MAX_RESPONSE_TOKENS


def test_more_is_refused_and_the_message_says_what_is_allowed() -> None:
    with pytest.raises(RequestError, match=r"max_tokens may be 390 at most") as caught:
        bounded(1000, choices=128, logprobs=20)
    assert caught.value.param == "max_tokens"


def test_logprobs_out_of_range_are_left_to_another_check() -> None:
    assert bounded(100, logprobs=-1) == 100
    assert bounded(100, logprobs=10**9) == 100


def test_a_default_is_cut_to_what_is_allowed() -> None:
    assert bounded(None, choices=128, logprobs=20) == 390
    assert bounded(None) == 8192
    with pytest.raises(RequestError):
        bounded_max_tokens(None, 8, num_choices=5, num_logprobs=None, most=4)
