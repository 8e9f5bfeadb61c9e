"""A replica as a router knows it: what it last reported, and what it was sent since.

Pure: no I/O, and time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from backfill.protocol.replica_state import ReplicaState

_WEIGHT = 0.05  # of a new ratio of a measured to a predicted TTFT
_MOST_CORRECTION = 4.0
_LEAST_PREDICTED_S = 0.02  # below, the time of messages counts more than that of the prompt


@dataclass(slots=True, eq=False)
class Placement:
    """A request on a replica, until it ends; made by ``ReplicaSet``. Repeated calls do nothing.

    Attributes:
        num_tokens: of its prompt; tokens_to_compute: those that are not in the replica's prefix cache.
        predicted_s: to its first token.
        is_offline: nothing waits for it, and only its number counts.
    """

    replica: Replica
    num_tokens: int = 0
    tokens_to_compute: int = 0
    predicted_s: float = 0.0
    sent_at_s: float = 0.0
    is_offline: bool = False
    _waits: bool = field(init=False)
    _is_open: bool = field(init=False, default=True)

    def __post_init__(self) -> None:
        self._waits = not self.is_offline
        self.replica.begin(self)

    def on_first_token(self, now_s: float, *, is_measured: bool = True) -> None:
        """Its prompt is computed, as its first token shows, or by the prediction if not ``is_measured``."""
        if self._waits:
            self._waits = False
            self.replica.end_wait(self)
            if is_measured:
                self.replica.correct(self, now_s)

    def on_end(self) -> None:
        """It has its whole answer, or was given up."""
        if self._waits:
            self._waits = False
            self.replica.end_wait(self)
        if self._is_open:
            self._is_open = False
            self.replica.end(self)


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
        state: as last reported.
        correction: measured over predicted TTFT, smoothed.
        num_lines: offline requests that it was sent and that have not ended.
        is_open: it may be sent requests.
    """

    name: str
    state: ReplicaState
    correction: float = 1.0
    num_lines: int = 0
    is_open: bool = True
    _own: _OnlineWork = field(init=False, default_factory=_OnlineWork)
    _others: _OnlineWork = field(init=False)
    _num_waiting: int = field(init=False, default=0)  # own requests without a first token
    _progress_since_s: float = field(init=False, default=0.0)  # of the first of them

    def __post_init__(self) -> None:
        self.report(self.state)

    @property
    def num_online(self) -> int:
        """Online requests, those of other clients as last reported."""
        return self._own.num_online + self._others.num_online

    @property
    def num_online_tokens(self) -> int:
        return self._own.num_tokens + self._others.num_tokens

    @property
    def takes_lines(self) -> bool:
        """It may be sent offline requests."""
        return self.is_open and not self.state.is_offline_suspended

    def report(self, state: ReplicaState) -> None:
        """What is reported beyond what this router sent is of other clients."""
        self.state = state
        own = self._own
        self._others = _OnlineWork(
            num_online=max(0, state.num_online - own.num_online),
            num_tokens=max(0, state.online_tokens - own.num_tokens),
            waiting_tokens=max(0, state.waiting_prompt_tokens - own.waiting_tokens),
        )

    def wait_s(self, now_s: float) -> float:
        """Predicted seconds until the computation of a prompt that comes now begins."""
        state = self.state
        own = float(self._own.waiting_tokens)
        if self._num_waiting:
            # The first in the queue is partly computed: how far, says the time since the one before it.
            done = (now_s - self._progress_since_s) * state.prefill_tokens_per_s / self.correction
            own -= min(max(done, 0.0), own / self._num_waiting)
        tokens = own + self._others.waiting_tokens
        return self.correction * tokens / state.prefill_tokens_per_s + state.step_s / 2

    def ttft_s(self, tokens_to_compute: int, now_s: float) -> float:
        """Predicted seconds to the first token of a request that comes now."""
        own_s = self.correction * tokens_to_compute / self.state.prefill_tokens_per_s
        return self.wait_s(now_s) + own_s

    def has_capacity(self, num_tokens: int) -> bool:
        """Whether online requests leave a slot in a step and KV for one more."""
        return (
            self.num_online < self.state.max_num_seqs
            and self.num_online_tokens + num_tokens <= self.state.kv_tokens
        )

    @property
    def line_headroom(self) -> int:
        """Offline requests that it may be sent beside those that it has.

        Twice the requests of a step, so that lines wait in the engine as they would in one server, less the
        share of the KV cache and of the step that online requests have.
        """
        if not self.takes_lines or self.state.is_offline_quarantined:
            return 0
        state = self.state
        used = max(self.num_online / state.max_num_seqs, self.num_online_tokens / state.kv_tokens)
        most = max(1, int(2 * state.max_num_seqs * (1.0 - min(used, 1.0))))
        return max(0, most - self.num_lines - state.num_lines)

    def begin(self, placement: Placement) -> None:
        """This and the next three are called by ``Placement``."""
        if placement.is_offline:
            self.num_lines += 1
            return
        self._own.num_online += 1
        self._own.num_tokens += placement.num_tokens
        if not self._num_waiting:
            self._progress_since_s = placement.sent_at_s
        self._num_waiting += 1
        self._own.waiting_tokens += placement.tokens_to_compute

    def end_wait(self, placement: Placement) -> None:
        self._num_waiting -= 1
        self._own.waiting_tokens -= placement.tokens_to_compute

    def correct(self, placement: Placement, now_s: float) -> None:
        """Its first token has come."""
        self._progress_since_s = now_s
        if placement.predicted_s >= _LEAST_PREDICTED_S:
            ratio = self.correction * (now_s - placement.sent_at_s) / placement.predicted_s
            ratio = min(max(ratio, 1 / _MOST_CORRECTION), _MOST_CORRECTION)
            self.correction += _WEIGHT * (ratio - self.correction)

    def end(self, placement: Placement) -> None:
        if placement.is_offline:
            self.num_lines -= 1
            return
        self._own.num_online -= 1
        self._own.num_tokens -= placement.num_tokens
