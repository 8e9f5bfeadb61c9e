from backfill.core.block import *  # noqa: F403  (temporary)
