"""One rank's place in a step: which layers it computes, and what it exchanges with other ranks."""

from __future__ import annotations

from collections.abc import Callable, Set
from contextlib import suppress

from backfill.core.plan import Safepoints, StepPlan
from backfill.execution.collectives import Handover, PeerFailed, RankLinks, SoleSafepointGroup, StageLink
from backfill.execution.stop_words import StopWords
from backfill.kernels.stop_signal import StopSignal
from backfill.models.shard import ModelShard


class Stage:
    """The layers of a rank, and its exchange with the other ranks of a step.

    A step is ``begin_step``; if it has slices ``receive``, ``arm`` before each layer and, unless the stage is
    the last one, ``hand_on``; and after an error ``fail_step``. It stops where all ranks of a stage agree
    that it does, behind any layer but the model's last one: what travels with a layer's sums, or with the
    rows to the next stage, tells the others. Each stage sends one message for each step that has slices, also
    without rows or after a failure, so that the next one never waits in vain.

    One process is the stage that has all layers: it is alone and exchanges nothing.

    Attributes:
        step: the plan's, of the step that was begun last.

    Args:
        shard: its group is that of ``links``.
        stops: tensor rank 0 asks it.
        on_layer: called before each layer.
    """

    def __init__(
        self,
        shard: ModelShard,
        links: RankLinks,
        stops: StopWords,
        on_layer: Callable[[int], None] | None = None,
    ) -> None:
        self.shard = shard
        self.layers = shard.layers
        self.step = -1
        self._links = links
        self._group = links.group
        self._stops = stops
        self._on_layer = on_layer
        self._number = 0  # of steps begun; the same on all ranks
        self._signal = stops.signal(self.step)
        self._incoming: StageLink | None = None  # from which the step's message is still to come
        self._outgoing: StageLink | None = None  # to which it is still to go

    @classmethod
    def whole(cls, num_layers: int) -> Stage:
        """All layers of a model, on a rank of its own."""
        stops = StopWords(memoryview(bytearray(8)).cast("q"))
        return cls(ModelShard.whole(num_layers), RankLinks(SoleSafepointGroup()), stops)

    def request_stop(self, step: int) -> None:
        """See ``Executor``."""
        self._stops.request(step)

    def begin_step(self, plan: StepPlan) -> None:
        links = self._links
        self.step = plan.step
        self._number += 1
        self._incoming, self._outgoing = (links.previous, links.following) if plan.slices else (None, None)
        self._signal = self._stops.signal(plan.step)
        self._group.begin_step()

    def fail_step(self) -> None:
        """Leave the step; exchange the messages of it that were not exchanged yet."""
        self._group.fail_step()
        if self._outgoing is not None:
            with suppress(PeerFailed):
                self._outgoing.send(self._number, None)
        if self._incoming is not None:
            with suppress(PeerFailed):
                self._incoming.receive()

    def receive(self) -> Handover:
        """What the stage before hands on; blocks until it does. Raises: PeerFailed."""
        if self._incoming is None:
            return Handover(self.shard.num_layers)
        number, handover = self._incoming.receive()
        self._incoming = None
        if handover is None:
            raise PeerFailed("the stage before has failed in this step")
        assert number == self._number, f"a message of step {number} in step {self._number}"
        return handover

    def hand_on(self, done: Handover) -> None:
        """To the next stage. Raises: PeerFailed."""
        assert self._outgoing is not None, "the last stage hands nothing on"
        self._outgoing.send(self._number, done)
        self._outgoing = None

    @property
    def samples(self) -> bool:
        """The first rank of the last stage does."""
        return self.shard.is_last and self.shard.group.rank == 0

    def safepoints(self, first: int, points: Safepoints | None) -> Set[int]:
        """Layers before which a pass that begins here before layer ``first`` may be stopped.

        Before the first one its ranks exchange nothing in which they could agree. The end of a stage is one:
        behind it the step may wait for the next stage.
        """
        if points is None:
            return frozenset()
        end = self.layers.stop
        at_end = {end} - {self.shard.num_layers}
        return at_end.union(range(first, end, points.layers_apart)[1:])

    def begin_layer(self, layer: int) -> None:
        """Before each layer of a step."""
        if self._on_layer is not None:
            self._on_layer(layer)

    def layers_until(self, layer: int, pauses: Set[int]) -> range:
        """Layers from ``layer`` to the next of ``pauses``, or that one alone where each is reported."""
        if self._on_layer is not None:
            return range(layer, layer + 1)
        return range(layer, min(each for each in pauses if each > layer))

    def arm(self, layers: range, safepoints: Set[int]) -> None:
        """Ask whether to stop while layers are computed, if one of the safepoints follows."""
        # One layer more: a group may know only what the one before the last has carried.
        reaches_one = not safepoints.isdisjoint(range(layers.start + 1, layers.stop + 2))
        self._group.arm(self._signal.is_set if reaches_one else None)

    def stop_signal(self, points: Safepoints | None) -> StopSignal | None:
        """For layers that are run from a safepoint, or from the beginning of a pass."""
        return None if points is None else self._signal._replace(layers_apart=points.layers_apart)

    @property
    def stop_agreed(self) -> bool:
        """Whether the step stops at the safepoint that it has reached; the same on all ranks."""
        return self._group.stop_agreed

    def close(self) -> None:
        """Leave the group and the links. No other call may follow."""
        self._links.close()
