"""Content: the KV of a block's tokens, wherever it resides, the blocks that hold it, and its keys."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b
from typing import Literal, NewType

from backfill.core.block import BlockRef
from backfill.core.request import Request, ServiceClass

BlockKey = NewType("BlockKey", bytes)

_KEY_BYTES = 16
_ROOT_BYTES = 32


class BlockState(IntEnum):
    """How a block of a pool is used. The smaller the state, the sooner the block is taken for other KV.

    A device block of the states from ``UNNEEDED`` to ``WANTED_ONLINE`` holds content that no table names. A
    host block's may be the copy of a block in a table: it is ``SECURED``.
    """

    EMPTY = 0
    UNNEEDED = 1  # cached: no waiting request of the offline pool needs it, and no other one has used it
    UNWANTED = 2  # cached: nobody is known to come back for it
    SECURED = 3  # wanted or in a table, with a copy in the other tier, complete or in flight: no KV is lost
    WANTED = 4  # of preempted offline requests
    PROTECTED = 5  # used by an online request a short time ago
    WANTED_ONLINE = 6  # of preempted online requests
    COPYING = 7  # holds nothing, and is empty when the copies on it complete
    REFERENCED = 8  # in block tables of offline requests only
    REFERENCED_COPIED = 9  # so, and with a host copy, complete or in flight
    ONLINE = 10  # in the block table of an online request
    ONLINE_COPIED = 11  # so, and with a host copy
    ABSENT = 12  # beyond the end of a pool that is smaller than it may be: has no memory


@dataclass(slots=True, eq=False)
class Block:
    """A block of memory in one of the two pools.

    Attributes:
        ref: its index and direction as block tables hold it, or those of its content in the other pool.
        content: what it holds; None for a block that is empty, or in one request's table and not yet full.
        num_refs: block tables that name it; 0 in the host's pool.
        num_online_refs: those among them that are of online requests.
        num_copies: copies that read or write it, begun or queued. It is not taken before they end.
        is_valid: the KV of the content has arrived; False until the copy to it completes, or is cancelled.
        state: kept by its pool.
        is_pinned: kept by its pool: when ``state`` was set, ``num_copies`` was not 0, or it was beyond the
            pool's end. It is not taken.
        peer: while two requests share the memory from both ends, the other one's block (``sharing.py``).
        is_guest: its pool does not know it, but its peer.
        num_slots: at its end of a shared block, the slots that are in use or about to be written.
    """

    index: int
    ref: BlockRef
    content: Content | None = None
    num_refs: int = 0
    num_online_refs: int = 0
    num_copies: int = 0
    is_valid: bool = True
    state: BlockState = BlockState.EMPTY
    is_pinned: bool = False
    peer: Block | None = None
    is_guest: bool = False
    num_slots: int = 0


@dataclass(slots=True, eq=False)
class Content:
    """The KV of one block's tokens, which depends on them and on all tokens before. It never changes.

    Attributes:
        key: None for the tail of one preempted request: a block that is not full, which others cannot find.
        num_tokens: in the block.
        service_class: of the request that used it last.
        device, host: the blocks that hold it.
        num_wanted: preempted requests that will come back for it.
        released_at_s: when the last request that used it released it.
        is_protected: an online request released it a short time ago.
        has_unplanned_users: a request that used it did not know what others need of its prompt.
        planned_at_s: arrival of the last request among its users that did know.
        is_unneeded: that one knew that no other needs this, and all users were planned.
        num_lost: last tokens of a tail that the peer of its device block has overwritten. The host has them.
        num_unsaved: first tokens of a tail that its host block lacks. The device has them.
    """

    key: BlockKey | None
    num_tokens: int
    service_class: ServiceClass
    device: Block | None = None
    host: Block | None = None
    num_wanted: int = 0
    released_at_s: float = 0.0
    is_protected: bool = False
    has_unplanned_users: bool = False
    planned_at_s: float = -math.inf
    is_unneeded: bool = False
    num_lost: int = 0
    num_unsaved: int = 0

    @property
    def num_device_tokens(self) -> int:
        """Leading tokens that its device block has."""
        return self.num_tokens - self.num_lost

    @property
    def own_block(self) -> Block | None:
        """The device block that tables may name; None for a tail whose block's other end is in use."""
        block = self.device
        return None if block is None or block.peer is not None else block

    @property
    def is_writable(self) -> bool:
        """Of a tail: it exists, and no copy reads the block that its request would write."""
        if self.device is None:
            return self.host is not None
        return not self.device.num_copies or not self.device.is_valid


class Evictable(IntEnum):
    """Whose cached KV an allocation may take, besides blocks that are empty."""

    LOSING_NOTHING = BlockState.SECURED  # what is cached for nobody, and what has a host copy
    OFFLINE = BlockState.WANTED  # and that of preempted offline requests
    ALL = BlockState.WANTED_ONLINE  # and what online requests used a short time ago, or wait for


@dataclass(frozen=True, slots=True)
class Match:
    """Leading tokens of a request whose KV exists.

    Attributes:
        contents: of its leading blocks; each resides on the device, in host memory, or in both.
        num_tokens: tokens in them, never the last of the request's tokens: its logits are needed.
    """

    contents: Sequence[Content]
    num_tokens: int

    @property
    def is_on_device(self) -> bool:
        """All of it can be used now."""
        return all(
            (block := content.own_block) is not None and block.is_valid and not content.num_lost
            for content in self.contents
        )

    @property
    def num_device_blocks(self) -> int:
        return sum(content.own_block is not None for content in self.contents)


class KeyChain:
    """Makes the keys of requests' full blocks: each a hash of the key before it and of the block's token ids.

    The first key's parent is a keyed hash of what requests must have in common to share content, so that no
    client can make content that another one's tokens would find. A key has 128 bits and takes about 0.5 us.

    Args:
        scope: requests share content if they have the same owner and salt, or the same salt. With "request",
            none share any.
        secret: of this process.
    """

    def __init__(self, block_size: int, scope: Literal["owner", "global", "request"], secret: bytes) -> None:
        self._block_size = block_size
        self._scope = scope
        self._secret = secret

    def root_of(self, request: Request) -> BlockKey:
        """Parent of the request's first key."""
        name = {
            "owner": (request.owner, request.cache_salt),
            "global": (request.cache_salt,),
            "request": (request.request_id,),
        }[self._scope]
        text = "".join(f"{len(part)}:{part}" for part in name)
        return BlockKey(blake2b(text.encode(), digest_size=_ROOT_BYTES, key=self._secret).digest())

    def extend(self, keys: list[BlockKey], root: BlockKey, request: Request, num_blocks: int) -> None:
        """Append keys until there is one for each of the request's first ``num_blocks`` blocks."""
        size = self._block_size
        begin, end = len(keys) * size, num_blocks * size
        if begin >= end:
            return
        prompt, output = request.prompt_token_ids, request.output_token_ids
        token_ids: Sequence[int] = prompt[begin:end]
        if end > len(prompt):
            token_ids = [*token_ids, *output[max(0, begin - len(prompt)) : end - len(prompt)]]
        parent = keys[-1] if keys else root
        packed = array("I", token_ids)
        num_bytes = size * packed.itemsize
        text = packed.tobytes()
        for first in range(0, len(text), num_bytes):
            block = text[first : first + num_bytes]
            parent = BlockKey(blake2b(parent + block, digest_size=_KEY_BYTES).digest())
            keys.append(parent)
