"""What the online load is asked of a request, and what it predicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from backfill.scheduling.objectives import lets_pass_until_s


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedPrompts:
    """What the load counts of an online request: the prompt of each choice, and when it is due.

    Attributes:
        num_tokens: of each choice's prompt.
        keys: of each prompt's chunks (``token_keys``); none where it shares no KV.
        first_token_by_s: the instant of its TTFT objective.
    """

    num_tokens: Sequence[int]
    keys: Sequence[Sequence[int]] = ()
    priority: int = 0
    owner: str = ""
    arrived_at_s: float
    first_token_by_s: float

    @property
    def ttft_slo_s(self) -> float:
        return self.first_token_by_s - self.arrived_at_s

    @property
    def lets_pass_until_s(self) -> float:
        return lets_pass_until_s(self.arrived_at_s, self.first_token_by_s)


class Passing(NamedTuple):
    """Predicted seconds of a request that passes longer prompts (``OnlineLoad.passing``).

    Attributes:
        ttft_s: as of ``Prediction``.
        retry_after_s: until it would have less ahead of it: the prompts that it does not pass, or all if what
            the running step may take is too long for its objective.
    """

    ttft_s: float
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted seconds of a request beside the online requests in the server.

    Attributes:
        ttft_s: from its arrival to its first token, after all prompts that are served before it.
        ttft_alone_s: the same without other prompts.
        decode_s: of a step that decodes all online requests and this one.
        decode_alone_s: of a step that decodes this request alone.
    """

    ttft_s: float
    ttft_alone_s: float
    decode_s: float
    decode_alone_s: float
