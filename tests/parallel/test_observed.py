"""Exchanges between ranks show in their progress while they last."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from backfill.execution.collectives import PeerFailed, RankLinks, SoleSafepointGroup, StageHeader
from backfill.models.decoder import HiddenState
from backfill.parallel.observed import observed
from backfill.parallel.progress import Progress


class LookingGroup(SoleSafepointGroup):
    """Notes whether its own exchanges are seen."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self.progress = progress
        self.seen: list[bool] = []

    def all_reduce(self, x: Tensor) -> Tensor:
        self.seen.append(self.progress.places()[1].exchanges)
        return x


class BrokenLink:
    def send(self, header: StageHeader, state: HiddenState | None) -> None:
        raise PeerFailed

    def receive(self) -> tuple[StageHeader, HiddenState | None]:
        raise PeerFailed

    def close(self) -> None:
        pass


def test_an_exchange_is_seen_while_it_lasts_also_one_that_fails() -> None:
    progress = Progress.of(2)
    group = LookingGroup(progress)
    links = observed(RankLinks(group, following=BrokenLink()), progress.of_rank(1))
    assert links.previous is None and links.following is not None
    links.group.all_reduce(torch.zeros(1))
    assert group.seen == [True]
    assert not progress.places()[1].exchanges
    with pytest.raises(PeerFailed):
        links.following.send(StageHeader(0), None)
    assert not progress.places()[1].exchanges
    links.group.arm(lambda: True)
    assert links.group.stop_agreed
    progress.close()
