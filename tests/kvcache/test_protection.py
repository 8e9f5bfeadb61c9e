"""Unit tests of how much of the online requests' cache is protected, and for how long."""

from __future__ import annotations

import pytest

from backfill.kvcache.content import BlockKey
from backfill.kvcache.protection import CacheProtection

KEYS = [BlockKey(bytes([index])) for index in range(10)]


def unused(num_blocks: int) -> CacheProtection:
    """After many prompts of which nothing was used before."""
    protection = CacheProtection(num_blocks)
    for _ in range(1000):
        protection.observe(KEYS, 0, None, 0.0)
    return protection


def test_half_a_pool_is_protected_until_it_shows_that_nothing_is_used_again() -> None:
    protection = CacheProtection(10)
    assert protection.max_share == 0.5
    for _ in range(40):
        protection.observe(KEYS, 0, None, 0.0)
    assert protection.max_share < 0.01


def test_half_a_pool_is_protected_once_half_of_the_prompts_are_used_again() -> None:
    protection = unused(10)
    shares = [protection.max_share]
    for _ in range(100):
        protection.observe(KEYS, 5, None, 0.0)
        shares.append(protection.max_share)
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(0.5, abs=0.001)


def test_it_follows_a_lower_use_down_again() -> None:
    protection = CacheProtection(10)
    for found in [10] * 50 + [1] * 50:
        protection.observe(KEYS, found, None, 0.0)
    assert protection.max_share == pytest.approx(0.1, abs=0.01)


def test_content_that_was_evicted_too_early_counts_as_used_again() -> None:
    protection = CacheProtection(10)
    for now_s in range(100):
        for key in KEYS:
            protection.remember(key, now_s - 2.0)
        protection.observe(KEYS, 0, None, float(now_s))
    assert protection.max_share == pytest.approx(0.5)
    assert protection.kept_s == pytest.approx(4 * 2.0, abs=0.1)


def test_only_leading_blocks_count_and_only_as_many_keys_as_blocks_are_remembered() -> None:
    protection = unused(3)
    for key in KEYS[:5]:
        protection.remember(key, 0.0)
    for _ in range(9):
        protection.observe(KEYS, 0, None, 1.0)  # the first two are forgotten, so nothing leads
        assert protection.max_share == pytest.approx(0.0)
    protection.observe(KEYS, 2, None, 1.0)
    assert protection.max_share == pytest.approx(0.1 * 5 / 10)


@pytest.mark.parametrize(("reused_after_s", "kept_s"), [(0.1, 5.0), (8.0, 32.0), (600.0, 60.0)])
def test_protection_lasts_four_times_as_long_as_until_reuse_within_bounds(
    reused_after_s: float, kept_s: float
) -> None:
    protection = CacheProtection(10)
    assert protection.kept_s == 60.0
    for _ in range(100):
        protection.observe(KEYS, 10, 1000.0 - reused_after_s, 1000.0)
    assert protection.kept_s == pytest.approx(kept_s, rel=0.01)


def test_prompts_shorter_than_a_block_say_nothing() -> None:
    protection = CacheProtection(10)
    protection.observe(KEYS, 10, None, 0.0)
    before = protection.max_share
    protection.observe([], 0, None, 0.0)
    assert protection.max_share == before > 0
