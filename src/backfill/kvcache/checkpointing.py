"""Policies that decide which blocks are checkpointed, and when (ConServe, section 4.4)."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from operator import index
from typing import Protocol

from backfill.core.errors import ConfigError
from backfill.core.request import RequestId, ServiceClass

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PoolView:
    """What a checkpoint policy sees.

    Attributes:
        num_blocks: of the device's pool.
        num_free: those that hold neither a running request's KV nor what a preempted one lacks a copy of.
        num_checkpointed: the others that have a host copy, complete or in flight.
        taken_share: blocks that preempted requests lost on the device, over those that were filled, of late.
        copy_cost: what a copy costs, over what it saves if its block is taken so; 0 where it is free.
    """

    num_blocks: int
    num_free: int
    num_checkpointed: int
    taken_share: float = 1.0
    copy_cost: float = 0.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A running request with full blocks that have no host copy.

    Attributes:
        num_blocks: that are full.
        num_checkpointed: leading ones of them that have a host copy, complete or in flight.
    """

    request_id: RequestId
    service_class: ServiceClass
    num_blocks: int
    num_checkpointed: int


class CheckpointPolicy(Protocol):
    """Decides how many blocks of running requests are checkpointed before a step.

    It may have a method ``choose(candidates)`` too, which says of which requests: a sequence of request ids
    and numbers of blocks, in the order of their copies. Each request's next blocks are copied, because those
    behind a block without a copy are of no use. Without it the requests that are preempted first come first.
    """

    checkpoints_at_preemption: bool  # a preempted request's other blocks are checkpointed then

    def max_blocks(self, view: PoolView) -> int:
        """Most blocks to begin checkpointing before the next step."""
        ...


@dataclass(slots=True)
class FixedCheckpoints:
    """No full block, or every one, whatever the pool holds.

    Attributes:
        copies_full_blocks: every block as soon as it is full.
    """

    checkpoints_at_preemption: bool = False
    copies_full_blocks: bool = False

    def max_blocks(self, view: PoolView) -> int:
        return view.num_blocks if self.copies_full_blocks else 0


class AdaptiveCheckpoints:
    """Keeps a share of the used blocks checkpointed. The share grows with the use of the pool.

    It is 0 below ``begins_at`` and 1 from ``complete_at`` on, linear in between (the shape of random early
    detection, to which the paper refers). A constant share makes the rate follow the consumption: as many
    blocks are checkpointed as are filled, and more while the use grows.

    But a copy that costs more than it is likely to save is not made. Who has copies is preempted first, so
    the last block of a share s is of use if more than s is taken. Of their share only the mean is
    observed; with the distribution that assumes nothing else, the exponential one, that happens with
    probability exp(-s / mean). The share ends where this is the copy's cost over what it saves.

    Args:
        begins_at, complete_at: used shares of the pool.
    """

    checkpoints_at_preemption = True

    def __init__(self, begins_at: float, complete_at: float) -> None:
        assert 0.0 <= begins_at < complete_at <= 1.0
        self._begins_at = begins_at
        self._complete_at = complete_at

    def max_blocks(self, view: PoolView) -> int:
        used = view.num_blocks - view.num_free
        pressure = (used / view.num_blocks - self._begins_at) / (self._complete_at - self._begins_at)
        share = min(pressure, 1.0)
        if view.copy_cost > 0.0:
            share = min(share, -view.taken_share * math.log(view.copy_cost))
        return max(0, math.ceil(share * used) - view.num_checkpointed) if share > 0.0 else 0


class UserCheckpoints:
    """A policy of the user's own, named by its module and class.

    While it raises, no running request is checkpointed. The class is called without arguments. It needs
    ``max_blocks`` alone: ``checkpoints_at_preemption`` is True where it is missing, and it may ``choose``
    (``CheckpointPolicy``).

    Args:
        path: such as ``my_package.my_module:MyPolicy``.
    Raises: ConfigError if there is no such class, or it cannot be used.
    """

    def __init__(self, path: str) -> None:
        module_name, _, class_name = path.partition(":")
        option = f"`checkpointing` {path}"
        try:
            module = import_module(module_name)
        except (Exception, SystemExit) as error:  # a script's module may end the process
            raise ConfigError(f"{option}: {module_name} cannot be imported: {_text(error)}.") from error
        policy_class = getattr(module, class_name, None)
        if not callable(policy_class):
            raise ConfigError(f"{option}: {module_name} has no class {class_name}.")
        try:
            policy = policy_class()
        except Exception as error:
            raise ConfigError(f"{option}: {class_name}() raises {_text(error)}.") from error
        if not callable(getattr(policy, "max_blocks", None)):
            raise ConfigError(f"{option}: {class_name} has no method `max_blocks`.")
        self.checkpoints_at_preemption = bool(getattr(policy, "checkpoints_at_preemption", True))
        self.chooses = callable(getattr(policy, "choose", None))
        self._path = path
        self._policy = policy
        self._has_failed = False

    def max_blocks(self, view: PoolView) -> int:
        try:
            return index(self._policy.max_blocks(view))
        except Exception:
            self._log_failure()
            return 0

    def choose(self, candidates: Sequence[Candidate]) -> Sequence[tuple[RequestId, int]]:
        """Of which candidates the next blocks are copied, and how many, if it ``chooses``."""
        known = {each.request_id for each in candidates}
        try:
            chosen = [(name, index(count)) for name, count in self._policy.choose(candidates)]
            return [(name, count) for name, count in chosen if name in known and count > 0]
        except Exception:
            self._log_failure()
            return ()

    def _log_failure(self) -> None:
        if not self._has_failed:
            logger.exception(
                "the checkpoint policy %s failed and counts as asking for nothing; "
                "further failures are not logged",
                self._path,
            )
        self._has_failed = True


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
