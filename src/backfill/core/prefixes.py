"""Which prefixes each replica, or the one engine, was sent: an approximation of what its KV cache holds.

SGLang's router keeps an approximate radix tree of texts for each replica. Here a prefix is the key of its
last chunk, which depends on all chunks before it, so one table of keys is the tree: a request's longest known
prefix is found with one look-up a chunk for all replicas together.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Mapping, Sequence
from itertools import takewhile

CHUNK_BYTES = 256
"""Of a prompt's text in JSON; about 64 tokens."""

CHUNK_TOKENS = 64
"""Of a prompt of token ids."""

BYTES_PER_TOKEN = CHUNK_BYTES // CHUNK_TOKENS
"""About so many bytes of a prompt's text are a token."""


def text_keys(prompt: bytes, salt: bytes = b"") -> list[int]:
    """A key for each whole chunk of a prompt's bytes. Equal keys mean equal prompts up to there.

    Args:
        salt: prompts with different salts share no key.
    """
    return _keys(prompt, CHUNK_BYTES, hash(salt))


def token_keys(token_ids: tuple[int, ...], salt: Hashable = b"") -> list[int]:
    """The same of token ids."""
    return _keys(token_ids, CHUNK_TOKENS, hash(salt))


def _keys(prompt: bytes | tuple[int, ...], chunk: int, key: int) -> list[int]:
    keys = []
    for end in range(chunk, len(prompt) + 1, chunk):
        key = hash((key, prompt[end - chunk : end]))
        keys.append(key)
    return keys


class PrefixIndex:
    """The chunks that each replica was sent lately, as many as its cache holds.

    A replica forgets the chunk that was sent least lately, the end of a prompt before its beginning, as its
    cache does. What it evicts for outputs and for other routers' requests is not known.
    """

    def __init__(self) -> None:
        self._bits: dict[str, int] = {}  # of each replica, one
        self._chunks: dict[str, OrderedDict[int, None]] = {}  # of each replica, least lately sent first
        self._capacities: dict[str, int] = {}
        self._holders: dict[int, int] = {}  # bits of the replicas that hold a chunk

    def add(self, replica: str, capacity_tokens: int) -> None:
        """A replica with an empty cache, or the capacity of one that is known."""
        self._capacities[replica] = max(1, capacity_tokens // CHUNK_TOKENS)
        if replica not in self._bits:
            used = sum(self._bits.values())
            self._bits[replica] = ~used & (used + 1)  # the lowest that is free
            self._chunks[replica] = OrderedDict()
        self._shrink(replica)

    def remove(self, replica: str) -> None:
        """Forget a replica, whose cache is gone."""
        for key in self._chunks.pop(replica):
            self._drop(key, self._bits[replica])
        del self._bits[replica], self._capacities[replica]

    def share_used(self, replica: str) -> float:
        """Of the replica's capacity, 0 to 1."""
        return len(self._chunks[replica]) / self._capacities[replica]

    def match(self, keys: Sequence[int], among: Collection[str]) -> Mapping[str, int]:
        """Leading chunks that each of these replicas holds."""
        found = dict.fromkeys(among, 0)
        left = {replica: self._bits[replica] for replica in among}
        for num, key in enumerate(keys):
            holders = self._holders.get(key, 0)
            for replica in [replica for replica, bit in left.items() if not bit & holders]:
                found[replica] = num
                del left[replica]
            if not left:
                return found
        found.update(dict.fromkeys(left, len(keys)))
        return found

    def note_sent(self, replica: str, keys: Sequence[int]) -> None:
        """The replica computes a prompt with these chunks, which stay in its cache."""
        chunks, bit = self._chunks[replica], self._bits[replica]
        for key in reversed(keys):
            if key in chunks:
                chunks.move_to_end(key)
            else:
                chunks[key] = None
                self._holders[key] = self._holders.get(key, 0) | bit
        self._shrink(replica)

    def _shrink(self, replica: str) -> None:
        chunks = self._chunks[replica]
        while len(chunks) > self._capacities[replica]:
            key, _ = chunks.popitem(last=False)
            self._drop(key, self._bits[replica])

    def _drop(self, key: int, bit: int) -> None:
        left = self._holders[key] & ~bit
        if left:
            self._holders[key] = left
        else:
            del self._holders[key]


class CachedPrefixes:
    """The prefixes that the KV cache of a server's one engine holds, in tokens."""

    _ENGINE = ""

    def __init__(self, capacity_tokens: int) -> None:
        self._index = PrefixIndex()
        self._index.add(self._ENGINE, capacity_tokens)

    def num_cached(self, prompt_tokens: Sequence[int], keys: Sequence[Sequence[int]]) -> list[int]:
        """The tokens of each prompt of a request that the cache has, or will have of those before it.

        At least one of each is computed, as the first token of its answer is sampled from it.

        Args:
            keys: of each prompt's chunks (``token_keys``); none where it shares no KV.
        """
        cached, before = [], set[int]()
        for tokens, of_prompt in zip(prompt_tokens, keys or [()] * len(prompt_tokens), strict=True):
            num_chunks = self._index.match(of_prompt, (self._ENGINE,))[self._ENGINE]
            num_chunks += sum(1 for _ in takewhile(before.__contains__, of_prompt[num_chunks:]))
            cached.append(min(CHUNK_TOKENS * num_chunks, tokens - 1))
            before.update(of_prompt)
        return cached

    def note_computed(self, keys: Sequence[int]) -> None:
        self._index.note_sent(self._ENGINE, keys)
