"""Which loads a performance record is measured for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from backfill.offloading.record import Phase, RecordedLoad

Load = tuple[Phase, int, int]  # phase, batch size, length


@dataclass(frozen=True, slots=True)
class LoadGrid:
    """Batch sizes and lengths, all powers of two, and how long they are measured.

    Attributes:
        batch_sizes: of both phases.
        prompt_lengths: of prefills.
        context_lengths: of decodes.
        rounds: most measured runs of each load.
        longest_s: loads larger than one that takes longer than this are left out. Objectives of interactive
            requests rarely exceed a second (section 4.4).
        budget_s: seconds of all runs together; what does not fit is left out, the largest loads first. The
            smallest load of each phase always runs.
        is_thorough: a start does not take the time for it.
    """

    batch_sizes: tuple[int, ...]
    prompt_lengths: tuple[int, ...]
    context_lengths: tuple[int, ...]
    rounds: int
    longest_s: float
    budget_s: float = float("inf")
    is_thorough: bool = False

    def loads(self) -> list[Load]:
        """All loads, those of few tokens first."""
        lengths: dict[Phase, tuple[int, ...]] = {
            "prefill": self.prompt_lengths,
            "decode": self.context_lengths,
        }
        found = [
            (phase, batch_size, length)
            for phase in lengths
            for batch_size in self.batch_sizes
            for length in lengths[phase]
        ]
        return sorted(found, key=lambda load: (load[1] * load[2], load))


def _powers_of_two(first: int, last: int) -> tuple[int, ...]:
    return tuple(1 << power for power in range(first.bit_length() - 1, last.bit_length()))


FULL_LOADS = LoadGrid(
    batch_sizes=_powers_of_two(1, 256),
    prompt_lengths=_powers_of_two(16, 8192),
    context_lengths=_powers_of_two(128, 8192),
    rounds=5,
    longest_s=2.0,
    is_thorough=True,
)
# A start waits for these.
QUICK_LOADS = LoadGrid(
    batch_sizes=(1, 8, 64, 256),
    prompt_lengths=(32, 256, 1024),
    context_lengths=(128, 1024),
    rounds=2,
    longest_s=1.0,
    budget_s=4.0,
)


def is_within(load: Load, other: Load) -> bool:
    """Whether a load of the same phase is no larger than another, in batch size and in length."""
    return load[0] == other[0] and load[1] <= other[1] and load[2] <= other[2]


def never_falling(loads: Iterable[RecordedLoad]) -> tuple[RecordedLoad, ...]:
    """The loads, each with at least the times of those within it: so that larger ones are conservative."""
    found = sorted(loads, key=lambda each: (each.phase, each.batch_size, each.length))
    raised = []
    for load in found:
        within = [each for each in found if is_within(_shape(each), _shape(load))]
        raised.append(
            replace(
                load,
                compute_s=max(each.compute_s for each in within),
                other_s=max(each.other_s for each in within),
            )
        )
    return tuple(raised)


def _shape(load: RecordedLoad) -> Load:
    return load.phase, load.batch_size, load.length
