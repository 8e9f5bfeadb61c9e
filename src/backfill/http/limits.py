"""Limits of what one owner of API keys may have in a server at once, and of how often it may ask."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from backfill.core.clock import Clock
from backfill.core.errors import ConfigError, RequestError
from backfill.core.request import ServiceClass
from backfill.http.errors import MAX_RETRY_AFTER_S, RateLimited

_RATE_WINDOW = 64  # the last ended choices, from which their rate is estimated
_MINUTE_S = 60.0
_ROUNDING_S = 1e-6
# Of an owner's refusals, so many at once and then so many a second are answered at once.
_REFUSALS_AT_ONCE, _REFUSALS_PER_S = 50, 50.0
_LONGEST_REFUSAL_S = 1.0


@dataclass(frozen=True, slots=True)
class OwnerLimits:
    """What an owner may have of a server. None: as much as there is.

    Attributes:
        concurrency: choices in the server, online and flex together.
        queued_tokens: prompt tokens of those that have no first token yet.
        requests_per_minute: so many at once, and then at this rate.
        weight: its part, over the sum of all, where several owners wait for the engine.
    """

    concurrency: int | None = None
    queued_tokens: int | None = None
    requests_per_minute: int | None = None
    weight: float = 1.0


NO_LIMITS = OwnerLimits()
_COUNTS = ("concurrency", "queued-tokens", "requests-per-minute")


def parse_limits(words: Sequence[str]) -> OwnerLimits:
    """The limits of words ``NAME=VALUE``. Raises: ConfigError."""
    fields: dict[str, float] = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in (*_COUNTS, "weight"):
            raise ConfigError(f"a limit must be {', '.join(_COUNTS)} or weight")  # the word may be a key
        if name.replace("-", "_") in fields:
            raise ConfigError(f"{name} is given twice")
        fields[name.replace("-", "_")] = _weight(value) if name == "weight" else _count(name, value)
    return OwnerLimits(**fields)  # type: ignore[arg-type]


def _count(name: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) < 13 and int(value) > 0):
        raise ConfigError(f"{name} must be a whole number, at least 1, got {value[:40]!r}")
    return int(value)


def _weight(value: str) -> float:
    try:
        weight = float(value)
    except ValueError:
        weight = math.nan
    if not 0.001 <= weight <= 1000:
        raise ConfigError(f"weight must be from 0.001 to 1000, got {value[:40]!r}")
    return weight


class EndRate:
    """How fast choices end, from the last of them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ended_at_s = deque[float](maxlen=_RATE_WINDOW)

    def on_end(self, num_choices: int) -> None:
        self._ended_at_s.extend([self._clock.now_s()] * num_choices)

    def retry_after_s(self, num_choices: int) -> int:
        """Whole seconds until so many end at the recent rate, 1 to 120; 1 where there is none."""
        if len(self._ended_at_s) < 2:
            return 1
        elapsed_s = max(1e-3, self._clock.now_s() - self._ended_at_s[0])
        return _whole_s(num_choices * elapsed_s / len(self._ended_at_s))


class EvenParts:
    """What each owner has of something limited, of which several owners get even parts.

    An owner may have all that the others leave. Where too little is left, one that has less than its even
    part is not refused for it: it gets more, and what others have beyond theirs is not taken from them. So n
    owners that fill their parts one after another have up to 1 + 1/2 + ... + 1/n times the limit.

    Attributes: total: of all owners.
    """

    def __init__(self) -> None:
        self.total = 0
        self._of_owner = Counter[str]()

    def num_excess(self, owner: str, num_more: int, limit: int, *, num_released: int = 0) -> int:
        """By how many ``num_more`` are too many for an owner that gives ``num_released`` back; 0 for none."""
        num_own = self._of_owner[owner] - num_released
        num_owners = len(self._of_owner) + (owner not in self._of_owner)
        if num_owners > 1 and num_own * num_owners < limit:
            return 0
        return max(0, self.total - num_released + num_more - limit)

    def add(self, owner: str, num_more: int) -> None:
        """Count so many more, or fewer."""
        assert self._of_owner[owner] + num_more >= 0, (num_more, self._of_owner)
        self.total += num_more
        self._of_owner[owner] += num_more
        if not self._of_owner[owner]:
            del self._of_owner[owner]


