"""Requests inside a pool, and those that are planned together: one prefix tree, and their order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from backfill.blending.deadlines import BatchWork
from backfill.blending.estimates import Lengths, OutputEstimator, OutputHistory, output_moments
from backfill.blending.order import Forecast, batchllm_order, blend_order, forecast
from backfill.blending.requests import TOKEN_BYTES, Batch, OrderName, PoolRequest, prompt_bytes
from backfill.blending.resources import Cost, Expected, Floats, Ints, ResourceModel
from backfill.blending.scanner import Cursor
from backfill.blending.tree import PrefixTree
from backfill.blending.waiting import Waiting

FIRST_CORRECTION = 16
"""Observed output lengths after which a run is planned again; then after twice as many, and so on."""

LEAST_KEPT = 256
"""So many finished requests are kept where those in flight are weighed against them, however few wait."""

KEY_PROMPTS = 32
"""Neighbours in the order over which a density is averaged, to compare the ends of two runs."""

Scope = str | Batch | None
"""Whose requests: a group's, a batch's, or everyone's."""

_NOT_TAKEN = Expected(1.0, Cost(0.0, 0.0))


class State(Enum):
    WAITING = auto()  # in the plan of its run
    IN_FLIGHT = auto()  # taken
    RETURNED = auto()  # put back, to be taken before those of any plan
    ENDED = auto()  # finished or cancelled


@dataclass(slots=True, eq=False, kw_only=True)
class Entry:
    """A request of a pool, and where it is.

    Attributes:
        prompt: token ids, as bytes of uint32.
        sequence: its number in the order of arrival.
        random_key: uniform in [0, 1), its key in the random order.
        num_output_tokens: what each of its choices generated, once it has finished; 0 before.
        num_so_far: what each has generated in flight, as last noted; else 0.
        weight: of how many finished requests it is the sample.
        run, index: the run that it belongs to and its index there.
        expected: fixed when it is taken; later corrected.
        left: of this, what it has yet to do; valid from when it is taken.
        is_dense: it counts as compute-bound, from when it is taken.
    """

    request_id: int
    prompt: bytes
    batch: Batch
    max_output_tokens: int
    known_output_tokens: int | None
    sequence: int
    random_key: float
    num_choices: int = 1
    num_output_tokens: int = 0
    num_so_far: int = 0
    weight: float = 1.0
    state: State = State.WAITING
    run: Run | None = None
    index: int = -1
    expected: Expected = _NOT_TAKEN
    left: Cost = _NOT_TAKEN.cost
    is_dense: bool = True

    @classmethod
    def of(cls, request: PoolRequest, sequence: int, random_key: float = 0.0) -> Entry:
        """Raises: RequestError for a request that is malformed."""
        return cls(
            request_id=request.request_id,
            prompt=prompt_bytes(request),
            batch=Batch(request.group, request.complete_by_s),
            max_output_tokens=request.max_output_tokens,
            known_output_tokens=request.known_output_tokens,
            sequence=sequence,
            random_key=random_key,
            num_choices=request.num_choices,
            num_output_tokens=request.observed_output_tokens or 0,
            state=State.WAITING if request.observed_output_tokens is None else State.ENDED,
        )

    @property
    def is_unknown(self) -> bool | None:
        """Whether its length is not known; None once it has ended."""
        return None if self.state is State.ENDED else self.known_output_tokens is None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt) // TOKEN_BYTES


