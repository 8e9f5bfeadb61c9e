"""The keys by which content is found."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Literal

from backfill.core.request import Request
from backfill.kvcache.content import BlockKey

_KEY_BYTES = 16
_ROOT_BYTES = 32


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
