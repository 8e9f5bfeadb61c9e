"""What the blocks of the device's KV pool are used for, over the time of a replay."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from backfill.engine.engine import Engine
from backfill.kvcache.manager import KVCacheManager

SAMPLE_S = 0.5


class KVUse(NamedTuple):
    """Blocks of the device's pool, each counted once.

    Attributes:
        online: that online requests hold, not shared from both ends.
        offline: the same of offline requests.
        shared: whose two ends are both in use, by two requests, or by one and a preempted one's tail.
        preempted: that no request holds, with KV that preempted requests will come back for.
        cached: with other KV that no request holds, or still in a copy.
        empty: without KV.
    """

    online: int
    offline: int
    shared: int
    preempted: int
    cached: int
    empty: int


class KVSample(NamedTuple):
    """The pool at one time.

    Attributes:
        num_table_blocks: blocks in the tables of requests; one in the tables of two counts twice.
    """

    use: KVUse
    num_table_blocks: int

    @classmethod
    def of(cls, kv: KVCacheManager) -> KVSample:
        ends = kv.sharing.blocks.values()
        known = [end for end in ends if not end.is_guest]  # the pool counts a shared block as this end's
        num_online = sum(end.num_online_refs for end in known)
        online = kv.counts.online - num_online
        offline = kv.counts.offline - (len(known) - num_online)
        preempted, empty = kv.counts.wanted, kv.counts.empty
        cached = kv.num_blocks - online - offline - len(known) - preempted - empty
        use = KVUse(online, offline, len(known), preempted, cached, empty)
        return cls(use, online + offline + len(ends))


@dataclass(slots=True)
class KVUsage:
    """Observes a replay's KV pool up to ``duration_s``.

    Attributes:
        num_blocks: of the pool; 0 before the first step.
        samples: every ``SAMPLE_S``, each as the step that it falls into leaves the pool.
        num_steps: observed.
        num_sharing_steps: those after which a block was shared.
        num_entered, num_overwritten: see ``SharedLastBlocks``.
        num_copied: slots of shared blocks.
    """

    duration_s: float
    num_blocks: int = 0
    samples: list[KVSample] = field(default_factory=list)
    num_steps: int = 0
    num_sharing_steps: int = 0
    num_entered: int = 0
    num_overwritten: int = 0
    num_copied: int = 0

    def on_step(self, engine: Engine, began_s: float, ended_s: float) -> None:
        """See ``Observer``."""
        if began_s >= self.duration_s:
            return
        kv = engine.scheduler.kv
        self.num_blocks = kv.num_blocks
        sharing = kv.sharing
        self.num_steps += 1
        self.num_sharing_steps += bool(sharing.blocks)
        self.num_entered = sharing.num_entered
        self.num_overwritten, self.num_copied = sharing.num_overwritten, kv.checkpointer.num_copied_slots
        until_s = min(ended_s, self.duration_s)
        if len(self.samples) * SAMPLE_S < until_s:
            sample = KVSample.of(kv)
            while len(self.samples) * SAMPLE_S < until_s:
                self.samples.append(sample)

    def figures(self) -> dict[str, float]:
        """Means over the samples, in parts of the pool, and counts.

        ``usable`` is the number of blocks in tables, which can be above 1 where blocks are shared.
        """
        num_samples = max(1, len(self.samples))
        whole = max(1, self.num_blocks) * num_samples
        return {
            "usable": sum(sample.num_table_blocks for sample in self.samples) / whole,
            **{
                name: sum(getattr(sample.use, name) for sample in self.samples) / whole
                for name in KVUse._fields
            },
            "sharing_steps": self.num_sharing_steps / max(1, self.num_steps),
            "num_entered_blocks": self.num_entered,
            "num_overwritten_slots": self.num_overwritten,
            "num_copied_slots": self.num_copied,
        }
