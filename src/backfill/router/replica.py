"""A replica as a router knows it: what it last reported, and what it was sent since.

Pure: no I/O, and time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_WEIGHT = 0.05  # of a new ratio of a measured to a predicted TTFT
_MOST_CORRECTION = 4.0
_LEAST_PREDICTED_S = 0.02  # below, the time of messages counts more than that of the prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """What a replica says of itself.

    Attributes:
        prefill_tokens_per_s: at which it computes prompts when it does nothing else.
        step_s: mean seconds of a recent step, of which an arrival waits for half; 0 while it is idle.
        waiting_prompt_tokens: of online prompts without their first token, all routers' and clients'.
        num_online: online requests that have not ended.
        online_tokens: prompts and outputs of them so far.
        max_num_seqs: most requests in a step.
        kv_tokens: tokens that its KV cache holds.
        ttft_s: its objective for online requests that bring none.
    """

    prefill_tokens_per_s: float
    max_num_seqs: int
    kv_tokens: int
    ttft_s: float = 1.0
    step_s: float = 0.0
    waiting_prompt_tokens: int = 0
    num_online: int = 0
    online_tokens: int = 0


class Placement:
    """A request on a replica, until it ends; made by ``ReplicaSet.place``. Repeated calls do nothing."""

    __slots__ = (
        "_is_open",
        "_waits",
        "num_tokens",
        "predicted_s",
        "replica",
        "sent_at_s",
        "tokens_to_compute",
    )

    def __init__(
        self, replica: Replica, num_tokens: int, tokens_to_compute: int, predicted_s: float, now_s: float
    ) -> None:
        self.replica = replica
        self.num_tokens = num_tokens
        self.tokens_to_compute = tokens_to_compute
        self.predicted_s = predicted_s
        self.sent_at_s = now_s
        self._is_open = self._waits = True
        replica.begin(self)

    def on_first_token(self, now_s: float, *, is_measured: bool = True) -> None:
        """Its prompt is computed, as its first token shows, or by the prediction if not ``is_measured``."""
        if self._waits:
            self._waits = False
            self.replica.end_wait(self, now_s, has_token=is_measured)

    def on_end(self, now_s: float) -> None:
        """It has its whole answer, or was given up."""
        if self._waits:
            self._waits = False
            self.replica.end_wait(self, now_s, has_token=False)
        if self._is_open:
            self._is_open = False
            self.replica.end(self)


class LinePlacement:
    """An offline request on a replica, until it ends; made by ``ReplicaSet.place_line``."""

    __slots__ = ("_is_open", "replica")

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self._is_open = True
        replica.num_lines += 1

    def on_first_token(self, now_s: float) -> None:
        """Nothing waits for an offline request."""

    def on_end(self, now_s: float) -> None:
        if self._is_open:
            self._is_open = False
            self.replica.num_lines -= 1


@dataclass(slots=True)
class _OnlineWork:
    """Of some clients. ``waiting_tokens`` are those to compute before their first tokens."""

    num_online: int = 0
    num_tokens: int = 0
    waiting_tokens: int = 0


@dataclass(slots=True, eq=False)
class Replica:
    """A replica as last reported, and what it was sent by this router.

    Attributes:
        name: unique in its ``ReplicaSet``.
        correction: measured over predicted TTFT, smoothed.
        num_lines: offline requests that it was sent and that have not ended.
        num_batch_lines: lines of batches that it has, as last reported.
        is_open: it may be sent requests; takes_lines: offline ones too.
    """

    name: str
    report: ReplicaReport
    correction: float = 1.0
    num_lines: int = 0
    num_batch_lines: int = 0
    is_open: bool = True
    takes_lines: bool = True
    _own: _OnlineWork = field(init=False)
    _others: _OnlineWork = field(init=False)
    _num_waiting: int = field(init=False, default=0)  # own requests without a first token
    _progress_since_s: float = field(init=False, default=0.0)  # of the first of them

    def __post_init__(self) -> None:
        self._own = _OnlineWork()
        self.set_report(self.report)

    @property
    def num_online(self) -> int:
        """Online requests, those of other clients as last reported."""
        return self._own.num_online + self._others.num_online

    @property
    def num_online_tokens(self) -> int:
        return self._own.num_tokens + self._others.num_tokens

    def set_report(self, report: ReplicaReport) -> None:
        """What is reported beyond what this router sent is of other clients."""
        self.report = report
        own = self._own
        self._others = _OnlineWork(
            num_online=max(0, report.num_online - own.num_online),
            num_tokens=max(0, report.online_tokens - own.num_tokens),
            waiting_tokens=max(0, report.waiting_prompt_tokens - own.waiting_tokens),
        )

    def wait_s(self, now_s: float) -> float:
        """Predicted seconds until the computation of a prompt that comes now begins."""
        report = self.report
        own = float(self._own.waiting_tokens)
        if self._num_waiting:
            # The first in the queue is partly computed: how far, says the time since the one before it.
            done = (now_s - self._progress_since_s) * report.prefill_tokens_per_s / self.correction
            own -= min(max(done, 0.0), own / self._num_waiting)
        tokens = own + self._others.waiting_tokens
        return self.correction * tokens / report.prefill_tokens_per_s + report.step_s / 2

    def ttft_s(self, tokens_to_compute: int, now_s: float) -> float:
        """Predicted seconds to the first token of a request that comes now."""
        own_s = self.correction * tokens_to_compute / self.report.prefill_tokens_per_s
        return self.wait_s(now_s) + own_s

    def has_place(self, num_tokens: int) -> bool:
        """Whether online requests leave a place in a step and KV for one more."""
        return (
            self.num_online < self.report.max_num_seqs
            and self.num_online_tokens + num_tokens <= self.report.kv_tokens
        )

    @property
    def line_room(self) -> int:
        """Offline requests that it may be sent beside those that it has.

        Twice the requests of a step, so that lines wait in the engine as they would in one server, less the
        share of the KV cache and of the places that online requests have.
        """
        if not (self.is_open and self.takes_lines):
            return 0
        report = self.report
        used = max(self.num_online / report.max_num_seqs, self.num_online_tokens / report.kv_tokens)
        most = max(1, int(2 * report.max_num_seqs * (1.0 - min(used, 1.0))))
        return max(0, most - self.num_lines - self.num_batch_lines)

    def begin(self, placement: Placement) -> None:
        """This and the next two are called by ``Placement``."""
        self._own.num_online += 1
        self._own.num_tokens += placement.num_tokens
        if not self._num_waiting:
            self._progress_since_s = placement.sent_at_s
        self._num_waiting += 1
        self._own.waiting_tokens += placement.tokens_to_compute

    def end_wait(self, placement: Placement, now_s: float, *, has_token: bool) -> None:
        self._num_waiting -= 1
        self._own.waiting_tokens -= placement.tokens_to_compute
        if not has_token:
            return
        self._progress_since_s = now_s
        if placement.predicted_s >= _LEAST_PREDICTED_S:
            ratio = self.correction * (now_s - placement.sent_at_s) / placement.predicted_s
            ratio = min(max(ratio, 1 / _MOST_CORRECTION), _MOST_CORRECTION)
            self.correction += _WEIGHT * (ratio - self.correction)

    def end(self, placement: Placement) -> None:
        self._own.num_online -= 1
        self._own.num_tokens -= placement.num_tokens
