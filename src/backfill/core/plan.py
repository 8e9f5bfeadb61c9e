"""The two objects between the control plane and an executor: a step's plan and its outcome.

Both are complete when built, immutable, and plain data, so that an executor may be another process or a
simulation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Flag
from typing import NamedTuple, TypeAlias

from backfill.core.block import BlockCopy, BlockMove, BlockRef, SlotCopy
from backfill.core.request import RequestId
from backfill.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """A request that is new to the executor, which keeps its tokens until it is released."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams


class ScheduledSlice(NamedTuple):
    """What one request computes in one step: its tokens at positions ``[start, start + num_tokens)``.

    Attributes:
        blocks: the request's block table, with slots for at least ``start + num_tokens`` tokens. It may grow
            afterwards.
        samples: the last token's logits yield the next output token.
        stoppable: the slice may be stopped at a safepoint; true for offline requests, and for those of an
            owner that gives way to others.
    """

    request_id: RequestId
    start: int
    num_tokens: int
    blocks: Sequence[BlockRef]
    samples: bool
    stoppable: bool = False


@dataclass(frozen=True, slots=True)
class Safepoints:
    """A step may be stopped between two layers, after every ``layers_apart`` layers.

    With ``suspends``, stopped slices are suspended: the executor keeps their hidden states, and a later step
    resumes them at their layer. Otherwise they are discarded and computed again.
    """

    layers_apart: int
    suspends: bool


class CopyDirections(Flag):
    """Directions of copies: device to host (checkpoint), host to device (restore)."""

    NONE = 0
    CHECKPOINT = 1
    RESTORE = 2


@dataclass(frozen=True, slots=True)
class Compute:
    """One forward pass over a batch of slices; without slices nothing is computed.

    Attributes:
        slices: at most one for each request. No slice writes KV that another one reads, so they may be
            computed in any order and at the same time.
        predicted_s: the cost model's prediction for the step; 0 without one.
        safepoints: None if the step cannot be stopped.
    """

    slices: tuple[ScheduledSlice, ...]
    predicted_s: float = 0.0
    safepoints: Safepoints | None = None


@dataclass(frozen=True, slots=True)
class Resume:
    """Suspended slices continue at their layer.

    Attributes:
        slices: as they were suspended, at least one, all of one step. Other suspended slices stay so.
        num_layers: how many layers they run, at most those that are left. If fewer, they are suspended again.
        predicted_s: the cost model's prediction for these layers.
    """

    slices: tuple[ScheduledSlice, ...]
    num_layers: int
    predicted_s: float
    safepoints: Safepoints


@dataclass(frozen=True, slots=True)
class WaitForCopies:
    """Nothing is computed; the executor waits until a copy in flight completes."""


Work: TypeAlias = Compute | Resume | WaitForCopies


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """Copies that begin with a step.

    Attributes:
        checkpoint: from the device to the host.
        restore: from the host to the device; they begin after those of ``checkpoint``.
        blocking: copies of these directions complete before a slice is computed and are not reported. Other
            copies run beside this step and later ones; no slice writes a block that is read, or uses one that
            is written.
        slot_checkpoint: from the device to the host; they begin with those of ``checkpoint``, which name
            other blocks.
        slot_restore: from the host to the device, as ``restore``. Slots of a block that no copy names may be
            read and written meanwhile.
    """

    checkpoint: tuple[BlockCopy, ...] = ()
    restore: tuple[BlockCopy, ...] = ()
    blocking: CopyDirections = CopyDirections.NONE
    slot_checkpoint: tuple[SlotCopy, ...] = ()
    slot_restore: tuple[SlotCopy, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.checkpoint or self.restore or self.slot_checkpoint or self.slot_restore)

    @property
    def stalls(self) -> bool:
        """The slices of the step wait for blocking copies."""
        return bool(
            (CopyDirections.CHECKPOINT in self.blocking and (self.checkpoint or self.slot_checkpoint))
            or (CopyDirections.RESTORE in self.blocking and (self.restore or self.slot_restore))
        )


