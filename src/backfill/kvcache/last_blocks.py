"""The last block of each request, which is not full: who writes it, and what a preemption leaves in it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from backfill.core.request import Request, RequestId
from backfill.kvcache.content import Block, Content, Match
from backfill.kvcache.store import ContentStore
from backfill.kvcache.table import BlockTable


class LastBlocks:
    """A strategy of the manager: here each request has its last block to itself.

    ``SharedLastBlocks`` is the other one. The manager says what becomes of requests, and asks where a last
    block is concerned.

    The last block of a running request is private. A preemption leaves its tokens there as the request's
    *tail*: content without a key, which only this request finds. It is private again once the request starts.

    Attributes:
        is_on: last blocks may be shared.
        blocks: of requests that share their last block, this block.
        num_entered: blocks that were entered from their other end.
        num_overwritten: slots of tails that were overwritten.
    """

    is_on = False

    def __init__(self, store: ContentStore) -> None:
        self.blocks: dict[RequestId, Block] = {}
        self.num_entered = self.num_overwritten = 0
        self._store = store

    @property
    def num_shared(self) -> int:
        """Blocks whose two ends are both in use."""
        return len({block.index for block in self.blocks.values()})

    @property
    def num_paired(self) -> int:
        """Those of them with a running request at each end: they are in two tables."""
        return len(self.blocks) - self.num_shared

    # What becomes of a request.

    def returning_tail(self, table: BlockTable, num_found: int) -> Content | None:
        """The tail that a match of so many blocks ends with; None if there is none, or not all of it."""
        tail = table.tail
        if tail is None or num_found != len(table.wanted) - 1 or not self._may_return(tail):
            return None
        return tail

    def resume(self, request: Request, table: BlockTable, match: Match) -> Content | None:
        """The request is about to reference its match. Returns: its tail, if the match ends with it."""
        return table.tail if match.contents and match.contents[-1] is table.tail else None

    def restore_lost(self, tail: Content) -> None:
        """The tail is referenced: what it has lost on the device is copied back."""

    def start(self, request: Request, table: BlockTable) -> None:
        """The request takes part in steps from now on. Its tail becomes private: it will be written."""
        self.drop_tail(table)

    def grown(self, request: Request) -> None:
        """The request's table has more blocks."""

    def preempt(
        self, request: Request, table: BlockTable, contents: Sequence[Content], num_tokens: int
    ) -> None:
        """The request will come back for these contents, and for the tokens in the block after them."""
        if table.tail is None and num_tokens:
            table.tail = Content(None, num_tokens, request.service_class)
            self._store.hold(table.tail, table.blocks[len(contents)])
        table.wanted = contents if table.tail is None else [*contents, table.tail]

    def forget(self, request: Request, table: BlockTable) -> None:
        """The request has ended."""
        self.drop_tail(table)

    def release(self, table: BlockTable) -> None:
        """A request is about to drop the references of its table. What it leaves is content."""

    def drop_tail(self, table: BlockTable) -> None:
        """Nobody will come back for the table's tail."""
        if table.tail is not None:
            self._drop(table.tail)
            table.tail = None

    # Blocks to enter, without which others are evicted and requests preempted.

    def may_pair(self, request: Request) -> bool:
        """Whether a running request may share its last block with a running one of the other class."""
        return False

    def can_enter(
        self, request: Request, num_tokens: int, limit: int, matched: Collection[Content] = ()
    ) -> bool:
        """There is a block to enter, which an allocation up to ``limit`` may not take."""
        return False

    def enter_if_short(
        self, request: Request, num_tokens: int, missing: int, limit: int
    ) -> tuple[Block, ...]:
        """Enter a block for the last of those that the request lacks, if too few are free."""
        return ()

    def to_preempt(self, request: Request, num_tokens: int) -> Request | None:
        """Whom to preempt before a running request computes its first ``num_tokens`` tokens; maybe itself."""
        return None

    def reserve_slots(self, request: Request, num_tokens: int) -> bool:
        """The running request is about to write its first ``num_tokens`` tokens.

        Returns: False if it has to wait, because a copy reads a slot that it would write.
        """
        return True

    # Copies.

    def begin_copies(self, max_copies: int) -> None:
        """Begin to copy, while fewer are in flight, tails that the next steps' tokens may overwrite."""

    def end_copies(self) -> None:
        """Copies have completed."""

    def _may_return(self, tail: Content) -> bool:
        """A request may have its tail again: all of it is here, and it can go on writing the block."""
        return tail.is_writable

    def _drop(self, tail: Content) -> None:
        self._store.drop(tail)
