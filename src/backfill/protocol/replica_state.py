"""What a server tells a router of itself (``GET /state``; docs/router.md)."""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec

# What a router divides by.
_Limit = Annotated[int, msgspec.Meta(ge=1)]
_Speed = Annotated[float, msgspec.Meta(gt=0.0, le=sys.float_info.max)]


class ReplicaState(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of ``GET /state``.

    Attributes:
        instance: of the server process; another one has an empty cache.
        phase: ``ready``, or why requests are not accepted.
        models: names that requests may use; the first is echoed.
        digest: equal for servers of the same model.
        is_offline_suspended: offline requests are refused.
        is_offline_quarantined: so are they for as long as one of them is to run alone.
        max_model_len, max_num_seqs, kv_tokens, ttft_slo_s: limits of the engine, and its objective for
            requests that bring none; meaningful once it was ready.
        prefill_tokens_per_s: at which it computes prompts when it does nothing else. Without a cost model a
            guess, which measured TTFTs correct.
        step_s: mean seconds of the last steps, of which an arrival waits for half; 0 when nothing runs.
        waiting_prompt_tokens: of online requests without a first token, what was to be computed when they
            came; 0 without a cost model.
        num_online, online_tokens: online choices that have not ended, and about their tokens.
        num_offline: offline choices that have not ended.
        num_lines: of batches, that the engine has.
        store: id of its files and batches; empty where it has none.
    """

    instance: str
    phase: str
    models: tuple[str, ...]
    digest: str
    is_offline_suspended: bool = False
    is_offline_quarantined: bool = False
    max_model_len: int = 0
    max_num_seqs: _Limit = 1
    kv_tokens: _Limit = 1
    ttft_slo_s: float = 1.0
    prefill_tokens_per_s: _Speed = 2000.0
    step_s: float = 0.0
    waiting_prompt_tokens: int = 0
    num_online: int = 0
    online_tokens: int = 0
    num_offline: int = 0
    num_lines: int = 0
    store: str = ""


def parse_state(body: bytes) -> ReplicaState:
    """The answer of a server, perhaps an older one: it sends null or 0 for what it cannot tell yet.

    Raises: msgspec.MsgspecError, which names the field; UnicodeDecodeError.
    """
    fields = msgspec.json.decode(body, type=dict[str, object])
    known = {name: value for name, value in fields.items() if value not in (None, 0)}
    return msgspec.convert(known, ReplicaState)
