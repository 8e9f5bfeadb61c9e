from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from backfill.core.request import RequestId
from backfill.kvcache.block_manager import BlockManager


@given(num_tokens=st.integers(0, 1000), block_size=st.sampled_from([8, 16, 32]))
def test_blocks_for_is_the_least_that_holds_the_tokens(num_tokens: int, block_size: int) -> None:
    num_blocks = BlockManager(1, block_size).blocks_for(num_tokens)
    assert num_blocks * block_size >= num_tokens
    assert (num_blocks - 1) * block_size < num_tokens or num_blocks == 0


def test_growing_beyond_the_pool_asserts_and_changes_nothing() -> None:
    blocks = BlockManager(num_blocks=2, block_size=4)
    with pytest.raises(AssertionError, match="lacks 3 blocks, 2 are free"):
        blocks.grow(RequestId("a"), 9)
    assert blocks.num_free_blocks == 2
    blocks.check_integrity()


def test_integrity_check_notices_a_block_held_twice() -> None:
    blocks = BlockManager(num_blocks=4, block_size=4)
    blocks.grow(RequestId("a"), 4)
    blocks._free.append(blocks.table(RequestId("a"))[0])
    with pytest.raises(AssertionError):
        blocks.check_integrity()


class BlockManagerMachine(RuleBasedStateMachine):
    """Random grow and release against a model that only counts."""

    request_ids = Bundle("request_ids")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(num_blocks=10, block_size=4)
        self.held: dict[RequestId, int] = {}

    @rule(target=request_ids, name=st.integers(0, 5))
    def name_request(self, name: int) -> RequestId:
        return RequestId(f"r{name}")

    @rule(request_id=request_ids, num_tokens=st.integers(0, 48))
    def grow_if_possible(self, request_id: RequestId, num_tokens: int) -> None:
        before = self.held.get(request_id, 0)
        wanted = max(before, -(-num_tokens // 4))
        fits = sum(self.held.values()) - before + wanted <= 10
        if fits:
            table_before = self.blocks.table(request_id) if before else ()
            self.blocks.grow(request_id, num_tokens)
            self.held[request_id] = wanted
            assert self.blocks.table(request_id)[:before] == table_before, "grown, not moved"

    @rule(request_id=request_ids)
    def release(self, request_id: RequestId) -> None:
        self.blocks.release(request_id)
        self.held.pop(request_id, None)

    @invariant()
    def counts_agree(self) -> None:
        self.blocks.check_integrity()
        assert self.blocks.num_free_blocks == 10 - sum(self.held.values())
        for request_id, held in self.held.items():
            assert self.blocks.num_held_blocks(request_id) == held


TestBlockManagerMachine = BlockManagerMachine.TestCase
