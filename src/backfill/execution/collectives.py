"""What the executor of one rank exchanges with other ranks. ``backfill.parallel`` implements it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from backfill.models.decoder import HiddenState
from backfill.models.shard import SoleRank, TensorGroup


class PeerFailed(RuntimeError):
    """Another rank has left the step, or has ended: the step fails on this rank too."""


class SafepointGroup(TensorGroup, Protocol):
    """A group whose ranks agree, at safepoints, whether a step stops.

    ConServe (section 4.3) synchronises the workers at each safepoint and broadcasts the flag. Here rank 0's
    decision travels with the sums of the layer before, so no rank can enter a collective that another left.
    """

    def begin_step(self) -> None:
        """Every rank begins every step with this, also after one that failed."""

    def fail_step(self) -> None:
        """This rank leaves the step; the others leave it with ``PeerFailed`` at their next collective."""

    def arm(self, is_stop_asked: Callable[[], bool] | None) -> None:
        """Called before each layer: its sums carry rank 0's answer; None: they carry none."""

    @property
    def stop_agreed(self) -> bool:
        """What the last sum carried, the same on all ranks; False if it carried nothing.

        Where the device computes behind the host: what the layer before the last one carried, if it did.
        """

    def close(self) -> None:
        """Free what the group holds. Ranks that wait for this one get ``PeerFailed``."""


class SoleSafepointGroup(SoleRank):
    """A group of one, which agrees with itself."""

    def __init__(self) -> None:
        self._is_stop_asked: Callable[[], bool] | None = None

    def begin_step(self) -> None:
        self._is_stop_asked = None

    def fail_step(self) -> None:
        pass

    def arm(self, is_stop_asked: Callable[[], bool] | None) -> None:
        self._is_stop_asked = is_stop_asked

    @property
    def stop_agreed(self) -> bool:
        return self._is_stop_asked is not None and self._is_stop_asked()

    def close(self) -> None:
        pass


class Stop(NamedTuple):
    """Stoppable slices left the step at a safepoint, ``at_s`` on the executor's clock."""

    layers_done: int
    at_s: float


class Handover(NamedTuple):
    """What a stage begins a step with, and hands on to the next.

    Attributes:
        last_layer: the layer before which stoppable slices end.
        stop: of the stoppable slices; ``state`` is without them.
        state: rows of the slices, one micro-batch after another; None without rows, and before the first
            stage, which embeds them.
    """

    last_layer: int
    stop: Stop | None = None
    state: HiddenState | None = None


class StageLink(Protocol):
    """A queue of messages from a rank to that of the next stage with the same tensor rank."""

    def send(self, number: int, handover: Handover | None) -> None:
        """Queue a message; blocks while the queue is full. The state may be changed afterwards.

        Args:
            number: counts the steps that a rank has begun.
            handover: None if the step has failed.
        Raises: PeerFailed if the receiver has ended.
        """

    def receive(self) -> tuple[int, Handover | None]:
        """The next message, in the order of sending. Blocks until it is there.

        Raises: PeerFailed if the sender has ended.
        """

    def close(self) -> None:
        """Free what the link holds. The other end, if it waits, gets ``PeerFailed``."""


@dataclass(frozen=True, slots=True)
class RankLinks:
    """How a rank is connected with others.

    Attributes:
        group: the tensor ranks of its stage.
        previous: from the stage before; None for the first.
        following: to the next stage; None for the last.
    """

    group: SafepointGroup
    previous: StageLink | None = None
    following: StageLink | None = None

    def close(self) -> None:
        for each in (self.group, self.previous, self.following):
            if each is not None:
                each.close()
