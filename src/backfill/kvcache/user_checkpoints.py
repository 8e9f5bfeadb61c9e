"""A checkpoint policy of the user's own, named by its module and class."""

from __future__ import annotations

import logging
from importlib import import_module
from operator import index

from backfill.core.errors import ConfigError
from backfill.kvcache.checkpointing import PoolView

logger = logging.getLogger(__name__)


class UserCheckpoints:
    """See ``CheckpointPolicy``. While the user's policy raises, no running request is checkpointed.

    The class is called without arguments. It needs ``max_blocks`` alone: ``checkpoints_at_preemption`` is
    True where it is missing.

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
        self._path = path
        self._policy = policy
        self._has_failed = False

    def max_blocks(self, view: PoolView) -> int:
        try:
            return index(self._policy.max_blocks(view))
        except Exception:
            if not self._has_failed:
                logger.exception(
                    "the checkpoint policy %s failed and counts as asking for nothing; "
                    "further failures are not logged",
                    self._path,
                )
            self._has_failed = True
            return 0


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