_NO_COPIES = BlockCopies()


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What device memory is used for.

    Attributes:
        num_blocks: KV blocks that have memory: those of the lowest indices. The others hold nothing.
        interval: the largest offloading interval that weights have memory for.
    """

    num_blocks: int
    interval: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What an executor does in one step: drop, divide memory, move, release, begin copies, admit, then work.

    Attributes:
        step: counts plans made, from 0.
        admitted: requests that appear in a slice for the first time, or again after a failed step.
        released: requests whose state the executor drops before it admits others.
        dropped: requests whose suspended slices will not resume. All other suspended slices are kept.
        offload_interval: one layer in so many is offloaded from this step on; None: as before. Weights need
            no more memory for it than they have.
        bus_share: of a bus that several engines share, what transfers of weights may use from this step on,
            0 to 1, all ranks together; None: as before.
        memory: how device memory is divided from this step on; None: as before.
        moves: copies within the device, in this order, before others begin. No copy in flight and no
            suspended slice uses their blocks.
    """

    step: int
    work: Work
    admitted: tuple[AdmittedRequest, ...] = ()
    released: tuple[RequestId, ...] = ()
    copies: BlockCopies = _NO_COPIES
    offload_interval: int | None = None
    memory: DeviceMemory | None = None
    moves: tuple[BlockMove, ...] = ()
    dropped: tuple[RequestId, ...] = ()
    bus_share: float | None = None

    @property
    def slices(self) -> tuple[ScheduledSlice, ...]:
        return () if isinstance(self.work, WaitForCopies) else self.work.slices

    @property
    def predicted_s(self) -> float:
        return 0.0 if isinstance(self.work, WaitForCopies) else self.work.predicted_s

    @property
    def safepoints(self) -> Safepoints | None:
        return None if isinstance(self.work, WaitForCopies) else self.work.safepoints

    @property
    def does_nothing(self) -> bool:
        """Another plan would be the same, unless something arrives or ends. It need not be run."""
        waits = isinstance(self.work, WaitForCopies)
        changes_memory = self.memory is not None or bool(self.moves)
        changes_state = self.released or self.dropped or changes_memory
        return not (self.slices or waits or self.copies or changes_state)

    @property
    def num_tokens(self) -> int:
        return sum(scheduled.num_tokens for scheduled in self.slices)


def max_in_flight(max_steps: int, plans: Iterable[StepPlan]) -> int:
    """Steps that may be in flight, these among them: so many, and in a pipeline a resumed one beside each.

    A resumed step has a part of the layers, and is short where online requests leave it little time. In the
    place of another step it would leave the other stages nothing to do until the oldest step ends.

    Args:
        max_steps: stages.
    """
    return max_steps + min(sum(isinstance(each.work, Resume) for each in plans), max_steps - 1)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one position, from the logits before any shaping.

    ``rank`` is 1 plus the number of tokens that are more likely. ``top`` holds (token id, log probability)
    pairs, most likely first.
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class PromptLogprobs(NamedTuple):
    """Of the prompt tokens at positions from ``start`` on. The first token of a prompt has none."""

    request_id: RequestId
    start: int
    tokens: tuple[TokenLogprobs, ...]


class SampledToken(NamedTuple):
    request_id: RequestId
    token_id: int
    logprobs: TokenLogprobs | None = None


class ForcedTokens(NamedTuple):
    """What the output of a request goes on with after its sampled token: its grammar leaves no choice."""

    request_id: RequestId
    token_ids: tuple[int, ...]


class FailedRequest(NamedTuple):
    """A request that no step can go on with, and why."""

    request_id: RequestId
    message: str


@dataclass(frozen=True, slots=True)
class RankTiming:
    """What a rank that times its layers has measured since its previous outcome, in seconds.

    Attributes:
        layers_s: computing each layer, in order, from when it has its weights to its end.
        waits_s: before each of these layers, waiting for its weights.
        transfers_s: of each transfer of a layer that has ended, in order.
        layer_bytes: of a transfer.
    """

    layers_s: tuple[float, ...]
    waits_s: tuple[float, ...]
    transfers_s: tuple[float, ...]
    layer_bytes: int


