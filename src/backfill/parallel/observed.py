"""Exchanges between ranks that show in ``progress.py`` while they last."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from backfill.execution.collectives import RankLinks, SafepointGroup, StageHeader, StageLink
from backfill.models.decoder import HiddenState
from backfill.parallel.progress import RankProgress


def observed(links: RankLinks, progress: RankProgress) -> RankLinks:
    """The same links, whose exchanges are seen in ``progress``."""
    previous, following = links.previous, links.following
    return RankLinks(
        _ObservedGroup(links.group, progress),
        None if previous is None else _ObservedLink(previous, progress),
        None if following is None else _ObservedLink(following, progress),
    )


class _ObservedGroup:
    """See ``SafepointGroup``."""

    def __init__(self, group: SafepointGroup, progress: RankProgress) -> None:
        self.rank, self.size = group.rank, group.size
        self._group, self._progress = group, progress

    def begin_step(self) -> None:
        self._group.begin_step()

    def fail_step(self) -> None:
        self._group.fail_step()

    def arm(self, is_stop_asked: Callable[[], bool] | None) -> None:
        self._group.arm(is_stop_asked)

    @property
    def stop_agreed(self) -> bool:
        return self._group.stop_agreed

    def all_reduce(self, x: Tensor) -> Tensor:
        with self._progress.exchanging():
            return self._group.all_reduce(x)

    def gather_columns(self, x: Tensor) -> Tensor | None:
        with self._progress.exchanging():
            return self._group.gather_columns(x)

    def close(self) -> None:
        self._group.close()


class _ObservedLink:
    """See ``StageLink``."""

    def __init__(self, link: StageLink, progress: RankProgress) -> None:
        self._link, self._progress = link, progress

    def send(self, header: StageHeader, state: HiddenState | None) -> None:
        with self._progress.exchanging():
            self._link.send(header, state)

    def receive(self) -> tuple[StageHeader, HiddenState | None]:
        with self._progress.exchanging():
            return self._link.receive()

    def close(self) -> None:
        self._link.close()
