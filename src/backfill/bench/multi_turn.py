"""Conversations: each turn's prompt is the whole conversation so far and a new message."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from backfill.bench.prompt_text import TextTokenizer, text_of
from backfill.bench.record import BenchRequest, RequestRecord
from backfill.core.config import at_least
from backfill.core.errors import ConfigError
from backfill.core.options import check_types


@dataclass(frozen=True, slots=True)
class Conversation:
    """Requests that are sent one after the other.

    Attributes:
        messages: the new message of each turn, at least one. The first also has the system prompt.
        think_times_s: seconds between the answer to each message but the last and the next message.
    """

    messages: tuple[BenchRequest, ...]
    think_times_s: tuple[float, ...]

    @property
    def due_at_s(self) -> float:
        """When the conversation starts, from the start of the run."""
        return self.messages[0].due_at_s

    @property
    def total_tokens(self) -> int:
        """Tokens of the last turn, its answer included, if all answers have their full length."""
        return sum(message.total_tokens for message in self.messages)

    def due_at(self, instant_s: float) -> Conversation:
        """The conversation, started at another time."""
        first = dataclasses.replace(self.messages[0], due_at_s=instant_s)
        return dataclasses.replace(self, messages=(first, *self.messages[1:]))

    def next_turn(self, turn: int, request: BenchRequest, record: RequestRecord) -> BenchRequest:
        """The request of ``messages[turn]``.

        Args:
            turn: its index, at least 1.
            request, record: the turn before, and its answer.
        """
        message = self.messages[turn]
        assert isinstance(request.prompt, str) and record.sent_at_s is not None
        known_tokens = record.input_tokens + record.output_tokens
        said = {"role": "user", "content": request.prompt}, {"role": "assistant", "content": record.text}
        return dataclasses.replace(
            message,
            history=(*request.history, *said),
            input_tokens=known_tokens + message.input_tokens,
            shared_tokens=known_tokens,
            due_at_s=record.sent_at_s + record.ended_after_s + self.think_times_s[turn - 1],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiTurnConfig:
    """The conversations of dataset multi_turn.

    Attributes:
        multi_turn_num_turns: messages of each conversation, each with an answer.
        multi_turn_first_input_len: tokens of the first message.
        multi_turn_input_len: tokens of each later message.
        multi_turn_output_len: tokens of each answer.
        multi_turn_think_time: mean seconds between an answer and the next message.
        multi_turn_think_time_law: distribution of these seconds.
        multi_turn_system_len: tokens of a system prompt, the same for all conversations; 0 is none.
    """

    multi_turn_num_turns: int = 8
    multi_turn_first_input_len: int = 512
    multi_turn_input_len: int = 128
    multi_turn_output_len: int = 128
    multi_turn_think_time: float = 1.0
    multi_turn_think_time_law: Literal["exponential", "fixed"] = "exponential"
    multi_turn_system_len: int = 0

    def validate(self) -> None:
        """Raises: ConfigError for the first field out of range."""
        check_types(self)
        for field in ("num_turns", "first_input_len", "input_len", "output_len"):
            at_least(f"multi_turn_{field}", getattr(self, f"multi_turn_{field}"), 1)
        at_least("multi_turn_system_len", self.multi_turn_system_len, 0)
        if not (math.isfinite(self.multi_turn_think_time) and self.multi_turn_think_time >= 0):
            raise ConfigError(
                f"`multi_turn_think_time` must be a number of at least 0, got {self.multi_turn_think_time:g}."
            )

    def conversations(
        self, count: int, tokenizer: TextTokenizer, ids: tuple[int, int], seed: np.random.SeedSequence
    ) -> list[Conversation]:
        """``count`` conversations, due at once.

        Messages and think times each have a random generator, so a change of one leaves the other alone.

        Args:
            ids: half-open range of token ids to draw from.
        """
        rng, of_think_times = (np.random.default_rng(each) for each in seed.spawn(2))

        def text(num_tokens: int) -> str:
            return text_of(rng.integers(*ids, num_tokens).tolist(), tokenizer, ids, rng)

        system_len, num_later = self.multi_turn_system_len, self.multi_turn_num_turns - 1
        system = ({"role": "system", "content": text(system_len)},) if system_len else ()
        output_len = self.multi_turn_output_len
        conversations = []
        for index in range(count):
            first_len = self.multi_turn_first_input_len
            first = BenchRequest(
                text(first_len),
                system_len + first_len,
                output_len,
                history=system,
                shared_tokens=system_len if index else 0,
            )
            input_len = self.multi_turn_input_len
            later = [BenchRequest(text(input_len), input_len, output_len) for _ in range(num_later)]
            pauses = self._think_times_s(num_later, of_think_times)
            conversations.append(Conversation((first, *later), pauses))
        return conversations

    def _think_times_s(self, count: int, rng: np.random.Generator) -> tuple[float, ...]:
        if self.multi_turn_think_time_law == "fixed":
            return (self.multi_turn_think_time,) * count
        return tuple(rng.exponential(self.multi_turn_think_time, count).tolist())