class OwnerLimited(RateLimited):
    """An owner has as much as it may have, or has asked too often."""

    def __init__(self, what: str, retry_after_s: int, headers: dict[str, str]) -> None:
        message = f"This API key's owner has reached its limit of {what}. Please retry in {retry_after_s} s."
        # Before the body is read its class is not known; then its limits are those of any request.
        super().__init__(
            message, "rate_limit_exceeded", retry_after_s, ServiceClass.ONLINE, "owner_limit", headers=headers
        )


@dataclass(slots=True)
class _Use:
    """What an owner has."""

    ends: EndRate
    num_choices: int = 0
    num_queued_tokens: int = 0
    paid_until_s: float = -math.inf  # each request pays for its part of a minute, at most a minute ahead
    refused_until_s: float = -math.inf  # each refusal takes its part of a second


class OwnerLimiter:
    """Counts what each owner has.

    Args:
        limits_of: the limits of an owner, as they are now.
    """

    def __init__(self, limits_of: Callable[[str], OwnerLimits], clock: Clock) -> None:
        self._limits_of = limits_of
        self._clock = clock
        self._uses: dict[str, _Use] = {}

    def enter(self, owner: str, *, is_routed: bool = False) -> OwnerSlot:
        """Count a request, of one choice until it is resized.

        Args:
            is_routed: a router sends it, which has limits of its own: here its weight counts alone.
        Raises, counting nothing: OwnerLimited.
        """
        now_s, limits = self._clock.now_s(), self._limits_of(owner)
        if is_routed:
            limits = OwnerLimits(weight=limits.weight)
        use = self._uses.get(owner) or _Use(EndRate(self._clock))
        _check_choices(limits, use, 1)
        if (most := limits.requests_per_minute) is not None:
            use.paid_until_s = _pay(most, use.paid_until_s, now_s)
        self._uses[owner] = use
        use.num_choices += 1
        return OwnerSlot(self, owner, limits, use)

    def now_s(self) -> float:
        return self._clock.now_s()

    async def delay(self, owner: str, refusal: Exception) -> None:
        """Wait before a refusal is answered.

        Who sends what is refused again at once, on many connections, would else keep the event loop from the
        requests of others. A client that waits as it is told never notices.
        """
        refusal.__traceback__ = refusal.__cause__ = refusal.__context__ = None  # their frames have the body
        await asyncio.sleep(self.refuse(owner))

    def refuse(self, owner: str) -> float:
        """Count a refusal. Returns: seconds to wait before it is answered."""
        now_s = self._clock.now_s()
        use = self._uses.setdefault(owner, _Use(EndRate(self._clock)))
        use.refused_until_s = max(use.refused_until_s, now_s) + 1 / _REFUSALS_PER_S
        wait_s = use.refused_until_s - now_s - _REFUSALS_AT_ONCE / _REFUSALS_PER_S
        use.refused_until_s -= max(0.0, wait_s - _LONGEST_REFUSAL_S)
        return min(max(0.0, wait_s), _LONGEST_REFUSAL_S)

    def leave(self, owner: str) -> None:
        """Forget an owner that has nothing, and might ask as often as one that never did."""
        use = self._uses.get(owner)
        if use is None or use.num_choices:
            return
        if max(use.paid_until_s, use.refused_until_s) <= self._clock.now_s():
            del self._uses[owner]


