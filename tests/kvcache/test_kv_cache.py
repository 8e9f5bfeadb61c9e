from __future__ import annotations

from dataclasses import replace
from typing import get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from backfill.core.config import CheckpointingName, PrefixCacheScope
from backfill.core.plan import CopyDirections
from tests.kvcache.kv_driver import Driver, SharingDriver
from tests.kvcache.kv_model import Setup
from tests.shared import examples

BLOCKING = [CopyDirections(bits) for bits in range(4)]


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    return Setup(
        num_blocks=draw(st.integers(6, 12)),
        block_size=draw(st.integers(2, 4)),
        num_host_blocks=draw(st.integers(0, 8)),
        vocab_size=draw(st.integers(2, 3)),
        policy=draw(st.sampled_from(get_args(CheckpointingName))),
        blocking=draw(st.sampled_from(BLOCKING)),
        prefix_caching=draw(st.sampled_from((True, True, False))),
        scope=draw(st.sampled_from(get_args(PrefixCacheScope))),
    )


@settings(max_examples=examples(30))
@given(setup=setups(), seed=st.integers(0, 2**32))
def test_no_use_of_the_cache_loses_mixes_or_overwrites_kv(setup: Setup, seed: int) -> None:
    Driver(setup, seed).run(num_rounds=25)


@settings(max_examples=examples(12))
@given(setup=setups(), block_size=st.sampled_from((4, 8, 16, 32)), seed=st.integers(0, 2**32))
def test_two_requests_in_one_block_lose_mix_or_overwrite_no_kv(
    setup: Setup, block_size: int, seed: int
) -> None:
    SharingDriver(replace(setup, block_size=block_size, bidirectional=True), seed).run(num_rounds=100)


@settings(max_examples=examples(20))
@given(setup=setups(), num_more=st.integers(1, 10), seed=st.integers(0, 2**32))
def test_a_pool_that_grows_and_shrinks_loses_mixes_or_overwrites_no_kv(
    setup: Setup, num_more: int, seed: int
) -> None:
    Driver(replace(setup, max_num_blocks=setup.num_blocks + num_more), seed).run(num_rounds=25)


@settings(max_examples=examples(10))
@given(setup=setups(), num_more=st.integers(1, 10), seed=st.integers(0, 2**32))
def test_shared_blocks_move_with_both_of_their_ends(setup: Setup, num_more: int, seed: int) -> None:
    max_num_blocks = setup.num_blocks + num_more
    resized = replace(setup, block_size=8, bidirectional=True, max_num_blocks=max_num_blocks)
    SharingDriver(resized, seed).run(num_rounds=40)
