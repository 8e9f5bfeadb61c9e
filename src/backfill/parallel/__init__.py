"""One model on several processes: tensor and pipeline parallel ranks behind one executor."""

from __future__ import annotations

from backfill.core.errors import BackfillError


def require_ray() -> None:
    """Before modules that need Ray are imported. Raises: BackfillError without it."""
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise BackfillError(f"Ray cannot be imported ({error}): pip install 'backfill[ray]'.") from None