@dataclass(slots=True)
class OwnerSlot:
    """What one request has of its owner's limits; made by ``OwnerLimiter.enter``."""

    _limiter: OwnerLimiter
    _owner: str
    _limits: OwnerLimits
    _use: _Use
    _num_choices: int = 1
    _queued: list[int] = field(default_factory=list)  # prompt tokens of each choice

    @property
    def weight(self) -> float:
        return self._limits.weight

    def headers(self) -> dict[str, str]:
        """Of the request's answer: OpenAI's, of what its owner has left now."""
        limits, headers = self._limits, dict[str, str]()
        if limits.requests_per_minute is not None:
            owed_s = self._use.paid_until_s - self._limiter.now_s()
            headers |= _request_headers(limits.requests_per_minute, owed_s)
        if limits.queued_tokens is not None:
            headers |= _token_headers(limits.queued_tokens, self._use.num_queued_tokens)
        return headers

    def resize(self, num_choices: int, num_prompts: int = 1) -> None:
        """Raises, changing nothing: OwnerLimited, RequestError for more than all that the owner may have."""
        most = self._limits.concurrency
        if most is not None and num_choices > most:
            of_prompts = f" of {num_prompts} prompts" if num_prompts > 1 else ""
            raise RequestError(
                f"This API key may have at most {most} choices at once, got {num_choices}{of_prompts}.",
                param="prompt" if num_prompts > 1 else "n",
            )
        num_more = num_choices - self._num_choices
        if num_more > 0:
            _check_choices(self._limits, self._use, num_more)
        self._use.num_choices += num_more
        self._num_choices = num_choices

    def queue(self, prompt_tokens: Sequence[int]) -> None:
        """Count the prompts of all choices, until their first tokens.

        Raises, changing nothing: OwnerLimited, RequestError for more than all that the owner may have.
        """
        num_tokens, most = sum(prompt_tokens), self._limits.queued_tokens
        if most is not None and num_tokens > most:
            raise RequestError(
                f"This API key may queue at most {most} prompt tokens at once, got {num_tokens}."
            )
        if most is not None and self._use.num_queued_tokens + num_tokens > most:
            headers = _token_headers(most, self._use.num_queued_tokens)
            raise OwnerLimited(f"{most} queued prompt tokens", self._use.ends.retry_after_s(1), headers)
        self._queued = list(prompt_tokens)
        self._use.num_queued_tokens += num_tokens

    def on_first_token(self, choice: int) -> None:
        self._use.num_queued_tokens -= self._queued[choice]
        self._queued[choice] = 0

    def on_choice_end(self, choice: int) -> None:
        """A choice that ran has ended."""
        self.on_first_token(choice)
        if self._num_choices > 0:
            self._num_choices -= 1
            self._use.num_choices -= 1
            self._use.ends.on_end(1)

    def release(self) -> None:
        """Give back what is left. Further calls do nothing."""
        self._use.num_queued_tokens -= sum(self._queued)
        self._use.num_choices -= self._num_choices
        self._queued, self._num_choices = [0] * len(self._queued), 0
        self._limiter.leave(self._owner)


def _check_choices(limits: OwnerLimits, use: _Use, num_more: int) -> None:
    most = limits.concurrency
    if most is not None and (num_excess := use.num_choices + num_more - most) > 0:
        raise OwnerLimited(f"{most} choices at once", use.ends.retry_after_s(num_excess), {})


def _pay(most: int, paid_until_s: float, now_s: float) -> float:
    """Until when an owner has paid with one more request. Raises: OwnerLimited.

    That is the generic cell rate algorithm (ITU-T I.371), a token bucket in one number.
    """
    part_s = _MINUTE_S / most
    until_s = max(paid_until_s, now_s) + part_s
    wait_s = until_s - now_s - _MINUTE_S
    if wait_s > _ROUNDING_S:
        headers = _request_headers(most, paid_until_s - now_s)
        raise OwnerLimited(f"{most} requests a minute", _whole_s(wait_s), headers)
    return until_s


def _request_headers(most: int, owed_s: float) -> dict[str, str]:
    """``owed_s``: the part of a minute that is paid ahead."""
    left_s = _MINUTE_S - max(0.0, owed_s) + _ROUNDING_S
    return {
        "x-ratelimit-limit-requests": str(most),
        "x-ratelimit-remaining-requests": str(max(0, int(left_s * most / _MINUTE_S))),
        "x-ratelimit-reset-requests": f"{max(0.0, owed_s):.3f}s",
    }


def _token_headers(most: int, num_queued: int) -> dict[str, str]:
    return {
        "x-ratelimit-limit-tokens": str(most),
        "x-ratelimit-remaining-tokens": str(max(0, most - num_queued)),
    }


def _whole_s(seconds: float) -> int:
    return min(MAX_RETRY_AFTER_S, max(1, math.ceil(seconds)))
