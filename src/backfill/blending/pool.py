"""A pool of offline requests, handed out in an order that uses compute and memory evenly."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from backfill.blending.deadlines import BatchWork, Deadlines, ObservedPace, Pace
from backfill.blending.estimates import OutputEstimator, OutputHistory, choose_samples, output_moments
from backfill.blending.requests import OrderName, PlannedRequest, PoolRequest
from backfill.blending.resources import Cost, Expected, OnlineUse, ResourceModel, Work, target_density
from backfill.blending.returned import Returned
from backfill.blending.run import Entry, Run, Scope, State
from backfill.blending.scanner import Blend
from backfill.core.errors import ConfigError, RequestError

MERGE_FACTOR = 2
"""Added requests are planned together with a run of at most so many times their number."""

LONG_RUN_VALUES = 3600
"""Values of ``OfflinePool.online`` in its long-run mean: the server sets one a second, so an hour's."""


@dataclass(frozen=True, slots=True)
class Learned:
    """What a pool has observed of the device and of all requests.

    Attributes:
        online: mean use of the device by online traffic.
        num_online_values: in this mean.
    """

    outputs: OutputHistory
    pace: ObservedPace
    online: OnlineUse
    num_online_values: int


class OfflinePool:
    """Offline requests that wait, and the order in which they run.

    Requests are kept in runs, which are planned apart: one is merged into the next as sorted files are in
    an LSM tree, so a small addition to a large pool does not plan the whole pool again.

    Args:
        kv_tokens: tokens that the KV cache of the device holds. No request can have more.
        sample_share: share of the requests of unknown output length that runs first, for its lengths.
        seed: of the random order and of the choice of samples.
        estimate: of output lengths that are not known.
        learned: by an earlier pool for the same device.

    Raises: ConfigError for a value out of range.
    """

    def __init__(
        self,
        order: OrderName,
        resources: ResourceModel,
        *,
        kv_tokens: int,
        sample_share: float = 0.01,
        seed: int = 0,
        estimate: OutputEstimator = output_moments,
        learned: Learned | None = None,
    ) -> None:
        if order not in get_args(OrderName):
            raise ConfigError(
                f"must be one of {', '.join(get_args(OrderName))}, got {order!r}", field="order"
            )
        if kv_tokens < 1:
            raise ConfigError(f"must be at least 1, got {kv_tokens}", field="kv_tokens")
        if not 0 <= sample_share <= 1:
            raise ConfigError(f"must be from 0 to 1, got {sample_share}", field="sample_share")
        self._order = order
        self.resources = resources
        self._estimate = estimate
        self._sample_share = sample_share if order == "blend" else 0.0
        self._random = random.Random(seed)
        self._sample_phase = self._random.random()
        self._num_added = self._num_runs = 0
        self._entries: dict[int, Entry] = {}  # all that have not ended
        self._runs: list[Run] = []  # each of more waiting requests than the next when it was made
        self._returned = Returned()
        self._samples: dict[str, deque[Entry]] = {}  # by group; those that no longer wait are passed over
        self._history = OutputHistory() if learned is None else replace(learned.outputs)
        self._kv_tokens = kv_tokens
        self._blend = Blend()
        self._left = Work()
        self._deadlines = Deadlines()
        self._pace = Pace(None if learned is None else learned.pace)
        self._online: OnlineUse | None = None
        self._online_long_run = OnlineUse() if learned is None else learned.online
        self._num_online_values = 0 if learned is None else learned.num_online_values

    @property
    def learned(self) -> Learned:
        """What the next pool for the device may begin with. It does not change."""
        return Learned(
            replace(self._history), self._pace.observed, self._online_long_run, self._num_online_values
        )

    @property
    def num_waiting(self) -> int:
        return sum(run.waiting.count for run in self._runs) + len(self._returned)

    @property
    def density(self) -> float:
        """Expected compute over memory time of what has not ended; 0 for an empty pool."""
        return self._left.density if self._entries else 0.0

    @property
    def compute_bound_memory_frac(self) -> float:
        """Of the memory time of what has not ended, the part of waiting requests that are compute-bound.

        Memory time is KV in use, summed over steps. So this is also the part of the KV cache that they will
        need in the mean: M_L over M of section 3.4.
        """
        dense_s = sum(run.compute_bound_memory_s for run in self._runs)
        return dense_s / self._left.memory_s if dense_s else 0.0

    @property
    def online(self) -> OnlineUse:
        """What online traffic uses of the device at present. To be set at regular intervals."""
        return self._online or OnlineUse()

    @online.setter
    def online(self, use: OnlineUse) -> None:
        self._online = use
        self._num_online_values = min(self._num_online_values + 1, LONG_RUN_VALUES)
        self._online_long_run = self._online_long_run.moved_towards(use, 1 / self._num_online_values)

    def add(self, requests: Sequence[PoolRequest], *, merges_all: bool = False) -> None:
        """Add requests and plan them; nothing where all have ended.

        Args:
            merges_all: plan all that waits together, however much that is.

        Raises: RequestError for a request that is malformed or whose id is in use. Nothing was added then.
        """
        added = self._new_entries(requests)
        waiting = [entry for entry in added if entry.state is State.WAITING]
        if not waiting:
            return
        self._num_added += len(added)
        self._entries.update((entry.request_id, entry) for entry in waiting)
        self._history.add(*(entry.num_output_tokens for entry in added if entry.state is State.ENDED))
        self._queue_samples(added)
        num_waiting, merged, replaced = len(waiting), list(added), []
        while self._runs and (merges_all or self._runs[-1].waiting.count <= MERGE_FACTOR * num_waiting):
            replaced.append(self._runs.pop())
            num_waiting += replaced[-1].waiting.count
            merged += replaced[-1].kept_entries()
        self._num_runs += 1
        run = Run(merged, self._num_runs, self._kv_tokens, self._estimate)
        self._plan(run, replaced)
        self._runs.append(run)

    def cancel(self, request_ids: Collection[int]) -> None:
        """Drop requests, waiting or in flight. Unknown ids are ignored."""
        if len(request_ids) > 1:  # a batch; its samples would keep all its prompts in memory
            cancelled = frozenset(request_ids)
            for group, samples in list(self._samples.items()):
                self._samples[group] = deque(each for each in samples if each.request_id not in cancelled)
        for request_id in request_ids:
            entry = self._entries.pop(request_id, None)
            if entry is None:
                continue
            if entry.state is State.WAITING:
                self._remove_waiting(entry)
            elif entry.state is State.RETURNED:
                self._returned.remove(entry)
            else:
                self._blend.remove(entry.expected)
                self._set_so_far(entry, 0)
            self._end(entry)

    def take(
        self, group: str | None = None, *, now_s: float = 0.0, most_output_tokens: float = math.inf
    ) -> PlannedRequest | None:
        """The request to run next, of a group or of all; None where none waits.

        Requests that were put back go first, then batches that would miss their deadline, then samples,
        then the order. In the blend a request that was put back goes first of its kind, compute-bound or
        memory-bound: where one does not fit the memory, the other kind can still run.

        Args:
            group: groups have even shares of the device, in turns that the caller decides.
            now_s: on the clock of deadlines.
            most_output_tokens: what fits the device's KV cache. In the blend, memory-bound requests
                that are expected to generate more are passed over: those put back, and those of the plan if
                another one waits. Batches in danger and samples are not: a deadline is worth a preemption,
                and samples are few and tell what the others need.
        """
        self._pace.advance(now_s, is_busy=self._blend.num_requests > 0)
        target = target_density(self._left, self.online, self._online_long_run)
        is_blend = self._order == "blend"
        from_left = not is_blend or self._blend.needs_compute(target)
        if not is_blend:
            most_output_tokens = math.inf
        entry = (
            self._returned.first(group, most_output_tokens, is_dense=from_left if is_blend else None)
            or self._urgent(group, now_s, from_left)
            or self._sample(group)
            or self._planned(group, from_left, most_output_tokens)
            or self._returned.first(group)
            or self._planned(group, True)
        )
        if entry is None:
            return None
        if entry.state is State.RETURNED:
            self._returned.remove(entry)
        else:
            self._remove_waiting(entry)
            cost = entry.expected.cost
            entry.is_dense = cost.compute_s >= target * cost.memory_s
        entry.state = State.IN_FLIGHT
        self._blend.add(entry.expected)
        return PlannedRequest(
            entry.request_id, self._reused_tokens(entry.prompt), entry.expected.output_tokens
        )

    def put_back(self, request_id: int) -> None:
        """A taken request did not run: it is taken again before others. An id no longer known is ignored."""
        entry = self._in_flight(request_id)
        if entry is None:
            return
        entry.state = State.RETURNED
        self._blend.remove(entry.expected)
        self._set_so_far(entry, 0)
        self._set_left(entry, entry.expected.cost)
        self._returned.add(entry)

    def note_progress(self, request_id: int, num_output_tokens: int) -> None:
        """A taken request has generated so many tokens a choice and runs on. An unknown id is ignored."""
        entry = self._in_flight(request_id)
        if entry is not None:
            self._set_so_far(entry, num_output_tokens)
            left = self._left_of(entry)
            self._pace.add(entry.left.compute_s - left.compute_s, entry.left.memory_s - left.memory_s)
            self._set_left(entry, left)

    def expected_output_tokens(self, request_id: int) -> float | None:
        """Of a taken request, as last corrected; None for an id no longer known."""
        entry = self._in_flight(request_id)
        return None if entry is None else entry.expected.output_tokens

    def finish(self, request_id: int, num_output_tokens: int) -> None:
        """A taken request ended after so many output tokens a choice. An id no longer known is ignored.

        Its length corrects the estimates of requests like it. They are planned again when the number of
        lengths observed has doubled.
        """
        entry = self._in_flight(request_id)
        if entry is None:
            return
        del self._entries[request_id]
        self._blend.remove(entry.expected)
        self._set_so_far(entry, 0)
        self._pace.add(*entry.left)
        self._end(entry)
        if entry.known_output_tokens is not None or num_output_tokens < 1:
            return
        entry.num_output_tokens = num_output_tokens
        self._history.add(num_output_tokens)
        assert entry.run is not None
        if entry.run.observe(entry):
            self._plan(entry.run, [entry.run])

    def _new_entries(self, requests: Sequence[PoolRequest]) -> list[Entry]:
        added: list[Entry] = []
        ids: set[int] = set()
        for sequence, request in enumerate(requests, self._num_added):
            if request.request_id in self._entries or request.request_id in ids:
                raise RequestError(f"request id {request.request_id} is in use", param="request_id")
            ids.add(request.request_id)
            added.append(Entry.of(request, sequence, self._random.random()))
        return added

    def _queue_samples(self, added: Sequence[Entry]) -> None:
        by_prompt = sorted(added, key=lambda entry: entry.prompt)
        flags = [entry.is_unknown for entry in by_prompt]
        chosen, self._sample_phase = choose_samples(flags, self._sample_share, self._sample_phase)
        self._random.shuffle(chosen)
        for index in chosen:
            entry = by_prompt[index]
            self._samples.setdefault(entry.batch.group, deque()).append(entry)

    def _plan(self, run: Run, replaced: Sequence[Run]) -> None:
        """Plan a run, whose expected work replaces that of others or its own of before."""
        for old in replaced:
            for some in old.work_left():
                self._left.remove(*some.cost)
                self._deadlines.remove(some)
        run.plan(self._order, self.resources, self._history)
        for some in run.work_left():
            self._left.add(*some.cost)
            self._deadlines.add(some)
        for entry, mean, mean_square in run.estimated_in_flight():
            self._expect(entry, mean, mean_square)

    def _expect(self, entry: Entry, mean: float, mean_square: float) -> None:
        """Correct what a request in flight is expected to generate in all."""
        old = entry.expected
        num, resources = entry.num_choices, self.resources
        compute_s = old.cost.compute_s + num * resources.token_s * (mean - old.output_tokens)
        memory_s = num * resources.expected_memory_s(float(entry.num_prompt_tokens), mean, mean_square)
        self._blend.remove(old)
        entry.expected = Expected(mean, Cost(compute_s, memory_s))
        self._blend.add(entry.expected)
        self._set_left(entry, self._left_of(entry))

    def _in_flight(self, request_id: int) -> Entry | None:
        entry = self._entries.get(request_id)
        if entry is not None and entry.state is not State.IN_FLIGHT:
            raise RequestError(f"request {request_id} is not in flight", param="request_id")
        return entry

    def _remove_waiting(self, entry: Entry) -> None:
        """Take an entry out of its run, and fix what it is expected to cost."""
        run = entry.run
        assert run is not None
        entry.expected = run.remove(entry.index)
        entry.left = entry.expected.cost
        if run.waiting.count == 0:
            self._runs.remove(run)

    def _end(self, entry: Entry) -> None:
        entry.state = State.ENDED
        self._left.remove(*entry.left)
        self._deadlines.remove(BatchWork(entry.batch, 1, entry.left))

    def _left_of(self, entry: Entry) -> Cost:
        """What a request in flight is expected to do after what it has generated: a token at least."""
        resources, so_far, num = self.resources, entry.num_so_far, entry.num_choices
        done_s = num * resources.memory_s(entry.num_prompt_tokens, so_far)
        least_s = num * resources.cached_token_s * (entry.num_prompt_tokens + so_far)
        return Cost(
            num * resources.token_s * max(entry.expected.output_tokens - so_far, 1.0),
            max(entry.expected.cost.memory_s - done_s, least_s),
        )

    def _set_so_far(self, entry: Entry, num_output_tokens: int) -> None:
        entry.num_so_far = num_output_tokens
        assert entry.run is not None
        entry.run.note_so_far(entry)

    def _set_left(self, entry: Entry, left: Cost) -> None:
        self._left.add(*left)
        self._left.remove(*entry.left)
        self._deadlines.add(BatchWork(entry.batch, 1, left))
        self._deadlines.remove(BatchWork(entry.batch, 1, entry.left))
        entry.left = left

    def _urgent(self, group: str | None, now_s: float, from_left: bool) -> Entry | None:
        """Of a batch that would miss its deadline. Under ``fcfs`` the earliest deadline always goes first."""
        is_fcfs, deadlines = self._order == "fcfs", self._deadlines
        urgent = deadlines.in_order() if is_fcfs else deadlines.urgent(now_s, self._pace.slowdown, group)
        for batch in urgent:
            if group is None or batch.group == group:
                entry = self._planned(batch, from_left)
                if entry is not None:
                    return entry
        return None

    def _sample(self, group: str | None) -> Entry | None:
        for name in list(self._samples) if group is None else [group]:
            samples = self._samples.get(name, deque())
            while samples:
                entry = samples.popleft()
                if entry.state is State.WAITING:
                    return entry
            self._samples.pop(name, None)
        return None

    def _planned(self, scope: Scope, from_left: bool, most_output_tokens: float = math.inf) -> Entry | None:
        """The first waiting request of a scope in the order of all runs, or the last of so few tokens."""
        best: tuple[float, int] | None = None
        best_run: Run | None = None
        for run in self._runs:
            cursor = run.cursor(scope)
            end = cursor.first() if from_left else cursor.last(most_output_tokens)
            if end is not None and (best is None or (end < best if from_left else end > best)):
                best, best_run = end, run
        return best_run.entries[best[1]] if best is not None and best_run is not None else None

    def _reused_tokens(self, prompt: bytes) -> int:
        of_runs = max((run.waiting.longest_shared(prompt) for run in self._runs), default=0)
        return max(of_runs, self._returned.longest_shared(prompt))