class Run:
    """A set of requests that does not grow, its plan, and what is left of it.

    Attributes:
        costs: what those that waited when last planned were expected to cost.
        sequence: their indices in order.
        compute_bound_memory_s: expected memory time of those that wait and are denser than all that waited.

    Args:
        entries: waiting, in flight or ended; the last for their output lengths. They become this run's.
        number: runs made later have larger ones.
        kv_tokens: most tokens of a prompt and its output together; None for any number.
        estimate: of output lengths.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        number: int,
        kv_tokens: int | None = None,
        estimate: OutputEstimator = output_moments,
    ) -> None:
        self.entries = sorted(entries, key=lambda entry: entry.prompt)
        self.number = number
        self._estimate = estimate
        num = len(self.entries)
        prompts = [entry.prompt for entry in self.entries]
        for index, entry in enumerate(self.entries):
            entry.run, entry.index = self, index
        self.tree = PrefixTree.build(prompts)
        is_waiting = (entry.state is State.WAITING for entry in self.entries)
        self.waiting = Waiting(prompts, np.fromiter(is_waiting, np.bool_, num))
        limit = np.fromiter((entry.max_output_tokens for entry in self.entries), np.int64, num)
        if kv_tokens is not None:
            limit = np.clip(kv_tokens - self.tree.num_tokens, 1, limit)
        self._lengths = Lengths(
            finished=np.fromiter((entry.num_output_tokens for entry in self.entries), np.int64, num),
            so_far=np.zeros(num, np.int64),
            known=np.fromiter((entry.known_output_tokens or 0 for entry in self.entries), np.int64, num),
            limit=limit,
            weight=np.fromiter((entry.weight for entry in self.entries), np.float64, num),
        )
        for entry in self.entries:
            self.note_so_far(entry)
        self._num_choices = np.fromiter((entry.num_choices for entry in self.entries), np.float64, num)
        self._num_finished = int((self._lengths.finished > 0).sum())
        self._corrected_at = max(2 * self._num_finished, FIRST_CORRECTION)
        codes: dict[Batch, int] = {}
        self._batch_codes = np.fromiter(
            (codes.setdefault(entry.batch, len(codes)) for entry in self.entries), np.int64, num
        )
        self._batches = list(codes)

    def plan(self, order: OrderName, resources: ResourceModel, history: OutputHistory) -> None:
        """Estimate and order what waits."""
        is_waiting = self.waiting.mask
        outputs = self._estimate(self.tree, self._lengths, history)
        self.costs = forecast(self.tree, resources, is_waiting, outputs, self._num_choices)
        self._is_compute_bound = self.costs.is_compute_bound
        self.compute_bound_memory_s = float(self.costs.memory_s[self._is_compute_bound].sum())
        self.sequence, self._keys = self._ordered(order)
        self._cursors: dict[Scope, Cursor] = {}

    def observe(self, entry: Entry) -> bool:
        """Note a finished request's output length. Returns whether the run should be planned again."""
        self._lengths.finished[entry.index] = entry.num_output_tokens
        self._num_finished += 1
        if self._num_finished < self._corrected_at or self.waiting.count == 0:
            return False
        self._corrected_at = 2 * self._num_finished
        return True

    def note_so_far(self, entry: Entry) -> None:
        """Note what a request in flight has generated; 0 once it runs no more. Known lengths are ignored."""
        if entry.known_output_tokens is None:
            self._lengths.so_far[entry.index] = entry.num_so_far

    def estimated_in_flight(self) -> Iterator[tuple[Entry, float, float]]:
        """Requests of unknown length that have generated some, and the moments of all their tokens."""
        outputs = self.costs.outputs
        for index in np.flatnonzero(self._lengths.so_far):
            yield self.entries[index], float(outputs.mean[index]), float(outputs.square[index])

    def cursor(self, scope: Scope) -> Cursor:
        """The waiting requests of a scope in order."""
        cursor = self._cursors.get(scope)
        if cursor is None:
            chosen = (
                slice(None)
                if scope is None
                else np.isin(self._batch_codes[self.sequence], self._codes(scope))
            )
            cursor = Cursor(self.sequence[chosen], self._keys[chosen], self.costs.outputs.mean, self.waiting)
            self._cursors[scope] = cursor
        return cursor

    def remove(self, index: int) -> Expected:
        """Take a waiting request out. Returns what it is expected to cost."""
        self.waiting.remove(index)
        costs = self.costs
        if self._is_compute_bound[index]:
            self.compute_bound_memory_s -= float(costs.memory_s[index])
        cost = Cost(float(costs.compute_s[index]), float(costs.memory_s[index]))
        return Expected(float(costs.outputs.mean[index]), cost)

    def work_left(self) -> Iterator[BatchWork]:
        """What waits, by batch."""
        waiting = np.flatnonzero(self.waiting.mask)
        codes, num = self._batch_codes[waiting], len(self._batches)
        count = np.bincount(codes, minlength=num)
        compute_s = np.bincount(codes, self.costs.compute_s[waiting], num)
        memory_s = np.bincount(codes, self.costs.memory_s[waiting], num)
        for code in np.flatnonzero(count):
            cost = Cost(float(compute_s[code]), float(memory_s[code]))
            yield BatchWork(self._batches[code], int(count[code]), cost)

    def kept_entries(self) -> list[Entry]:
        """Those that a run which replaces this one needs.

        Of the finished ones as many as wait, evenly spread over the tree: more would hardly change the
        estimates. Where the progress of requests in flight is known, these are weighed against them: each
        that is kept stands for those that are not.
        """
        kept = [entry for entry in self.entries if entry.state is not State.ENDED]
        observed = np.flatnonzero(self._lengths.finished)
        is_censored = bool(self._lengths.so_far.any())
        num_chosen = min(len(observed), max(self.waiting.count, LEAST_KEPT if is_censored else 1))
        chosen = [self.entries[observed[i * len(observed) // num_chosen]] for i in range(num_chosen)]
        if is_censored and chosen:
            factor = float(self._lengths.weight[observed].sum()) / sum(entry.weight for entry in chosen)
            for entry in chosen:
                entry.weight *= factor
        return kept + chosen

    def _codes(self, scope: str | Batch) -> list[int]:
        if isinstance(scope, Batch):
            return [code for code, batch in enumerate(self._batches) if batch == scope]
        return [code for code, batch in enumerate(self._batches) if batch.group == scope]

    def _ordered(self, order: OrderName) -> tuple[Ints, Floats]:
        """The waiting prompts in order, and keys that ascend along it by which runs are compared."""
        waiting = np.flatnonzero(self.costs.is_waiting)
        if order == "blend":
            sequence = blend_order(self.tree, self.costs)
            return sequence, _density_keys(sequence, self.costs)
        if order == "batchllm":
            return batchllm_order(self.tree, self.costs)
        if order == "dfs":  # one tree after the other
            return waiting, np.full(len(waiting), float(self.number))
        entries = [self.entries[index] for index in waiting]
        if order == "fcfs":
            keys = np.array([entry.sequence for entry in entries], np.float64)
        else:
            keys = np.array([entry.random_key for entry in entries], np.float64)
        by_key = np.argsort(keys, kind="stable")
        return waiting[by_key], keys[by_key]


def _density_keys(sequence: Ints, costs: Forecast) -> Floats:
    """Minus the density of each prompt's neighbourhood: large where memory-bound."""
    if len(sequence) == 0:
        return np.zeros(0)
    starts = np.arange(0, len(sequence), KEY_PROMPTS)
    compute_s = np.add.reduceat(costs.compute_s[sequence], starts)
    memory_s = np.add.reduceat(costs.memory_s[sequence], starts)
    return np.repeat(-compute_s / memory_s, KEY_PROMPTS)[: len(sequence)]
