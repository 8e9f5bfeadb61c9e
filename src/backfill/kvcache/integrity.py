"""Checks of the KV cache's own account, for tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from backfill.core.block import is_reversed
from backfill.core.request import RequestId
from backfill.kvcache.content import Block, Content
from backfill.kvcache.last_blocks import LastBlocks
from backfill.kvcache.store import ContentStore
from backfill.kvcache.table import BlockTable


def check_integrity(store: ContentStore, sharing: LastBlocks, tables: Mapping[RequestId, BlockTable]) -> None:
    """Raise AssertionError unless references, contents and copies are counted right in both pools."""
    store.check_integrity()
    sharing.check_integrity()
    refs = Counter[Block]()
    wanted = Counter[Content]()
    for request_id, table in tables.items():
        assert table.num_entered <= len(table.blocks), f"{request_id} has content without blocks"
        assert table.refs == tuple(block.ref for block in table.blocks)
        refs.update(table.blocks)
        wanted.update(table.wanted)
    guests = [block.peer for block in store.device.blocks if block.peer is not None]
    for block in (*store.device.blocks, *guests):
        assert block.num_refs == refs.pop(block, 0), f"references of block {block.index} are miscounted"
    assert not refs, "a table names a block that is in no pool"
    for table in tables.values():
        tail = table.tail
        if tail is not None and tail.num_lost:
            assert tail.device is not None and tail.host is not None, "lost tokens are nowhere"
            assert 0 <= tail.num_unsaved <= tail.num_device_tokens, "lost tokens are not in host memory"
            assert is_reversed(tail.device.ref) is is_reversed(tail.host.ref), "its slots are others there"
    tails = {table.tail for table in tables.values()}
    for block in (*store.device.blocks, *guests, *store.host.blocks):
        held = block.content
        assert held is None or held.num_wanted == wanted[held], "wanted content is miscounted"
        assert held is None or held.key is not None or held in tails, "a tail without a request"
