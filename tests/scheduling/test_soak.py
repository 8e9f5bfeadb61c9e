from __future__ import annotations

import pytest

from tests.scheduling.soak import Soak


@pytest.mark.parametrize("seed", range(12))
def test_a_random_load_leaves_the_cache_whole(seed: int) -> None:
    """A short one; ``python -m tests.scheduling.soak`` runs for as long as it is told."""
    soak = Soak(seed)
    soak.run(20.0)
    assert soak.num_finished