class WeightTransfers(NamedTuple):
    """Transfers of offloaded layers to the device since the previous outcome, and the use of their bus.

    Where the bus is emulated, KV copies go over it too.

    Attributes:
        interval: in use; None without offloading.
        num_bytes: of transfers that were complete when a layer needed them, or that completed then.
        stall_s: time for which layers waited for their weights, summed over the stages of a pipeline.
        transfer_s: that the transfer of one layer takes, the median of the latest ones; 0 before the first.
        copied_bytes: of KV, copied over an emulated bus.
        bus_wait_s: time for which transfers and copies waited for that bus.
        timings: of each rank, by rank; empty unless they time their layers.
        other_stalls_s: of ``stall_s``, that of all stages but the one that waited longest.
    """

    interval: int | None = None
    num_bytes: int = 0
    stall_s: float = 0.0
    transfer_s: float = 0.0
    copied_bytes: int = 0
    bus_wait_s: float = 0.0
    timings: tuple[RankTiming, ...] = ()
    other_stalls_s: float = 0.0

    @property
    def without_times(self) -> WeightTransfers:
        """What was transferred in a step that failed: its times belong to no step."""
        return self._replace(stall_s=0.0, bus_wait_s=0.0, timings=(), other_stalls_s=0.0)

    @property
    def longest_stall_s(self) -> float:
        """Of a stage. While each works on a step of its own, they wait beside each other."""
        return self.stall_s - self.other_stalls_s

    def followed_by(self, later: WeightTransfers) -> WeightTransfers:
        """Both together."""
        return later._replace(
            num_bytes=self.num_bytes + later.num_bytes,
            stall_s=self.stall_s + later.stall_s,
            other_stalls_s=self.other_stalls_s + later.other_stalls_s,
            copied_bytes=self.copied_bytes + later.copied_bytes,
            bus_wait_s=self.bus_wait_s + later.bus_wait_s,
        )


_NO_TRANSFERS = WeightTransfers()


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step produced.

    Attributes:
        sampled: one token for each slice that samples, but for those that were stopped or have failed, in
            the plan's order.
        suspended: requests whose slices were stopped at a safepoint and kept. The KV that they wrote does not
            count as computed yet.
        discarded: requests whose slices were stopped at a safepoint and dropped.
        layers_done: layers that the stopped slices have passed, in earlier steps as well.
        stopped_at_s: time of the stop on the executor's clock; None without one.
        completed_copies: copies of this plan or earlier ones that completed since the previous outcome, in
            any order.
        completed_slot_copies: likewise.
        weight_transfers: those of offloaded layers.
        failed: requests that have to end; their slices count as computed.
        forced: of requests with a sampled token; at most as many as their ``max_tokens`` allow.
        prompt_logprobs: of prompt tokens that this step has scored, of slices that were not stopped.
    """

    sampled: tuple[SampledToken, ...]
    suspended: tuple[RequestId, ...] = ()
    discarded: tuple[RequestId, ...] = ()
    layers_done: int = 0
    stopped_at_s: float | None = None
    completed_copies: tuple[BlockCopy, ...] = ()
    completed_slot_copies: tuple[SlotCopy, ...] = ()
    weight_transfers: WeightTransfers = _NO_TRANSFERS
    failed: tuple[FailedRequest, ...] = ()
    forced: tuple[ForcedTokens, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()

    @property
    def tokens(self) -> list[tuple[RequestId, int]]:
        """All tokens of outputs, each request's in their order."""
        sampled = [(each.request_id, each.token_id) for each in self.sampled]
        return sampled + [(each.request_id, token) for each in self.forced for token in each.token_ids]

    @property
    def stopped(self) -> tuple[RequestId, ...]:
        return self.suspended + self.discarded
